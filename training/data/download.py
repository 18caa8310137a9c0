"""Official data sets from their addresses: fetched, checked, unpacked, and only then in place."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from embedder.errors import DatasetError
from training.data.fetch import Patience, fetch, md5_of
from training.data.sources import BY_HAND, SOURCES, Source
from training.data.unpack import unpack

Listener = Callable[[str, int, int | None], None]
"""Called with the step (download or unpack), bytes done and bytes in all, if known."""

_SPARE = 1.1  # pictures unpack to about the size of their archive


def find_source(name: str) -> Source:
    """The source of a data set. Raises: DatasetError if there is none of that name."""
    if name not in SOURCES:
        raise DatasetError(
            f"No data set {name!r} is known. Give one of {', '.join((*SOURCES, *BY_HAND))}."
        )
    return SOURCES[name]


def instructions(name: str, root: Path) -> str:
    """What to do by hand for a data set without a stable address."""
    return BY_HAND[name].format(root=root)


def obtain(
    source: Source,
    root: Path,
    listener: Listener,
    url: str | None = None,
    keep_archive: bool = False,
    patience: Patience | None = None,
) -> Path:
    """Put a data set into `root`, unless it is there; returns its folder.

    An archive that lies in `root` already is used. The folder appears when it is complete.

    Args:
        source: the data set.
        root: the folder that its folder is put into.
        listener: told of the progress.
        url: another address of the same file.
        keep_archive: leave the archive in `root`.
        patience: how often to try again.

    Raises: DatasetError.
    """
    folder = root / source.folder
    if folder.exists():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"{root} cannot be made: {error.strerror}. Choose another --root."
        ) from error
    archive = root / source.archive
    if archive.exists():
        _check_archive(archive, source)
    else:
        _fetch_any((url,) if url else source.urls, archive, source, listener, patience)
    _unpack_aside(archive, folder, source, listener)
    if not keep_archive:
        archive.unlink()
    return folder


def _check_archive(archive: Path, source: Source) -> None:
    found = md5_of(archive)
    if found != source.md5:
        raise DatasetError(
            f"{archive} has MD5 {found}; that of {source.name} is {source.md5}. "
            "Delete it to download it again."
        )


def _fetch_any(
    urls: tuple[str, ...],
    archive: Path,
    source: Source,
    listener: Listener,
    patience: Patience | None,
) -> None:
    faults = []
    for url in urls:
        try:
            return fetch(url, archive, source.md5, partial(listener, "download"), patience, _SPARE)
        except DatasetError as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    raise DatasetError("\n".join(str(error) for error in faults)) from faults[0]


def _unpack_aside(archive: Path, folder: Path, source: Source, listener: Listener) -> None:
    aside = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        unpack(archive, aside, source.most_bytes, partial(listener, "unpack"))
        if not (aside / source.folder).is_dir():
            raise DatasetError(
                f"{archive} does not hold the folder {source.folder}. Delete it to download it "
                "again."
            )
        (aside / source.folder).rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
