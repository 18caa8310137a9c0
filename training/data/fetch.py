"""Download of one file: resumed after a break, tried again, checked."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedder.errors import DatasetError
from training.data.remote import Body, ConnectionLost, open_url

Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all, if known."""

_CHUNK = 2**18
_MOST_WAIT_S = 60.0


@dataclass(frozen=True)
class Patience:
    """How often to try again.

    Args:
        attempts: in a row that gain nothing.
        wait_s: after the first, in seconds; doubled each time.
        timeout_s: how long a silent server is waited for.
        on_retry: called with the attempt that begins and `attempts`.
    """

    attempts: int = 5
    wait_s: float = 1.0
    timeout_s: float = 60.0
    on_retry: Callable[[int, int], None] | None = None

    def wait(self, failures: int) -> None:
        """Wait after `failures` attempts."""
        if self.on_retry is not None:
            self.on_retry(failures + 1, self.attempts)
        time.sleep(min(self.wait_s * 2 ** (failures - 1), _MOST_WAIT_S))


class Part:
    """The file that grows, `NAME.part`, and what the server said of it, `NAME.part.json`."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self.note = target.with_name(f"{target.name}.part.json")

    def size(self) -> int:
        """Bytes that can be gone on from: none without a note of what they are part of."""
        return self.path.stat().st_size if self.path.is_file() and self._said() else 0

    def goes_on_with(self, body: Body) -> bool:
        """Whether `body` is the rest of the same file.

        Another address is trusted if the sizes agree: the checksum is what decides in the end.
        """
        said = self._said()
        same_size = said.get("total") == body.total
        if said.get("url") != body.url:
            return same_size and body.total is not None
        return same_size and (not body.tag or said.get("tag") == body.tag)

    def restart(self, body: Body) -> None:
        """Begin anew with `body`."""
        self.path.write_bytes(b"")
        self.note.write_text(json.dumps({"url": body.url, "tag": body.tag, "total": body.total}))

    def remove(self) -> None:
        """Forget everything."""
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def _said(self) -> dict[str, object]:
        try:
            said = json.loads(self.note.read_bytes())
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}


def fetch(
    url: str,
    target: Path,
    md5: str,
    on_progress: Progress,
    patience: Patience | None = None,
    spare: float = 0.0,
) -> None:
    """Download `url` to `target`, which appears when it is whole and its checksum is right.

    Args:
        url: http, https or ftp.
        target: the file; beside it a part of it is kept, and gone on with at the next call.
        md5: the checksum.
        on_progress: called after each piece.
        patience: how often to try again.
        spare: free space that must remain, in sizes of the file.

    Raises: DatasetError if the server does not give the file, the space does not suffice or the
        checksum is wrong.
    """
    part, patience = Part(target), patience or Patience()
    failures = 0
    while True:
        before = part.size()
        try:
            _pull(url, part, on_progress, patience.timeout_s, spare)
            break
        except ConnectionLost:
            failures = 1 if part.size() > before else failures + 1
            if failures >= patience.attempts:
                raise
            patience.wait(failures)
    _check(url, part, md5)
    part.path.replace(target)
    part.note.unlink(missing_ok=True)


def md5_of(path: Path) -> str:
    """The MD5 of a file, in hexadecimal: it finds damage, and is what the authors publish."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _pull(url: str, part: Part, on_progress: Progress, timeout_s: float, spare: float) -> None:
    body = open_url(url, part.size(), timeout_s)
    if body.start and not part.goes_on_with(body):
        body.close()
        body = open_url(url, 0, timeout_s)
    with closing(body), _writing(part.path):
        if not body.start:
            part.restart(body)
        if body.total is not None:
            _check_room(part.path.parent, body.total, body.start, spare)
        done = _append(part.path, body, on_progress)
    if body.total is not None and done < body.total:
        raise ConnectionLost(
            f"{url}: the connection ended after {done:,} of {body.total:,} bytes. Run the command "
            "again: it goes on where it stopped."
        )


def _append(path: Path, body: Body, on_progress: Progress) -> int:
    done = body.start
    on_progress(done, body.total)
    with path.open("ab") as stream:
        while chunk := body.read(_CHUNK):
            stream.write(chunk)
            done += len(chunk)
            on_progress(done, body.total)
    return done


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written: {error.strerror}. Free space or choose another --root; "
            "then run the command again: it goes on where it stopped."
        ) from error


def _check_room(folder: Path, total: int, done: int, spare: float) -> None:
    needed, free = total - done + round(total * spare), shutil.disk_usage(folder).free
    if free < needed:
        raise DatasetError(
            f"{folder} has {free / 1e9:.2f} GB free; {needed / 1e9:.2f} GB are needed to download "
            f"and unpack {total / 1e9:.2f} GB. Free space or choose another --root."
        )


def _check(url: str, part: Part, md5: str) -> None:
    found, size = md5_of(part.path), part.path.stat().st_size
    if found != md5:
        part.remove()
        raise DatasetError(
            f"{url} gave {size:,} bytes with MD5 {found}; expected is {md5}. They were deleted. "
            "Run the command again, or pass --url with the address of an undamaged copy."
        )
