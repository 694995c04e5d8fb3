"""Double-buffered weight transport over a filesystem, for reinforcement-learning post-training.

What needs torch is imported when it is first asked for: importing torch takes seconds, and looking
at a store needs none of it.
"""

import typing

from dbuffer import errors
from dbuffer.errors import *  # noqa: F403
from dbuffer.runtime.lazy import lazily as _lazily
from dbuffer.weights.names import (
    Exact as Exact,
    NameMap as NameMap,
    Pattern as Pattern,
    Prefix as Prefix,
)

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from dbuffer.mirror.mirror import Mirror as Mirror
    from dbuffer.publish.patches import SparsePatch as SparsePatch
    from dbuffer.publish.publication import (
        PendingPublication as PendingPublication,
        Publication as Publication,
    )
    from dbuffer.publish.resident import ResidentModel as ResidentModel
    from dbuffer.publish.sender import WeightSender as WeightSender
    from dbuffer.publish.sharded import ShardedWeightSender as ShardedWeightSender
    from dbuffer.receive.receiver import WeightReceiver as WeightReceiver
    from dbuffer.receive.snapshot import Snapshot as Snapshot
    from dbuffer.weights.checkpoint import LazyTensor as LazyTensor
else:
    __getattr__, _lazy = _lazily(
        __name__,
        {
            "LazyTensor": ".weights.checkpoint",
            "Mirror": ".mirror.mirror",
            "PendingPublication": ".publish.publication",
            "Publication": ".publish.publication",
            "ResidentModel": ".publish.resident",
            "ShardedWeightSender": ".publish.sharded",
            "Snapshot": ".receive.snapshot",
            "SparsePatch": ".publish.patches",
            "WeightReceiver": ".receive.receiver",
            "WeightSender": ".publish.sender",
        },
    )
    _here = ("Exact", "NameMap", "Pattern", "Prefix", "__version__")
    __all__ = sorted({*_here, *_lazy, *(name for name in vars(errors) if name.endswith("Error"))})

    def __dir__():
        return sorted({*globals(), *__all__})
