"""Bundles on the Hugging Face Hub: download one by its address, and push one with a model card.

The package `huggingface_hub` is imported, and the Hub is contacted, only if a caller gives an
address `hf://...` or pushes. Its settings are its own: HF_TOKEN, HF_HOME, HF_ENDPOINT, and
HF_HUB_OFFLINE, with which only its cache is read.
"""

import contextlib
import fnmatch
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinlens import __version__
from kinlens.embedder.bundle import (
    GOLDEN,
    MANIFEST,
    SEEN,
    TOKENIZER,
    WEIGHTS,
    Bundle,
    read_manifest,
)
from kinlens.embedder.errors import BundleError, BundleNotFoundError
from kinlens.embedder.manifest import BundleManifest
from kinlens.environment import needs
from kinlens.golden import with_interval

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SCHEME = "hf://"
_FILES = (MANIFEST, "*.onnx", SEEN, TOKENIZER, WEIGHTS, f"{GOLDEN}/*")
"""Patterns of the files of an earlier bundle; nothing else is deleted."""
_LICENCES = """
afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd bsd-2-clause bsd-3-clause bsl-1.0 cc cc-by-2.0
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-4.0
cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 epl-2.0 gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1
lgpl-3.0 mit mpl-2.0 openrail unlicense wtfpl zlib
"""
"""Those that the Hub knows by name; others have the name `other` there."""
_UNKNOWN = "unspecified"


def download(address: str) -> Path:
    """The folder, in the cache of `huggingface_hub`, of the bundle at `hf://org/name[@revision]`.

    Raises: BundleNotFoundError if there is no repository, revision or bundle; BundleError if the
        address is malformed or the Hub cannot be reached; ModuleNotFoundError without `hub`.
    """
    with _translated(address):
        from huggingface_hub import HfApi, parse_hf_uri

        uri = parse_hf_uri(address)
        if uri.type != "model" or uri.path_in_repo:
            raise ValueError("only hf://org/name and hf://org/name@revision can hold a bundle")
        api = HfApi(library_name="kinlens", library_version=__version__)
        # The manifest comes first: without it the repository may hold anything, of any size. Its
        # folder is named by the commit, from which the other files are taken.
        folder = Path(api.hf_hub_download(uri.id, MANIFEST, revision=uri.revision)).parent
        names = _names(Bundle(folder, read_manifest(folder)))
        exact = [*map(glob.escape, names)]  # wildcards of the package match in all folders
        return Path(api.snapshot_download(uri.id, revision=folder.name, allow_patterns=exact))


def push(bundle: Bundle, repo: str, *, private: bool = True, token: str | None = None) -> str:
    """Push a bundle with a model card to a repository, in one commit; create the repository if
    there is none.

    Returns: the address of this version, for `load_bundle`.
    Raises: BundleError if the Hub refuses it, cannot be reached, or shows a repository to everybody
        that was to be private.
    """
    with _translated(f"{SCHEME}{repo}"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        token = token and token.strip()  # as that of HF_TOKEN; a file ends with a line break
        if token and not re.fullmatch("[!-~]+", token):  # whose refusal would print it
            raise ValueError("the token has characters that no token has; copy it again")
        api = HfApi(token=token, library_name="kinlens", library_version=__version__)
        files = {name: bundle.path / name for name in _names(bundle)}
        files = {name: path for name, path in files.items() if path.is_file()}
        card = model_card(bundle.manifest, repo)
        api.create_repo(repo, private=private, exist_ok=True)
        operations: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
        operations.append(CommitOperationAdd("README.md", card.encode()))
        operations += map(CommitOperationDelete, _earlier_files(api, repo, private) - files.keys())
        message = f"Bundle {bundle.bundle_id[:12]}"
        return f"{SCHEME}{repo}@{api.create_commit(repo, operations, commit_message=message).oid}"


def _names(bundle: Bundle) -> list[str]:
    """The files of a bundle; nothing else is downloaded or pushed."""
    return [MANIFEST, WEIGHTS, *bundle.files()]


def _earlier_files(api: "HfApi", repo: str, private: bool) -> set[str]:
    """The files of an earlier bundle. Raises: ValueError if everybody can read the repository."""
    info = api.model_info(repo)
    if private and not info.private:
        raise ValueError(
            "the repository exists and everybody can read it; pass private=False if the bundle is "
            "for everybody, or choose another repository"
        )
    names = {one.rfilename for one in info.siblings or ()}
    # A pattern also matches in other folders, which may hold files of the owner.
    at_depth = {depth: {name for name in names if name.count("/") == depth} for depth in (0, 1)}
    return {name for part in _FILES for name in fnmatch.filter(at_depth[part.count("/")], part)}


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    """Raise the errors of `huggingface_hub`, and of what it uses, as those of bundles."""
    with needs(address, "hub"):
        from huggingface_hub import errors  # first: an error names it, which users know

        import httpx2  # isort: skip
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise BundleNotFoundError(f"{address} has no such revision. Check its name.") from error
    except errors.RepositoryNotFoundError as error:  # also for those that the token must not see
        raise BundleNotFoundError(
            f"{address} does not exist, or your token must not see it. Check the name, and set "
            "HF_TOKEN or log in: hf auth login."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise BundleNotFoundError(
            f"{address} is not in the cache, and the Hub cannot be reached. Check the connection, "
            "and that HF_HUB_OFFLINE is not set."
        ) from error
    except errors.EntryNotFoundError as error:
        raise BundleNotFoundError(
            f"{address} is no bundle: it has no {MANIFEST}. Push one with bundle.push_to_hub."
        ) from error
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = "" if error.__cause__ is None else f" {error.__cause__}"
        reason = " ".join(f"{error}{cause}".split())
        raise BundleError(f"{address} cannot be used: {reason.rstrip('.')}.") from error


def model_card(manifest: BundleManifest, repo: str) -> str:
    """The README of a bundle in a repository: metadata, use, figures, data and limits."""
    about = "\n\n".join(
        [
            f"# {manifest.name}",
            f"An image model for visual search: photos of one product get similar vectors of "
            f"{manifest.dim} numbers. It is a bundle of [Kinlens](https://github.com/kinlens/"
            f"kinlens): ONNX, with `uint8` images of {manifest.preprocessing.crop_px} px as input, "
            "and checked against its golden vectors at each start.",
            "## Use",
            "    pip install 'kinlens[cpu,hub]'",
            "```python\nimport kinlens\n\n"
            f'bundle = kinlens.load_bundle("{SCHEME}{repo}")\n'
            'vectors = bundle.embed_files(["photo.jpg"])\n```',
            "## Figures",
            _figures(manifest),
            "## Data",
            _data(manifest),
            "## What it is not for",
            "- Recognizing people, or any decision about a person.\n"
            "- Products unlike those that it was tested on: test it on labelled photos of your "
            "own first (`kinlens-index golden`).\n"
            "- Reading a score as a probability. A gallery turns scores into probabilities by its "
            "own calibration.\n"
            "- Vectors of another model: only vectors of this bundle, "
            f"`{manifest.vectors_id[:12]}`, can be compared.",
        ]
    )
    return f"---\n{_metadata(manifest, repo).to_yaml()}\n---\n\n{about}\n"


def _metadata(manifest: BundleManifest, repo: str) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    licence = manifest.licence.strip().lower()
    named: dict[str, Any] = {}
    if licence in _LICENCES.split():
        named = {"license": licence}
    elif licence != _UNKNOWN:
        name = re.sub(r"[^a-z0-9.]+", "-", licence).strip("-")[:60]
        named = {"license": "other", "license_name": name}
    results = [
        EvalResult(
            task_type="image-feature-extraction",
            task_name="Image retrieval",
            dataset_type="private",
            dataset_name=f"test images of {manifest.job.get('name', manifest.name)}",
            metric_type="recall",
            metric_name=name,
            metric_value=round(value, 2),
        )
        for name, value in manifest.recall.items()
    ]
    words = ["text-to-image-retrieval"] if manifest.text is not None else []
    return ModelCardData(
        library_name="kinlens",
        pipeline_tag="image-feature-extraction",
        tags=["kinlens", "visual-search", "image-retrieval", "image-similarity", "onnx", *words],
        metrics=["recall"] if results else None,
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
        **named,
    )


def _figures(manifest: BundleManifest) -> str:
    """Recalls in percent. Intervals need the number of queries, which a baseline has."""
    if not manifest.recall:
        return "None were measured: the bundle was exported without test images."
    known = manifest.baseline
    queries = None if known is None else known.queries
    names = list(manifest.recall)
    rows = {"this model": manifest.recall, **({known.model: known.recall} if known else {})}
    lines = [f"| model | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for model, recall in rows.items():
        cells = [_shown(recall.get(name), queries) for name in names]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    note = "R@k is the share of queries, in percent, with a photo of the same class among the first"
    count = f", on {known.queries:,} test queries with 95 % intervals (Wilson)" if known else ""
    lines += ["", f"{note} k hits{count}."]
    for mode, compared in [*manifest.variants.items(), *manifest.modes.items()]:
        low, high = compared.recall_at_1_interval or (None, None)
        interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
        lines.append(f"In {mode}, R@1 is {compared.recall_at_1_loss:.2f} points{interval} lower.")
    return "\n".join(lines)


def _shown(percent: float | None, queries: int | None) -> str:
    if percent is None:
        return ""
    return f"{percent:.1f}" if queries is None else with_interval(percent, queries)


def _data(manifest: BundleManifest) -> str:
    job, sha256 = manifest.job, manifest.data_sha256
    lines = [f"- Network: {manifest.backbone}. Made: {manifest.created_at}."]
    if job:
        about = f" {job['description']}" if job.get("description") else ""
        lines.append(f"- Training: job `{job.get('name', '')}`.{about} Manifest: `{MANIFEST}`.")
    else:
        lines.append("- Training: the bundle records none; ask its owner about the images.")
    if sha256 is not None:
        lines.append(f"- SHA-256 of the list of images: `{sha256}`.")
    if manifest.text is not None:
        lines.append(f"- Words: a text tower, {manifest.text.kind}.")
    unknown = "none is recorded; ask the owner before use"
    licence = unknown if manifest.licence == _UNKNOWN else manifest.licence
    lines.append(f"- Licence: {licence}.")
    return "\n".join(lines)
