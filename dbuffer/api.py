"""Public names of `dbuffer`, besides its errors."""

from dbuffer.format.lineage import VersionId as VersionId
from dbuffer.format.manifest import Lag as Lag
from dbuffer.mirror.mirror import Mirror as Mirror
from dbuffer.publish.patches import SparsePatch as SparsePatch
from dbuffer.publish.sender import PendingPublication as PendingPublication
from dbuffer.publish.publisher import Publication as Publication
from dbuffer.publish.sender import WeightSender as WeightSender
from dbuffer.publish.publisher import SenderOptions as SenderOptions
from dbuffer.publish.sharded import ShardedWeightSender as ShardedWeightSender
from dbuffer.receive.receiver import WeightReceiver as WeightReceiver
from dbuffer.receive.reader import Snapshot as Snapshot
from dbuffer.weights.lazy_tensor import LazyTensor as LazyTensor
from dbuffer.weights.names import NameMap as NameMap
