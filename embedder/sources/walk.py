"""Folders of images: which files are images, and which are omitted and why.

Training and galleries read the same files, so both use this walk.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.sources.names import NOT_UTF8, composed, printable

_SYNOLOGY, _QNAP = "a Synology NAS", "a QNAP NAS"
_RULES = {
    "@eadir": f"thumbnails of {_SYNOLOGY}",
    **dict.fromkeys(("#recycle", "@sharebin"), f"deleted files of {_SYNOLOGY}"),
    "#snapshot": f"snapshots of {_SYNOLOGY}",
    "@tmp": f"temporary files of {_SYNOLOGY}",
    **dict.fromkeys(("@appstore", "@docker"), f"programs of {_SYNOLOGY}"),
    **dict.fromkeys((".@__thumb", "@transcode", ".@upload_cache"), f"thumbnails of {_QNAP}"),
    "@recycle": f"deleted files of {_QNAP}",
    "@recently-snapshot": f"snapshots of {_QNAP}",
    ".qsync": f"a cache of {_QNAP}",
    **dict.fromkeys((".snapshot", "~snapshot", ".snapshots", ".zfs"), "snapshots of a file server"),
    **dict.fromkeys((".recycle", "network trash folder"), "deleted files of a file server"),
    "temporary items": "temporary files of a file server",
    "$recycle.bin": "deleted files of Windows",
    **dict.fromkeys(("system volume information", "dfsrprivate"), "system files of Windows"),
    **dict.fromkeys(("thumbs.db", "ehthumbs.db"), "thumbnails of Windows"),
    "__macosx": "copies of macOS without pixels",
    ".appledouble": "copies of macOS without pixels",
    **dict.fromkeys((".trashes", ".trash"), "deleted files of macOS"),
    **dict.fromkeys((".ds_store", ".spotlight-v100", ".fseventsd"), "system files of macOS"),
    **dict.fromkeys((".thumbnails", ".cache"), "caches of Linux"),
    "lost+found": "system files of Linux",
    **dict.fromkeys(("__pycache__", ".ipynb_checkpoints"), "copies of Python programs"),
    ".git": "the store of Git",
    **dict.fromkeys((".dropbox.cache", ".stversions", ".sync"), "a cache of a synchroniser"),
}
"""Files and folders that programs create next to images, by name in lowercase."""

_PATTERNS = (
    (re.compile(r"\._.*"), "._*", "copies of macOS without pixels"),
    (re.compile(r"\.trash-.*"), ".Trash-*", "deleted files of Linux"),
    (re.compile(r"~\$.*"), "~$*", "temporary files of Office"),
    (re.compile(r"@syno.*"), "@Syno*", f"thumbnails of {_SYNOLOGY}"),
    (re.compile(r"found\.\d{3}"), "FOUND.*", "system files of Windows"),
    (re.compile(r".*\.lrdata"), "*.lrdata", "previews of Lightroom"),
)
_HIDDEN = "hidden files or folders"
_LINKED = "links to folders that are read under another name"
_DANGLING = "links to what does not exist"
_LOOPS = "links to a folder around them (loops)"
_OTHER = "files of formats that are not read"
_OTHER_SUFFIXES = (
    *(".psd", ".svg", ".pdf", ".eps", ".ico", ".jp2", ".jxl", ".raw", ".dng", ".cr2", ".cr3"),
    *(".nef", ".arw", ".orf", ".rw2", ".raf", ".xcf", ".tga"),
)
_EXAMPLES = 3


class ImageFile(NamedTuple):
    """An image file below a root.

    `path` is relative to the root, with forward slashes, spelled as on the disk. `name` is the same
    path in composed Unicode.
    """

    path: str
    name: str


class Fault(NamedTuple):
    """A file or folder that should hold images and cannot be used, and why."""

    path: str
    reason: str


@dataclass(slots=True)
class Omitted:
    """What a walk omits.

    Attributes:
        counts: number of files and folders by kind; a folder counts as one and is not read.
        examples: the first paths of each kind.
        faults: what a user would miss: bad links, bad names, names that are equal.
        dangling: links to what does not exist, whose names are not those of images or folders.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)

    def count(self, kind: str, path: str) -> None:
        """Count a file or folder of this kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(examples := self.examples.setdefault(kind, [])) < _EXAMPLES:
            examples.append(printable(path))

    def lines(self) -> Iterator[str]:
        """One line for each kind."""
        for kind, number in self.counts.items():
            more = ", ..." if number > _EXAMPLES else ""
            yield f"Omitted {number:,} {kind} ({', '.join(self.examples[kind])}{more})."


def walk_images(
    root: Path, omitted: Omitted, below: str = "", *, leave_root: bool = False
) -> Iterator[ImageFile]:
    """The images in the folder `below` the root and its sub-folders, sorted by name.

    Thumbnails, trash and hidden files are omitted. A linked folder is read once: under its own
    name if that is in the folder, else under that of its first link. Links that lead out of the
    root are followed only with `leave_root`. `omitted` gets what is omitted.

    Raises: OSError naming a folder that cannot be read.
    """
    return _Walk(os.path.realpath(root), below, omitted, leave_root).images()


class _Walk:
    def __init__(self, root: str, below: str, omitted: Omitted, leave_root: bool) -> None:
        self.root, self.below, self.leave_root = root, below, leave_root
        self.top = os.path.realpath(Path(root, below))
        self.omitted = omitted
        # Device and inode of all folders read since the first link to one; None before that.
        self.linked: set[tuple[int, int]] | None = None

    def images(self) -> Iterator[ImageFile]:
        # A stack and no recursion: folders may be nested deeper than Python allows calls.
        stack = [iter(self._entries([self.below], composed(self.below)))]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry, ImageFile):
                yield entry
            else:
                folders, name = entry
                stack.append(iter(self._entries(folders, name)))

    def _entries(self, folders: list[str], name: str) -> list[ImageFile | tuple[list[str], str]]:
        """The images, and the sub-folders by name, of folders whose names are equal."""
        found: dict[str, list[str]] = {}
        for folder in folders:
            with os.scandir(Path(self.root, folder)) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    kind = self._kind(entry, path)
                    if kind is not None:
                        found.setdefault(composed(entry.name) + kind, []).append(path)
        result: list[ImageFile | tuple[list[str], str]] = []
        for key in sorted(found):
            below = f"{name}/{key}" if name else key
            # The composed spelling first, so that it keeps the name.
            paths = sorted(found[key], key=lambda path: (composed(path) != path, path))
            if key.endswith("/"):
                result.append((paths, below.removesuffix("/")))
                continue
            result.append(ImageFile(paths[0], below))
            for path in paths[1:]:
                self._fault(
                    path,
                    f"Its name {path!a} equals that of another file, {paths[0]!a}, but for the "
                    "Unicode form. Rename or remove one of them.",
                )
        return result

    def _kind(self, entry: os.DirEntry[str], path: str) -> str | None:
        """A slash for a folder to read, "" for an image, None for anything else."""
        is_named = entry.name.lower().endswith(SUFFIXES)
        reason, full = _reason(entry.name), Path(self.root, path)
        is_folder = full.is_dir() if entry.is_symlink() else entry.is_dir()
        if reason is not None:
            if reason != _HIDDEN or is_folder or is_named:
                self.omitted.count(reason, path)
        elif entry.is_symlink() and not full.exists():
            if is_named or not Path(entry.name).suffix:  # without one, as of a share that is away
                self._fault(path, _dangling(full))
            else:
                self.omitted.count(_DANGLING, path)
                self.omitted.dangling.append(printable(path))
        elif not is_folder and not is_named:
            if entry.name.lower().endswith(_OTHER_SUFFIXES):
                self.omitted.count(_OTHER, path)
        elif printable(entry.name) != entry.name:
            self._fault(path, f"{NOT_UTF8}.")
        elif self._may_follow(path) if entry.is_symlink() else self._is_new(full, path, is_folder):
            return "/" if is_folder else ""
        return None

    def _may_follow(self, path: str) -> bool:
        """Whether a link leads to an image, or to a folder that is not read otherwise."""
        link = Path(self.root, path)
        real = os.path.realpath(link)
        if not self.leave_root and not _is_inside(real, self.root):
            self._fault(
                path,
                f"It links to {printable(real)}, which is outside of {self.root}. Copy it into the "
                "folder, or use a root that contains both.",
            )
            return False
        if not Path(real).is_dir():
            return True
        if _is_inside(os.path.realpath(link.parent), real):
            self.omitted.count(_LOOPS, path)
            return False
        if _is_inside(real, self.top) and not is_omitted(os.path.relpath(real, self.top)):
            self.omitted.count(_LINKED, path)
            return False
        self.linked = self.linked or set()
        return self._is_new(link, path)

    def _is_new(self, place: Path, path: str, is_folder: bool = True) -> bool:
        """Whether this is no folder that was read before, under the name of a link."""
        if not is_folder or self.linked is None:
            return True
        status = place.stat()
        identity = status.st_dev, status.st_ino
        if identity in self.linked:
            self.omitted.count(_LINKED, path)
            return False
        self.linked.add(identity)
        return True

    def _fault(self, path: str, reason: str) -> None:
        self.omitted.faults.append(Fault(printable(path), reason))


def is_omitted(path: str) -> bool:
    """Whether a part of this path is a name that a walk omits."""
    return omission(path) is not None


def omission(path: str) -> str | None:
    """Why a walk omits a file at this path, by the names in it; None if it does not."""
    return next(filter(None, map(_reason, path.split("/"))), None)


def _reason(name: str) -> str | None:
    """Why a file or folder of this name is omitted, if it is."""
    lowered = name.lower()
    if name == "RECYCLER":  # in other letters it may be a product
        return f"{name}: {_RULES['$recycle.bin']}"
    if rule := _RULES.get(lowered):
        return f"{name}: {rule}"
    for pattern, shown, rule in _PATTERNS:
        if pattern.fullmatch(lowered):
            return f"{shown}: {rule}"
    return _HIDDEN if name.startswith(".") and name not in (".", "..") else None


def _dangling(link: Path) -> str:
    target = printable(str(link.readlink()))
    try:
        link.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"It is a link that leads in a circle, to {target}. Replace it by the file."
    return f"It is a link to {target}, which does not exist. Restore that, or remove the link."


def _is_inside(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def read_failed(error: OSError) -> str:
    """The message for a folder that cannot be read."""
    return (
        f"The folder {printable(str(error.filename))} cannot be read: {error.strerror}. Allow this "
        "user to read it, or move it out of the folder."
    )


def fault_lines(faults: Iterable[Fault]) -> list[str]:
    """One line for each fault."""
    return [f"{fault.path}: {fault.reason}" for fault in faults]
