"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training."""

from dbuffer.checkpoint import LazyTensor
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
    RankFailedError,
    ReceiverFailedError,
    SnapshotEvictedError,
    StoreAccessError,
    StoreCorruptError,
    StoreFormatError,
    StoreFullError,
    StoreInsecureError,
    StoreMismatchError,
    StoreNotFoundError,
    TargetTypeError,
    VersionError,
    VersionRegressedError,
    VersionTimeoutError,
    WeightsMismatchError,
    WriterActiveError,
    WriterSupersededError,
)
from dbuffer.mirror import Mirror
from dbuffer.names import Exact, NameMap, Pattern, Prefix
from dbuffer.receiver import WeightReceiver
from dbuffer.sender import Publication, WeightSender
from dbuffer.sharded import ShardedWeightSender
from dbuffer.snapshot import Snapshot

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
    "Exact",
    "InvalidWeightsError",
    "LazyTensor",
    "Mirror",
    "NameMap",
    "OptionError",
    "Pattern",
    "Prefix",
    "Publication",
    "RankFailedError",
    "ReceiverFailedError",
    "ShardedWeightSender",
    "Snapshot",
    "SnapshotEvictedError",
    "StoreAccessError",
    "StoreCorruptError",
    "StoreFormatError",
    "StoreFullError",
    "StoreInsecureError",
    "StoreMismatchError",
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
]
