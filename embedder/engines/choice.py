"""Choose the engine and precision of a bundle: of those allowed here, the fastest on this machine.

Measured speeds are kept in the cache folder, so the next start opens only the chosen mode.
"""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Generic, Protocol, TypeVar, get_args

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import write_whole
from kinlens.embedder.engines.models import PROVIDERS, SessionSettings, absence, engine_versions
from kinlens.embedder.errors import BundleError, GoldenMismatchError, ProviderError
from kinlens.embedder.machine import cache_folder, processor
from kinlens.embedder.manifest import FP32, Engine, Mode, OtherPrecision, Precision
from kinlens.embedder.types import Embed, Embeddings, Images

MIN_GAIN = 1.2
"""Minimum speed-up over fp32 for another mode. MobileNetV2 reaches 1.5 to 3 in int8 with VNNI and
1.5 to 2 in bf16. Differences below 20 % are close to the noise of short runs."""

FASTER: dict[str, OtherPrecision] = {"cpu": "int8", "cuda": "fp16"}
"""The precision of the additional file that an export writes for a device."""

_TIMED_RUNS = 5

Outcome = float | str
"""The speed of a mode relative to the first one, or why it was refused."""

SpeedGains = Callable[[Mapping[Mode, Embed], Images], dict[Mode, float]]


def speed_gains(embeds: Mapping[Mode, Embed], images: Images) -> dict[Mode, float]:
    """Measure the speed of each mode on `images`, relative to the first mode.

    The modes run in turn and the best time of each counts, because other load can only slow a run
    down. Every mode must have run on `images` before, as a warm-up.
    """
    best = dict.fromkeys(embeds, math.inf)
    for _ in range(_TIMED_RUNS):
        for mode, embed in embeds.items():
            started = perf_counter()
            embed(images)
            best[mode] = min(best[mode], perf_counter() - started)
    first = next(iter(best.values()))
    return {mode: first / seconds for mode, seconds in best.items()}


def may_mix(one: str, other: str) -> bool:
    """Whether vectors of two precisions, or mixtures such as fp32+int8, may be compared.

    The export compares each precision with fp32 only. The engine does not matter: the golden
    vectors keep all engines of one precision close to fp32.
    """
    pairs = itertools.product(one.split("+"), other.split("+"))
    return all(first == second or "fp32" in (first, second) for first, second in pairs)


class Running(Protocol):
    """A model that runs in one mode."""

    provider: str
    mode: Mode
    precision_reason: str

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm."""


Opened = TypeVar("Opened", bound=Running)


class Choice(Generic[Opened]):
    """The choice between the modes of a bundle; `opens` loads one and checks its golden vectors.

    `table` has a row for each mode: its speed relative to the first one that runs, or why it is not
    chosen; None if it is not compared.
    """

    def __init__(
        self,
        opens: Callable[[Mode], Opened],
        bundle: Bundle,
        settings: SessionSettings,
        gains: SpeedGains,
    ) -> None:
        self._opens = opens
        self._bundle = bundle
        self._settings = settings
        self._gains = gains
        self._table: dict[Mode, Outcome | None] = {}

    def open(self) -> Opened:
        """The embedder in the chosen mode. Raises: BundleError."""
        modes = self._modes()
        if len(modes) == 1:
            return self._explained(self._opens(modes[0]))
        if self._settings.device == "cpu":
            known = _read_measured(self._bundle.bundle_id, modes, self._settings.threads)
            # It fails if something changed that the cache key does not cover: measure again.
            with contextlib.suppress(BundleError):
                if known is not None:
                    embedder = self._opens(_best_of(known))
                    self._table |= known
                    return self._explained(embedder)
        return self._explained(self._fastest(modes))

    def _modes(self) -> list[Mode]:
        """The modes that may run; the first is the baseline that others must beat. A mode that the
        export did not measure is returned only if it was requested and no other mode is available.

        Raises: ProviderError, BundleError if no mode may run.
        """
        settings = self._settings
        engines = get_args(Engine) if settings.engine == "auto" else (settings.engine,)
        precisions: tuple[Precision, ...] = ("fp32", "bf16", "int8")
        if settings.device == "cuda":
            precisions = ("fp32", "fp16")
        if settings.precision != "auto":
            precisions = (settings.precision,)
        for mode in [Mode(engine, precision) for precision in precisions for engine in engines]:
            # fp32 in OpenVINO is only as fast as in onnxruntime (docs/benchmarks.md).
            if settings.engine != "auto" or mode != ("openvino", "fp32"):
                self._table[mode] = self._why_not(mode)
        modes = [mode for mode, reason in self._table.items() if reason is None]
        if not modes:
            reasons = " ".join(dict.fromkeys(map(str, self._table.values())))
            raise ProviderError(f"The model {self._bundle.bundle_id[:12]} cannot run. {reasons}")
        return [mode for mode in modes if mode in self._bundle.modes()] or modes

    def _why_not(self, mode: Mode) -> str | None:
        """Why `mode` must not be chosen; None if it may.

        Raises: BundleError if the requested precision is not in the bundle.
        """
        bundle, settings = self._bundle, self._settings
        if settings.precision != "auto":
            bundle.model_file(mode.precision)  # raises the error
            return absence(mode, settings.device)
        if mode.precision not in (*bundle.precisions, "bf16"):
            return f"the bundle has no {mode.precision}"
        if mode not in bundle.modes():
            return "the export did not measure it"
        compared = bundle.manifest.comparison(mode)
        if compared is not None and compared.held_out_cosine is None and mode.precision != "fp16":
            return "the export, by an earlier version, did not measure it in pairs with fp32"
        others = [one for one in settings.galleries if not may_mix(one, mode.precision)]
        if others:
            return f"a gallery has vectors in {min(others)}, with which it was never compared"
        return absence(mode, settings.device)

    def _fastest(self, modes: list[Mode]) -> Opened:
        opened: dict[Mode, Opened] = {}
        faults: dict[Mode, BundleError] = {}
        for mode in modes:
            try:
                opened[mode] = self._opens(mode)
            except BundleError as error:
                if mode == FP32:
                    raise  # without fp32 no gallery could be searched correctly
                faults[mode] = error
                self._table[mode] = str(error)
        if not opened:
            raise next(iter(faults.values()))
        first = next(iter(opened))
        if self._settings.device == "cuda":
            # Not measured: the gain of fp16 shows in full batches only.
            if opened[first].provider == PROVIDERS["cuda"]:
                return list(opened.values())[-1]
            self._table |= {mode: "it needs the GPU" for mode in modes if mode != first}
            return opened[first]
        embeds = {mode: embedder.embed for mode, embedder in opened.items()}
        gains = self._gains(embeds, self._bundle.golden_inputs()[:1])
        self._table |= gains
        if all(isinstance(error, GoldenMismatchError) for error in faults.values()):
            # Not stored otherwise: other faults, such as a lack of memory, may be temporary.
            outcomes = gains | {mode: str(error) for mode, error in faults.items()}
            _write_measured(self._bundle.bundle_id, modes, self._settings.threads, outcomes)
        return opened[_best_of(gains)]

    def _explained(self, embedder: Opened) -> Opened:
        """The embedder with the rows of the table as its `precision_reason`."""
        is_auto = self._settings.precision == "auto"
        gains = {mode: gain for mode, gain in self._table.items() if isinstance(gain, float)}
        notes = [
            f"{mode} is {gain:.2f} times as fast as {next(iter(gains))} here"
            for mode, gain in list(gains.items())[1:]
        ]
        if notes:
            notes[-1] += f" ({MIN_GAIN} is needed)"
        elif not is_auto:
            notes = ["asked for"]
        elif embedder.mode.precision == "fp16":
            notes = ["its golden vectors match"]
        refusals: dict[str, list[str]] = {}
        for mode, outcome in self._table.items():
            if isinstance(outcome, str):
                refusals.setdefault(outcome.rstrip("."), []).append(str(mode))
        if is_auto or self._settings.engine == "auto":
            notes += [f"not {' or '.join(modes)}: {why}" for why, modes in refusals.items()]
        embedder.precision_reason = "; ".join(notes) or "no other mode fits"
        return embedder


def _best_of(outcomes: Mapping[Mode, Outcome]) -> Mode:
    """The fastest mode, or the first one if no other gains at least `MIN_GAIN`."""
    gains = {mode: gain for mode, gain in outcomes.items() if not isinstance(gain, str)}
    first, fastest = next(iter(gains)), max(gains, key=gains.__getitem__)
    return fastest if gains[fastest] >= MIN_GAIN else first


def _read_measured(
    bundle_id: str, modes: Sequence[Mode], threads: int
) -> dict[Mode, Outcome] | None:
    """The stored measurement for this machine and these versions and modes; None without one."""
    try:
        found = json.loads(_measurement_file(bundle_id, modes, threads).read_text(encoding="utf-8"))
        outcomes = {mode: found[mode.key] for mode in modes}
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None
    return outcomes if any(isinstance(outcome, float) for outcome in outcomes.values()) else None


def _write_measured(
    bundle_id: str, modes: Sequence[Mode], threads: int, outcomes: Mapping[Mode, Outcome]
) -> None:
    """Store a measurement, if the cache folder is writable: a small file per bundle and machine, in
    `kinlens/engines` below XDG_CACHE_HOME or ~/.cache.
    """
    content = {mode.key: outcome for mode, outcome in outcomes.items()}
    with contextlib.suppress(OSError, RuntimeError):
        file = _measurement_file(bundle_id, modes, threads)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content).encode(), "measured")


def _measurement_file(bundle_id: str, modes: Sequence[Mode], threads: int) -> Path:
    known = [bundle_id, processor(), engine_versions(), [mode.key for mode in modes], threads]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_folder() / "engines" / f"{digest[:32]}.json"
