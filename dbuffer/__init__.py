"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training.

What needs torch is imported when it is first asked for: importing torch takes seconds, and looking
at a store needs none of it.
"""

import importlib
import typing

from dbuffer.errors import (
    AcknowledgementTimeoutError,
    BridgeSetupError,
    BridgeStateError,
    ChecksumError,
    ClosedError,
    DBufferError,
    EngineBrokenError,
    EngineBusyError,
    EngineEndedError,
    EngineUnreachableError,
    EngineUnsupportedError,
    EngineUpdateError,
    InvalidWeightsError,
    NotReadyError,
    OptionError,
    RankFailedError,
    RankTimeoutError,
    ReceiverActiveError,
    ReceiverFailedError,
    ResidencyError,
    SnapshotEvictedError,
    StoreAccessError,
    StoreCorruptError,
    StoreFormatError,
    StoreFullError,
    StoreInsecureError,
    StoreMismatchError,
    StoreNotFoundError,
    StoreReplacedError,
    TargetTypeError,
    TrainerUnsupportedError,
    VersionError,
    VersionRegressedError,
    VersionTimeoutError,
    WeightsChangedError,
    WeightsMismatchError,
    WriterActiveError,
    WriterSupersededError,
)
from dbuffer.weights.names import Exact, NameMap, Pattern, Prefix

if typing.TYPE_CHECKING:
    from dbuffer.mirror.mirror import Mirror
    from dbuffer.publish.patches import SparsePatch
    from dbuffer.publish.publication import PendingPublication, Publication
    from dbuffer.publish.resident import ResidentModel
    from dbuffer.publish.sender import WeightSender
    from dbuffer.publish.sharded import ShardedWeightSender
    from dbuffer.receive.receiver import WeightReceiver
    from dbuffer.receive.snapshot import Snapshot
    from dbuffer.weights.checkpoint import LazyTensor
else:
    _MODULE_OF = {
        "LazyTensor": "weights.checkpoint",
        "Mirror": "mirror.mirror",
        "PendingPublication": "publish.publication",
        "Publication": "publish.publication",
        "ResidentModel": "publish.resident",
        "ShardedWeightSender": "publish.sharded",
        "SparsePatch": "publish.patches",
        "Snapshot": "receive.snapshot",
        "WeightReceiver": "receive.receiver",
        "WeightSender": "publish.sender",
    }

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # and is not asked for here again
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "AcknowledgementTimeoutError",
    "BridgeSetupError",
    "BridgeStateError",
    "ChecksumError",
    "ClosedError",
    "DBufferError",
    "EngineBrokenError",
    "EngineBusyError",
    "EngineEndedError",
    "EngineUnreachableError",
    "EngineUnsupportedError",
    "EngineUpdateError",
    "Exact",
    "InvalidWeightsError",
    "LazyTensor",
    "Mirror",
    "NameMap",
    "NotReadyError",
    "OptionError",
    "Pattern",
    "PendingPublication",
    "Prefix",
    "Publication",
    "RankFailedError",
    "RankTimeoutError",
    "ReceiverActiveError",
    "ReceiverFailedError",
    "ResidencyError",
    "ResidentModel",
    "ShardedWeightSender",
    "Snapshot",
    "SnapshotEvictedError",
    "SparsePatch",
    "StoreAccessError",
    "StoreCorruptError",
    "StoreFormatError",
    "StoreFullError",
    "StoreInsecureError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "StoreReplacedError",
    "TargetTypeError",
    "TrainerUnsupportedError",
    "VersionError",
    "VersionRegressedError",
    "VersionTimeoutError",
    "WeightReceiver",
    "WeightSender",
    "WeightsChangedError",
    "WeightsMismatchError",
    "WriterActiveError",
    "WriterSupersededError",
    "__version__",
]
