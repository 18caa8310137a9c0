"""Every error that Kinlens raises on purpose, one class per cause.

    KinlensError
    ├── ImageError                      an image that cannot be used
    │   ├── EmptyImageError             no bytes
    │   ├── ImageTooManyBytesError      more bytes than the limit
    │   ├── ImageTooLargeError          more pixels or a longer side than the limit
    │   ├── UnsupportedFormatError      not one of the formats we decode
    │   ├── CorruptImageError           truncated or damaged
    │   └── ImageCostError              decoding took more time or memory than the limit
    ├── BundleError                     a model bundle that cannot be used
    │   ├── BundleNotFoundError
    │   ├── BundleCorruptError          a wrong hash or an invalid manifest
    │   ├── GoldenMismatchError         the model does not reproduce its golden vectors
    │   └── ProviderError               an engine or device that this machine lacks
    ├── GalleryError                    a gallery that cannot be used
    │   ├── GalleryNotFoundError
    │   ├── GalleryCorruptError         a damaged or missing file, or a wrong hash
    │   ├── BundleMismatchError         built with another bundle
    │   ├── ItemNotFoundError
    │   ├── GalleryConflictError        a name that is taken, or a gallery that must not be changed
    │   ├── SourceError                 a folder, CSV or split that cannot be indexed
    │   ├── GalleryBusyError            another process builds or compacts it
    │   ├── DeltaFullError              more new items than compactions keep up with
    │   ├── GalleryWriteError           a change that could not be written to the disk
    │   ├── PlanError                   an index that does not fit the machine
    │   ├── RecallError                 an index that misses its recall target
    │   └── EngineUnavailableError      a vector database that does not respond
    │       └── UnreachableError        a store of images that does not; no image is at fault
    ├── SearchError                     a request that cannot be answered
    │   ├── InvalidParameterError       k, min_score, ... outside their range
    │   ├── FilterError                 a filter that is malformed or does not fit the attributes
    │   ├── OverloadedError             the queue is full
    │   └── DeadlineExceededError       the request took longer than the limit
    ├── AccessError                     a caller without the permission
    │   ├── KeyMissingError             no API key, or an unknown one
    │   ├── KeyNotFoundError            no key of this name
    │   ├── ScopeError                  a key without the required scope
    │   ├── KeysUnreadableError         a damaged file of API keys: all keys are refused
    │   └── RateLimitedError            more requests than the rate allows
    ├── StateError                      the state that a service stores on the disk
    │   ├── StateMissingError           the service was started without a state folder
    │   ├── JobNotFoundError
    │   └── JobConflictError            a job that cannot start, stop or resume in its state
    ├── CalibrationError                scores that cannot be turned into probabilities
    └── TrainingError                   a training job that cannot run
        ├── JobError                    a job file that does not fit its schema
        ├── DatasetError                a dataset that is missing or malformed
        ├── CheckpointError             a checkpoint or weight file that cannot be used
        ├── EvaluationError             embeddings that cannot be evaluated
        └── ExportError                 a failed parity gate

A message names the value, the limit or expected value, and the remedy.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

_SQLITE_FULL, _SQLITE_READONLY = 13, 8  # of sqlite3, without its import
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_CURE = "Free space on that disk, or raise its quota, and try again."
_READ_ONLY_CURE = "That file system is read-only: mount it for writing, or choose another folder."
_GONE_CURE = "Check that its disk is mounted and the folder exists, and try again."
_CURES = {
    errno.EROFS: _READ_ONLY_CURE,
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give this user the permissions."),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), _GONE_CURE),
}
_OTHER_CURE = "Check the free space, the permissions and the health of that disk, and try again."


class KinlensError(Exception): ...


class _LaterError(KinlensError):
    """What may succeed if it is tried again after `retry_after_s` seconds."""

    default_s = 1

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = self.default_s if retry_after_s is None else retry_after_s


class ImageError(KinlensError): ...


class EmptyImageError(ImageError): ...


class ImageTooManyBytesError(ImageError): ...


class ImageTooLargeError(ImageError): ...


class UnsupportedFormatError(ImageError): ...


class CorruptImageError(ImageError): ...


class ImageCostError(ImageError): ...


class BundleError(KinlensError): ...


class BundleNotFoundError(BundleError): ...


class BundleCorruptError(BundleError): ...


class GoldenMismatchError(BundleError): ...


class ProviderError(BundleError): ...


class GalleryError(KinlensError): ...


class GalleryNotFoundError(GalleryError): ...


class GalleryCorruptError(GalleryError): ...


class BundleMismatchError(GalleryError): ...


class ItemNotFoundError(GalleryError): ...


class ImageMissingError(ItemNotFoundError): ...


class GalleryConflictError(GalleryError): ...


class SourceError(GalleryError): ...


class GalleryBusyError(GalleryError): ...


class DeltaFullError(_LaterError, GalleryError):
    default_s = 10


class GalleryWriteError(GalleryError): ...


class PlanError(GalleryError): ...


class RecallError(GalleryError): ...


class EngineUnavailableError(GalleryError): ...


class UnreachableError(EngineUnavailableError): ...


class SearchError(KinlensError): ...


class InvalidParameterError(SearchError): ...


class FilterError(SearchError): ...


class OverloadedError(_LaterError, SearchError): ...


class DeadlineExceededError(SearchError): ...


class AccessError(KinlensError): ...


class KeyMissingError(AccessError): ...


class KeyNotFoundError(AccessError): ...


class ScopeError(AccessError): ...


class KeysUnreadableError(AccessError): ...


class RateLimitedError(_LaterError, AccessError): ...


class StateError(KinlensError): ...


class StateMissingError(StateError): ...


class JobNotFoundError(StateError): ...


class JobConflictError(StateError): ...


class CalibrationError(KinlensError): ...


class TrainingError(KinlensError): ...


class JobError(TrainingError): ...


class DatasetError(TrainingError): ...


class CheckpointError(TrainingError): ...


class EvaluationError(TrainingError): ...


class ExportError(TrainingError): ...


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or an exhausted quota caused this error."""
    return _is_caused_by(error, _FULL, _SQLITE_FULL)


def _is_caused_by(error: BaseException, numbers: tuple[int, ...], sqlite: int) -> bool:
    cause: BaseException | None = error
    seen: set[int] = set()  # an error that several callers raise may be among its own causes
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in numbers:
            return True
        if getattr(cause, "sqlite_errorcode", None) == sqlite:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def disk_fault(
    error: Exception, target: Path | None = None, outcome: str = "", what: str = ""
) -> str:
    """What the disk refused: its path, the reason, `outcome` and the cure. If `target` was being
    written, an error that names a file outside of it is one of reading that file.
    """
    file = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None) or str(error)
    cure = _CURES.get(getattr(error, "errno", None) or 0, _OTHER_CURE)
    action = f"{what} {target} cannot be written".lstrip()
    if target is None:
        action = f"{file or 'A file'} cannot be read or written"
    elif isinstance(file, str) and not is_disk_full(error) and not _is_part(Path(file), target):
        action = f"{file} cannot be read"
    if is_disk_full(error):
        reason, cure = "No space is left, or a quota is used up", _FULL_CURE
    elif _is_caused_by(error, (errno.EROFS,), _SQLITE_READONLY):
        reason, cure = "Read-only file system", _READ_ONLY_CURE
    return " ".join(filter(None, (f"{action}: {reason}.", outcome, cure)))


def _is_part(file: Path, target: Path) -> bool:
    """Whether a write of `target` writes `file`: one inside, a folder around it, or a hidden file
    next to it.
    """
    is_inside = file.is_relative_to(target) or target.is_relative_to(file)
    is_near = file.is_relative_to(target.parent)
    return is_inside or (is_near and file.relative_to(target.parent).parts[0].startswith("."))


@contextlib.contextmanager
def disk_errors_as(
    kind: type[KinlensError], target: Path, outcome: str | Callable[[], str], what: str = ""
) -> Iterator[None]:
    """Raise what the disk refuses while `target` is written as `kind`, in the words of
    `disk_fault`. `outcome` states what was and was not written; a callable looks at the disk.
    """
    try:
        yield
    except Exception as error:
        # A write of a part, which knows neither the whole nor what becomes of it.
        is_part = isinstance(error, GalleryWriteError) and isinstance(error.__cause__, OSError)
        fault = error.__cause__ if is_part else error
        is_of_disk = isinstance(fault, OSError) or hasattr(fault, "sqlite_errorcode")
        # An error of ours that names its own cause, such as a full object store, stays as it is.
        is_of_disk |= is_disk_full(error) and not isinstance(error, KinlensError)
        if not isinstance(fault, Exception) or not is_of_disk:
            raise
        state = outcome if isinstance(outcome, str) else outcome()
        raise kind(disk_fault(fault, target, state, what)) from error
