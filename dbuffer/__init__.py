"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training."""

from dbuffer.errors import (
    AcknowledgementTimeoutError,
    ChecksumError,
    ClosedError,
    DBufferError,
    EngineBrokenError,
    EngineBusyError,
    EngineUnreachableError,
    EngineUnsupportedError,
    EngineUpdateError,
    InvalidWeightsError,
    OptionError,
    SnapshotEvictedError,
    StoreAccessError,
    StoreCorruptError,
    StoreFormatError,
    StoreFullError,
    StoreInsecureError,
    StoreNotFoundError,
    TargetTypeError,
    VersionError,
    VersionRegressedError,
    VersionTimeoutError,
    WeightsMismatchError,
    WriterActiveError,
    WriterSupersededError,
)
from dbuffer.receiver import WeightReceiver
from dbuffer.sender import Publication, WeightSender
from dbuffer.snapshot import Snapshot
from dbuffer.sources import gather_tensors

__version__ = "0.1.0"

__all__ = [
    "AcknowledgementTimeoutError",
    "ChecksumError",
    "ClosedError",
    "DBufferError",
    "EngineBrokenError",
    "EngineBusyError",
    "EngineUnreachableError",
    "EngineUnsupportedError",
    "EngineUpdateError",
    "InvalidWeightsError",
    "OptionError",
    "Publication",
    "Snapshot",
    "SnapshotEvictedError",
    "StoreAccessError",
    "StoreCorruptError",
    "StoreFormatError",
    "StoreFullError",
    "StoreInsecureError",
    "StoreNotFoundError",
    "TargetTypeError",
    "VersionError",
    "VersionRegressedError",
    "VersionTimeoutError",
    "WeightReceiver",
    "WeightSender",
    "WeightsMismatchError",
    "WriterActiveError",
    "WriterSupersededError",
    "__version__",
    "gather_tensors",
]
