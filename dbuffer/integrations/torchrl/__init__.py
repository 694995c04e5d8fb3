"""TorchRL: a store as the way that weights take from a trainer to collectors and vLLM engines."""

from dbuffer.integrations.torchrl.scheme import DoubleBufferSyncScheme
from dbuffer.integrations.torchrl.transport import DoubleBufferTransport

__all__ = ["DoubleBufferSyncScheme", "DoubleBufferTransport"]
