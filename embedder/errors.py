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
    │   ├── BundleCorruptError          a hash or a manifest that does not fit
    │   ├── GoldenMismatchError         the model does not reproduce its golden vectors
    │   └── ProviderError               asked for a GPU and got a CPU
    ├── GalleryError                    a gallery that cannot be used
    │   ├── GalleryNotFoundError
    │   ├── GalleryCorruptError         a hash, a file or a catalogue that does not fit
    │   ├── BundleMismatchError         made with another bundle
    │   ├── ItemNotFoundError
    │   ├── GalleryConflictError        a name that is taken, or a gallery that may not be changed
    │   ├── SourceError                 a folder, CSV or split that cannot be indexed
    │   ├── GalleryBusyError            another process is building or compacting it
    │   ├── GalleryWriteError           a change that could not be made durable
    │   ├── PlanError                   an index that does not fit the machine
    │   ├── RecallError                 an index that misses its recall target
    │   └── EngineUnavailableError      a vector database that does not answer
    ├── SearchError                     a request that cannot be answered
    │   ├── InvalidParameterError       k, min_score, ... outside their range
    │   ├── FilterError                 a filter that is malformed or does not fit the attributes
    │   ├── OverloadedError             the queue is full
    │   └── DeadlineExceededError       waited longer than the limit
    ├── AccessError                     a caller who may not do this
    │   ├── KeyMissingError             no API key, or one that is not known
    │   ├── KeyNotFoundError            no key of this name
    │   ├── ScopeError                  a key without the scope that this needs
    │   ├── KeysUnreadableError         a damaged file of API keys, so that none is accepted
    │   └── RateLimitedError            more requests than the rate allows
    ├── StateError                      something a running service keeps on the disk
    │   ├── StateMissingError           it was started without a folder to keep things in
    │   ├── JobNotFoundError
    │   └── JobConflictError            a job that cannot start, stop or go on in its state
    ├── CalibrationError                scores that cannot become probabilities
    └── TrainingError                   a training job that cannot run
        ├── JobError                    a job file that does not fit its schema
        ├── DatasetError                a data set that is missing or malformed
        ├── CheckpointError             a checkpoint or weight file that cannot be used
        ├── EvaluationError             embeddings that cannot be evaluated
        └── ExportError                 a parity gate that was not passed

Messages name the value, what was expected and what to do.
"""


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
