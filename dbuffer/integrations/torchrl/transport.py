"""`VLLMDoubleBufferTransport`: TorchRL's name for one way from a sender to a receiver."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

from tensordict import TensorDict

from dbuffer.errors import DBufferError, StoreNotFoundError, WaitTimeoutError
from dbuffer.integrations.torchrl.addresses import Addresses
from dbuffer.integrations.torchrl.extraction import Extracted, VersionInfo, extract_for_vllm
from dbuffer.integrations.torchrl.options import TransportOptions
from dbuffer.mirror.mirror import Mirror
from dbuffer.publish.publication import Publication
from dbuffer.publish.sender import WeightSender
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.receive.snapshot import Snapshot
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.weights.targets import Matcher

logger = logging.getLogger(__name__)


class VLLMDoubleBufferTransport:
    """Publish into a store by hand, and read from it by hand; nothing follows it.

    Args:
        remote_addr: the store, as the sender sees it.
        local_addr: where the receiver reads: a store in shared memory, to which every version is
            copied once; or the same store under another name. Default: ``remote_addr`` itself.
        num_threads: threads that copy, on either side.
        options: for both; ``num_threads`` is theirs then.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        *,
        options: TransportOptions | None = None,
    ) -> None:
        self.remote_addr = os.fspath(remote_addr)
        self.local_addr = os.fspath(local_addr) if local_addr is not None else self.remote_addr
        self._options = options or TransportOptions(num_threads=num_threads)
        self.num_threads = self._options.num_threads
        self.addresses = Addresses(
            self.remote_addr,
            self.local_addr,
            allow_shared_store=self._options.allow_shared_store,
        )
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._mirror: Mirror | None = None
        self._received: int | None = None
        self._matcher = Matcher()

    def send_weights(self, model_id: str, weights: Any) -> Publication:
        """Publish what a checkpoint holds of a module, a TensorDict or a state dict.

        Args:
            model_id: for the log.
            weights: any of these.

        Raises:
            InvalidWeightsError: something in it cannot be published.
            StoreBusyError: another sender has the store.
        """
        publication = self.publish(extract_for_vllm(weights, TensorDict.from_module))
        logger.info("%s: version %d in %s", model_id, publication.version, self.remote_addr)
        return publication

    def publish(self, extracted: Extracted) -> Publication:
        if self._sender is None:
            self._sender = self._options.make_sender(self.remote_addr)
        info = VersionInfo(extra_state=extracted.extra_state)
        return self._sender.send(extracted.tensors, metadata=info.to_metadata())

    def wait_applied(self, version: int, receivers: Collection[str], timeout_s: float) -> None:
        """Wait until these receivers have applied a version that was published here.

        Raises:
            WaitTimeoutError: some have not, in time; the message says which version each has.
            ReceiverFailedError: one cannot apply it, or its process has ended.
        """
        if self._sender is not None and receivers:
            self._sender.wait_applied(version, receivers=receivers, timeout_s=timeout_s)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> Any | None:
        """Return a copy of the newest version; None if it was received before, or there is none.

        Args:
            timeout: seconds to wait for it. None: return at once.
            weights: a TensorDict, or a dictionary by dotted name, to copy into and to return.
                Default: a new TensorDict with flat keys.
            model: apply them to it as well, with ``strategy``.
            strategy: a ``WeightStrategy`` of TorchRL.

        Raises:
            WeightsMismatchError: (a ``ValueError``) ``weights`` does not fit, and was not touched.
            SnapshotEvictedError: copying took longer than the sender waits; what was copied must
                not be used.
        """
        receiver = self._open_receiver()
        try:
            with receiver.open(self._received, timeout or 0.0) as snapshot:
                if weights is None:
                    received = _copy_of(snapshot)
                else:
                    snapshot.fill(self._matcher.match(weights, snapshot.layout))
                    received = weights
        except WaitTimeoutError:
            if self._received is None:
                self.addresses.log_once_if_nothing_is_there()
            return None
        self._received = snapshot.version
        if model is not None and strategy is not None:
            applied = received if weights is not None else received.unflatten_keys(".")
            strategy.apply_weights(model, applied)
        return received

    def _open_receiver(self) -> WeightReceiver:
        """Open the store that is read; wait until its mirror, if any, is up to date."""
        if self._receiver is None:
            opened = self._options.open_reader(self.remote_addr, self.local_addr)
            self._receiver, self._mirror = opened
        if self._mirror is not None:
            self._mirror.wait_until_current()
        return self._receiver

    def check_connection(self) -> bool:
        """Whether the store can be used: it is there and to be trusted, or could be made."""
        store = DoubleBuffer(self.local_addr, allow_shared_store=self._options.allow_shared_store)
        try:
            store.check()
        except StoreNotFoundError:
            if os.path.lexists(store.root):  # a file, or a link that leads nowhere
                return False
            there = next(parent for parent in store.root.parents if parent.exists())
            return os.access(there, os.W_OK | os.X_OK)
        except DBufferError:
            return False
        return True

    def close(self) -> None:
        """Close the store. What was published stays."""
        for part in (self._sender, self._receiver, self._mirror):
            if part is not None:
                part.close()
        self._sender = self._receiver = self._mirror = None


def _copy_of(snapshot: Snapshot) -> TensorDict:
    tensors = dict(snapshot.copy())
    tensors |= {alias: tensors[name] for alias, name in snapshot.aliases.items()}
    return TensorDict(tensors, batch_size=[])
