"""What is wrong with the folder of a data set: everything at once, not the first fault alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from embedder.errors import DatasetError
from training.data.findings import Finding, of_files, of_labels, of_looks
from training.data.folder import read_folder
from training.data.layouts import KINDS, OFFICIAL, TABLE, data_sets_in, recognise
from training.data.look import Look, look_at_all
from training.data.official import Count, Official, Record, counts, differing_counts, list_records
from training.data.table import scan_table


@dataclass(frozen=True)
class Report:
    """The state of a data set.

    `parts` are the images that its lists state, whether they exist or not; `expected` are the
    official sizes, where there are any.
    """

    root: Path
    kind: str | None
    quick: bool
    parts: dict[str, Count] = field(default_factory=dict)
    expected: dict[str, Count] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing keeps the data set from being trained on."""
        return not any(finding.is_problem for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "root": str(self.root),
            "kind": self.kind,
            "healthy": self.healthy,
            "quick": self.quick,
            "parts": {part: size._asdict() for part, size in self.parts.items()},
            "expected": {part: size._asdict() for part, size in self.expected.items()},
            "findings": [asdict(finding) for finding in self.findings],
        }


Watch = Callable[[int], Callable[[], None]]
"""Called with the number of images; gives a function that is called after each."""


def examine(
    root: Path,
    kind: str | None = None,
    quick: bool = False,
    allow_partial: bool = False,
    watch: Watch = lambda _total: lambda: None,
) -> Report:
    """Read the lists of a data set and look at every image.

    Args:
        root: its folder.
        kind: one of KINDS; None recognises it.
        quick: look at headers alone; damage inside an image is not found.
        allow_partial: accept a subset of an official data set.
        watch: told of the progress.

    Raises: DatasetError if there is no such folder or kind.
    """
    if not root.is_dir():
        raise DatasetError(f"{root} is not a folder. Give the folder of a data set.")
    if kind is not None and kind not in KINDS:
        raise DatasetError(f"--kind {kind}: no such layout. Give one of {', '.join(KINDS)}.")
    chosen = kind or recognise(root)
    if chosen is None:
        return Report(root, None, quick, findings=(_unknown(root),))
    try:
        base, records, findings = _records(root, chosen)
    except DatasetError as error:
        return Report(root, chosen, quick, findings=(Finding("problem", "layout", 1, str(error)),))
    official = OFFICIAL.get(chosen)
    step = watch(len(records))
    looks = list(look_at_all(base, [record.path for record in records], quick, step))
    findings += _judge(base, official, records, looks, allow_partial)
    expected = dict(official.expected) if official else {}
    return Report(root, chosen, quick, counts(records), expected, tuple(findings))


def _judge(
    base: Path,
    official: Official | None,
    records: list[Record],
    looks: list[Look],
    allow_partial: bool,
) -> list[Finding]:
    fixed = official is not None
    return [
        *(_of_counts(official, records, looks, allow_partial) if official else ()),
        *of_looks(looks, missing_is_fine=allow_partial),
        *of_labels(records, looks, fixed),
        *of_files(base, records),
    ]


def _records(root: Path, kind: str) -> tuple[Path, list[Record], list[Finding]]:
    """The folder that paths are relative to, the records, and what is wrong with the lists."""
    if kind in OFFICIAL:
        official = OFFICIAL[kind]
        return official.image_root(root), list_records(official, root), []
    if kind == "csv":
        rows, faults = scan_table(root, TABLE)
        records = [
            Record((row.get("split") or "").strip() or "all", row["path"], row["label"], TABLE)
            for row in rows
        ]
        return root, records, list(_of_rows(faults))
    return root, [Record("all", path, label, path) for path, label in read_folder(root)], []


def _of_rows(faults: list[str]) -> Iterator[Finding]:
    if faults:
        yield Finding.of("problem", "rows", faults, "row(s) of the CSV cannot be used")


def _of_counts(
    official: Official, records: list[Record], looks: Iterable[Look], allow_partial: bool
) -> Iterator[Finding]:
    gone = {look.path for look in looks if look.fault == "missing"}
    differing = differing_counts(official, [r for r in records if r.path not in gone])
    if differing:
        severity: Literal["problem", "note"] = "note" if allow_partial else "problem"
        cure = "" if allow_partial else ". Unpack it again, or pass --allow-partial for a subset"
        yield Finding(severity, "counts", 1, f"{official.name} has {differing}{cure}")


def _unknown(root: Path) -> Finding:
    inside = data_sets_in(root)
    hint = f" {inside[0]} looks like one: give that." if inside else ""
    return Finding(
        "problem",
        "layout",
        1,
        f"{root} has no layout that is known: neither one of {', '.join(OFFICIAL)}, nor a file "
        f"{TABLE}, nor a sub-folder with images for each class.{hint}",
    )
