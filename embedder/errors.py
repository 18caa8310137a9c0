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
    │   ├── GalleryWriteError           a change that could not be written to the disk
    │   ├── PlanError                   an index that does not fit the machine
    │   ├── RecallError                 an index that misses its recall target
    │   └── EngineUnavailableError      a vector database that does not respond
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

import errno

_SQLITE_FULL = 13  # sqlite3.SQLITE_FULL, without its import


class KinlensError(Exception): ...


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


class GalleryWriteError(GalleryError): ...


class PlanError(GalleryError): ...


class RecallError(GalleryError): ...


class EngineUnavailableError(GalleryError): ...


class SearchError(KinlensError): ...


class InvalidParameterError(SearchError): ...


class FilterError(SearchError): ...


class OverloadedError(SearchError):
    """The queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(SearchError): ...


class AccessError(KinlensError): ...


class KeyMissingError(AccessError): ...


class KeyNotFoundError(AccessError): ...


class ScopeError(AccessError): ...


class KeysUnreadableError(AccessError): ...


class RateLimitedError(AccessError):
    """More requests than the rate allows; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


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
    cause: BaseException | None = error
    seen: set[int] = set()  # an error that several callers raise may be among its own causes
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if getattr(cause, "sqlite_errorcode", None) == _SQLITE_FULL:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
