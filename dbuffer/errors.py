"""Every error that dbuffer raises: one tree, and each error also a standard one.

Catch :class:`DBufferError` for all of them, or the standard type (``TimeoutError``,
``ValueError``, ``OSError`` ...) where the code around already does. Each takes one message,
so that all of them pickle and cross process boundaries.
"""


class DBufferError(Exception):
    """Base class of all errors raised by dbuffer."""


class StoreNotFoundError(DBufferError, FileNotFoundError):
    """The store's directory, or a file that it needs, is not there."""


class StoreInsecureError(DBufferError, PermissionError):
    """The store belongs to someone else, or others can write to it."""


class StoreAccessError(DBufferError, OSError):
    """The filesystem refused a read, a write, a flush or a lock that the store needs."""


class StoreFullError(StoreAccessError):
    """The filesystem has no room for another version. The last one stays readable."""


class StoreCorruptError(DBufferError, ValueError):
    """A file of the store does not say what it must. Nothing of it was used."""


class StoreFormatError(StoreCorruptError):
    """The store was written by a version of dbuffer whose format this one does not know."""


class StoreMismatchError(DBufferError, ValueError):
    """A directory that was to become a mirror holds versions of another store."""


class ChecksumError(StoreCorruptError):
    """Bytes in a buffer are not those that were published, or there is nothing to check with."""


class WriterActiveError(DBufferError, BlockingIOError):
    """Another sender has this store open; a store has one writer at a time."""


class WriterSupersededError(DBufferError, RuntimeError):
    """Another sender took the store over. This one must not publish any more."""


class VersionError(DBufferError, ValueError):
    """A version that is not above the last published one, or is no version at all."""


class VersionTimeoutError(DBufferError, TimeoutError):
    """No version newer than the one asked for was published in time."""


class VersionRegressedError(DBufferError, RuntimeError):
    """The store went back to a lower version: it was emptied or replaced under a receiver."""


class AcknowledgementTimeoutError(DBufferError, TimeoutError):
    """Too few receivers acknowledged a version in time."""


class ReceiverFailedError(DBufferError, RuntimeError):
    """A receiver that was waited for says that it cannot apply a version, or has ended."""


class OptionError(DBufferError, ValueError):
    """An option of a sender or receiver has a value that it cannot have."""


class TargetTypeError(DBufferError, TypeError):
    """What weights were to be loaded into is nothing that can hold them."""


class InvalidWeightsError(DBufferError, ValueError):
    """What was given to publish cannot be published. Nothing was written."""


class ResidencyError(DBufferError, NotImplementedError):
    """A model's parameters cannot live in a store's buffers. The model was not touched."""


class WeightsMismatchError(DBufferError, ValueError):
    """The published weights do not fit the target. The target was not touched."""


class SnapshotEvictedError(DBufferError, RuntimeError):
    """A snapshot was held longer than the sender waits, and its buffer was taken."""


class RankFailedError(DBufferError, RuntimeError):
    """A rank of a sharded trainer failed or was lost, so that none of them could go on."""


class TrainerUnsupportedError(DBufferError, NotImplementedError):
    """A trainer shards its weights in a way that is not known here. Nothing was published."""


class ClosedError(DBufferError, ValueError):
    """A sender or receiver was used after it was closed, or in a forked child."""


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight. Its weights were not touched."""


class EngineUnsupportedError(DBufferError, NotImplementedError):
    """The engine was not started in a way that lets it take weights from a store."""


class EngineUpdateError(DBufferError, RuntimeError):
    """An engine could not switch to a version. It serves on with the weights that it had."""


class EngineBrokenError(DBufferError, RuntimeError):
    """An engine's weights are half loaded and could not be repaired. It refuses to serve."""


class EngineUnreachableError(DBufferError, ConnectionError):
    """An engine's server does not answer, or not as a vLLM in development mode does."""
