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
    │   ├── ScopeError                  a key without the scope that this needs
    │   ├── KeysUnreadableError         a damaged file of API keys, so that none is accepted
    │   └── RateLimitedError            more requests than the rate allows
    ├── StateError                      something a running service keeps on the disk
    │   ├── StateMissingError           it was started without a folder to keep things in
    │   ├── JobNotFoundError
    │   └── JobConflictError            a job that cannot start, stop or go on in its state
    └── TrainingError                   a training job that cannot run
        ├── JobError                    a job file that does not fit its schema
        ├── DatasetError                a data set that is missing or malformed
        ├── CheckpointError             a checkpoint or weight file that cannot be used
        ├── EvaluationError             embeddings that cannot be evaluated
        └── ExportError                 a parity gate that was not passed

Messages name the value, what was expected and what to do.
"""


class KinlensError(Exception):
    """Root of the tree."""


class ImageError(KinlensError):
    """An image that cannot be used."""


class EmptyImageError(ImageError):
    """No bytes at all."""


class ImageTooManyBytesError(ImageError):
    """More bytes than the limit."""


class ImageTooLargeError(ImageError):
    """More pixels, or a longer side, than the limit; read from the header, before decoding."""


class UnsupportedFormatError(ImageError):
    """Not one of the formats we decode, whatever its name says."""


class CorruptImageError(ImageError):
    """A known format whose content is truncated or damaged."""


class ImageCostError(ImageError):
    """Decoding took more time or memory than the limit; its process was ended."""


class BundleError(KinlensError):
    """A model bundle that cannot be used."""


class BundleNotFoundError(BundleError):
    """No bundle at that path."""


class BundleCorruptError(BundleError):
    """A file, hash or manifest of the bundle that does not fit."""


class GoldenMismatchError(BundleError):
    """The model, or the preprocessing, does not reproduce the golden vectors of its bundle."""


class ProviderError(BundleError):
    """The inference engine does not run on the device that was asked for."""


class GalleryError(KinlensError):
    """A gallery that cannot be used."""


class GalleryNotFoundError(GalleryError):
    """No gallery of that name, or at that path."""


class GalleryCorruptError(GalleryError):
    """A file, hash or catalogue of the gallery that does not fit."""


class BundleMismatchError(GalleryError):
    """A gallery that was made with another bundle; its vectors cannot be compared with ours."""


class ItemNotFoundError(GalleryError):
    """No item with that number in the gallery."""


class GalleryConflictError(GalleryError):
    """A name that is taken, or a gallery that may not be changed in this way."""


class SourceError(GalleryError):
    """A folder, CSV or data set split that cannot be indexed."""


class GalleryBusyError(GalleryError):
    """Another process is building, compacting or restoring the gallery."""


class GalleryWriteError(GalleryError):
    """A change that could not be made durable; the gallery is as it was before."""


class PlanError(GalleryError):
    """An index that does not fit the memory, the device or the number of vectors."""


class RecallError(GalleryError):
    """An index that finds too few of the true neighbours, whatever its search parameters."""


class EngineUnavailableError(GalleryError):
    """A vector database that does not answer, or refuses."""


class SearchError(KinlensError):
    """A request that cannot be answered."""


class InvalidParameterError(SearchError):
    """A parameter outside its range."""


class FilterError(SearchError):
    """A filter that is malformed, or does not fit the attributes of the gallery."""


class OverloadedError(SearchError):
    """The queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(SearchError):
    """The request waited longer than its limit."""


class AccessError(KinlensError):
    """A caller who may not do this."""


class KeyMissingError(AccessError):
    """No API key, or one that is not known."""


class ScopeError(AccessError):
    """A key without the scope that this needs."""


class KeysUnreadableError(AccessError):
    """The file of API keys cannot be read, so that no key is accepted."""


class RateLimitedError(AccessError):
    """More requests than the rate allows; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StateError(KinlensError):
    """Something that a running service keeps on the disk."""


class StateMissingError(StateError):
    """The service was started without a folder to keep things in."""


class JobNotFoundError(StateError):
    """No job of that number."""


class JobConflictError(StateError):
    """A job that cannot start, stop or go on in the state that it is in."""


class TrainingError(KinlensError):
    """A training job that cannot run."""


class JobError(TrainingError):
    """A job file that does not fit its schema."""


class DatasetError(TrainingError):
    """A data set that is missing or malformed."""


class CheckpointError(TrainingError):
    """A checkpoint or weight file that cannot be used."""


class EvaluationError(TrainingError):
    """Embeddings that cannot be evaluated."""


class ExportError(TrainingError):
    """An exported model that did not pass a parity gate."""
