"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training.

Each public name, except errors, is imported when it is first used, because most of them need torch,
whose import takes seconds.
"""

import typing

from dbuffer import errors
from dbuffer.errors import *  # noqa: F403
from dbuffer.runtime.lazy import lazily

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from dbuffer.format.lineage import VersionId as VersionId
    from dbuffer.format.manifest import Lag as Lag
    from dbuffer.mirror.mirror import Mirror as Mirror
    from dbuffer.publish.patches import SparsePatch as SparsePatch
    from dbuffer.publish.publisher import Publication as Publication
    from dbuffer.publish.publisher import SenderOptions as SenderOptions
    from dbuffer.publish.sender import PendingPublication as PendingPublication
    from dbuffer.publish.sender import WeightSender as WeightSender
    from dbuffer.publish.sharded import ShardedWeightSender as ShardedWeightSender
    from dbuffer.receive.reader import Snapshot as Snapshot
    from dbuffer.receive.receiver import WeightReceiver as WeightReceiver
    from dbuffer.weights.lazy_tensor import LazyTensor as LazyTensor
    from dbuffer.weights.names import NameMap as NameMap
else:
    __getattr__, _names = lazily(
        __name__,
        {
            "LazyTensor": ".weights.lazy_tensor",
            "Lag": ".format.manifest",
            "Mirror": ".mirror.mirror",
            "NameMap": ".weights.names",
            "PendingPublication": ".publish.sender",
            "Publication": ".publish.publisher",
            "SenderOptions": ".publish.publisher",
            "ShardedWeightSender": ".publish.sharded",
            "Snapshot": ".receive.reader",
            "SparsePatch": ".publish.patches",
            "VersionId": ".format.lineage",
            "WeightReceiver": ".receive.receiver",
            "WeightSender": ".publish.sender",
        },
    )
    __all__ = sorted({"__version__", *_names, *(n for n in vars(errors) if not n.startswith("_"))})

    def __dir__():
        return sorted({*globals(), *__all__})
