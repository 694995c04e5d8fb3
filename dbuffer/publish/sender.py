"""`WeightSender`: publishes a trainer's weights, one version after another.

`PendingPublication` is a version that is being published while the trainer continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch.utils.hooks import RemovableHandle

from dbuffer.errors import (
    ClosedError,
    InvalidWeightsError,
    StoreCorruptError,
    VersionError,
    WaitTimeoutError,
)
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.io.devices import fork_streams
from dbuffer.io.tensors import FileTensors, file_under
from dbuffer.publish.draft import checked_metadata
from dbuffer.publish.publisher import Publication, Publisher, SenderKeywords, SenderOptions
from dbuffer.ranks.world import World
from dbuffer.runtime import options
from dbuffer.runtime.closing import ProcessBound
from dbuffer.runtime.messages import first_line, listed
from dbuffer.runtime.trouble import without_frames
from dbuffer.store.open_version import OpenStoreVersion
from dbuffer.weights.sources import Progress, Source, Weights

if TYPE_CHECKING:
    from dbuffer.publish.patches import SparsePatch

logger = logging.getLogger(__name__)

_COPIED_BYTES = 1 << 16
"""Largest tensor without gradient, in bytes, that ``send(wait=False)`` copies before it returns. A
forward pass may write to such tensors, as in BatchNorm."""


class WeightSender(Publisher):
    """Sender that publishes a trainer's weights into a store, as the store's only writer.

    Args:
        store: the store's directory; made with mode 0700 if it does not exist.
        **options: fields of :class:`SenderOptions`: ``durable``, ``checksum``, ``delta`` and more.

    Raises:
        StoreBusyError: another sender has this store.
        StoreAccessError: the directory cannot be made or written, or another user owns it or can
            write to it.
        OptionError: an option is invalid, or the directory holds files that are not a store's.
    """

    _closed_message = "this sender of {store} is closed, or is of a parent process; make a new one"

    def __init__(
        self,
        store: str | os.PathLike[str],
        **options: Unpack[SenderKeywords],
    ) -> None:
        chosen = SenderOptions.parse(options)
        super().__init__(store, chosen, World(), num_threads=chosen.num_threads)
        self._describer = chosen.make_describer()
        self._pending: list[PendingPublication] = []
        """Publications of ``send(wait=False)`` that `_settle` has not waited for yet."""
        self._is_behind = True
        """Whether the store lacks the last weights: nothing was sent, or the last publish failed.
        If so, patches are refused."""

    @overload
    def send(
        self,
        weights: Weights,
        *,
        draft: Weights | None = None,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: Literal[True] = True,
    ) -> Publication: ...

    @overload
    def send(
        self,
        weights: Weights,
        *,
        draft: Weights | None = None,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: Literal[False],
    ) -> PendingPublication: ...

    def send(
        self,
        weights: Weights,
        *,
        draft: Weights | None = None,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> Publication | PendingPublication:
        """Publish weights. Receivers can see them when this returns, unless ``wait`` is False.

        Args:
            weights: a module (its parameters and persistent buffers), a state dict, a
                TensorDict, ``(name, tensor)`` pairs, the path of a HuggingFace checkpoint, or a
                weight source of vLLM. An iterator is consumed tensor by tensor, for weights that do
                not fit into memory at once. Other kinds of weights are published faster.
            draft: weights of a draft model for speculative decoding, published in the same version.
                ``rename`` does not apply to these weights.
            version: number of the version, above all earlier numbers. Default: the last number plus
                one.
            metadata: a mapping that JSON can hold, with the trainer's step for instance.
            progress: function that is called after each tensor of an iterator, a checkpoint or lazy
                weights, with the bytes copied so far and the total (0 if it is unknown).
            wait: if False, wait for an earlier publish that is still in progress, then publish in
                a thread, and return before it is done. The trainer may continue with forward and
                backward. It must not change the weights until ``wait()`` of the result has
                returned; see :meth:`guard`. Iterators, lazy tensors and checkpoints are refused.

        Raises:
            InvalidWeightsError: something in the weights or the metadata cannot be published.
            VersionError: ``version`` is not above the last version.
            StoreFullError, StoreAccessError: the filesystem refused access or has no room. The last
                version stays the newest, unless the message says that the new version is published.
            WriterSupersededError: another sender has taken the store over.
            OptionError: ``wait`` is neither True nor False.
            ClosedError: the sender was closed, or this process is a forked child.
            DBufferError: an earlier ``send(wait=False)`` failed, and its error was not raised yet.
        """
        started = time.monotonic()
        options.flag("wait", wait)
        self._is_behind = True
        self._settle()
        with self._publishing():
            self._is_behind = True  # again: the end of an earlier publish has reset it
            # Refuse bad input before anything is touched.
            number = self._writer.next_version(version)
            checked = checked_metadata(metadata)
            source = replace(self._describer.describe(weights, draft), progress=progress)
            if source.stream is not None and self._deltas is not None:
                raise InvalidWeightsError(
                    "a sender with delta=True compares all weights in memory, but an iterator "
                    "yields them one by one: pass a dictionary of tensors"
                )
            if wait:
                return self._send(started, source, number, checked)
        return self._send_from_a_thread(started, source, version, checked)

    def _send_from_a_thread(
        self,
        started: float,
        source: Source,
        version: int | None,
        metadata: dict[str, Any],
    ) -> PendingPublication:
        if source.stream is not None:
            rule = "True if weights are an iterator, which only your thread may run"
            options.refuse("wait", False, rule)
        if source.is_lazy:
            rule = "True if weights have lazy tensors, which only your thread may load"
            options.refuse("wait", False, rule)
        # Copy small tensors that need no gradient: a forward pass may write to them (BatchNorm).
        tensors = [
            tensor
            if tensor.requires_grad or tensor.nbytes > _COPIED_BYTES
            else tensor.detach().clone()
            for tensor in source.eager
        ]
        check = watch_writes([spec.name for spec in source.specs], tensors)
        source = replace(source, tensors=tensors, check=check)
        on_own_streams = fork_streams(source.eager)

        def publish() -> Publication:
            with self._publishing(), on_own_streams():
                number = self._writer.next_version(version)  # other threads publish, too
                return self._send(started, source, number, metadata)

        pending = PendingPublication()
        try:
            # Append first: even if an interrupt comes next, `close` must wait for the publish.
            self._pending.append(pending)
            pending.begin(publish)
        except BaseException:
            pending.cancel()
            raise
        return pending

    def send_patches(
        self,
        patches: Iterable[SparsePatch],
        *,
        version: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Publication:
        """Publish this sender's last version once more, with some elements changed.

        The cost grows with the patches, not with the model. Patches that change nothing also make a
        version. Values are copied bit for bit, NaNs included.

        Args:
            patches: at most one for each tensor.
            version: number of the version, above all earlier numbers. Default: the last number plus
                one.
            metadata: a mapping that JSON can hold, with the trainer's step for instance.

        Raises:
            OptionError: the sender was made without ``delta=True``.
            WeightsMismatchError: a patch names a tensor or an index that does not exist, has
                another shape, or has a dtype that cannot be cast to the tensor's.
            InvalidWeightsError: a patch repeats an index, has more or fewer values than indices,
                has a NaN or infinity that ``require_finite`` refuses, or is not a `SparsePatch`.
            StoreCorruptError: the last version was damaged after it was published.
            VersionError: the sender has published nothing yet, or its last publish failed: send all
                weights first. (Refused patches do not count as a failed publish.) Or ``version`` is
                too low.
            StoreFullError, StoreAccessError, WriterSupersededError, ClosedError: as for `send`.
        """
        started = time.monotonic()
        self._settle()
        with self._publishing():
            if self._deltas is None:
                options.refuse("delta", False, "True, for a sender of patches")
            if self._is_behind or self._part is None:
                raise VersionError(
                    "patches apply to the last weights, which this sender has not published in "
                    f"{self.store}: send all weights once"
                )
            # Imported here: a sender of whole versions does not need the modules of deltas.
            from dbuffer.publish.patches import patch_of

            version = self._writer.next_version(version)
            checked = checked_metadata(metadata)
            is_strict = self._describer.require_finite
            patch = patch_of(patches, self._part.whole, must_be_finite=is_strict)
            return self._send(started, Source((), [], {}, patch=patch), version, checked)

    def republish(
        self, version: int | VersionId, *, metadata: Mapping[str, Any] | None = None
    ) -> Publication:
        """Publish an earlier version's weights again, under a new number.

        Usually the weights file gets a second name, and no byte is copied. The weights are written
        anew if the version consists of an earlier version's file and deltas, or if the option
        ``checksum`` was changed since. A sender with ``delta=True`` also reads the weights, and may
        publish a delta.

        Args:
            version: number or id of one of the newest two versions, or of a kept version.
            metadata: a mapping that JSON can hold. The new version has the earlier version's
                metadata, this mapping, and the key ``republished_version`` with the earlier
                version's number.

        Raises:
            VersionError: the store does not hold the version.
            OptionError, InvalidWeightsError: the version or the metadata is of a wrong kind.
            StoreCorruptError: the version was damaged after it was published.
            StoreFullError, StoreAccessError, WriterSupersededError, ClosedError: as for `send`.
        """
        started = time.monotonic()
        self._settle()
        with self._publishing():
            number = self._writer.next_version(None)
            if not isinstance(version, VersionId):
                options.whole_number("version", version)
            added = checked_metadata(metadata)
            with self._writer.open_kept(version) as opened:
                origin = {"republished_version": opened.manifest.version}
                checked = checked_metadata(opened.manifest.metadata | added | origin)
                layout = opened.read_layout()
                is_hashed = opened.manifest.checksums_xxh3 is not None
                if self._deltas is not None or opened.manifest.anchor or is_hashed != self._hashed:
                    views = self._read_whole(opened, layout).views
                    source = Source(layout.specs, views, layout.aliases, is_lazy=False)
                    return self._send(started, source, number, checked)
                self._mappings.keep_only()  # mappings keep the room of files that are removed now
                published = self._writer.republish(opened, number, checked)
        return self._count(Publication.of(published.id, layout, started, None))

    def guard(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Make each step of an optimizer wait for the publish that ``send(wait=False)`` began.

        If the publish failed, the step raises the publish's error and changes no weights.

        Args:
            optimizer: an optimizer of torch, or a wrapper of one, as in accelerate and DeepSpeed.

        Returns:
            A handle whose ``remove()`` removes the guard.

        Raises:
            OptionError: the argument is not an optimizer.
        """
        steps = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(steps, torch.optim.Optimizer):
            rule = (
                "a torch.optim.Optimizer. For another class, call wait() on each result of send() "
                "before the optimizer's next step"
            )
            options.refuse("optimizer", type(optimizer), rule)
        return steps.register_step_pre_hook(lambda *_: self._settle())

    def _settle(self) -> None:
        """Wait for pending publications; raise the first error that was not raised before."""
        # A forked child has no thread that publishes. A publishing thread must not wait for itself.
        if self._is_inherited or self._publishing_thread == threading.get_ident():
            return
        settled = list(self._pending)
        errors = [
            error for pending in settled if (error := pending.take_unreported_error()) is not None
        ]
        for pending in settled:
            with contextlib.suppress(ValueError):  # another thread has removed it
                self._pending.remove(pending)
        for error in errors[1:]:
            logger.error("another version that was sent was not published, either: %s", str(error))
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for a publish in progress, then close the store. The last version stays published.

        Raises:
            DBufferError: an earlier ``send(wait=False)`` failed, and its error was not raised yet.
        """
        try:
            self._settle()
        finally:
            super().close()

    def _send(
        self,
        started: float,
        source: Source,
        version: int,
        metadata: dict[str, Any],
    ) -> Publication:
        if source.stream is None:
            self._refuse_idle_buffer(source)
            if not source.is_lazy:
                source.refuse_values(source.specs, source.eager)
        self._is_behind = True  # also if patches or an earlier version are not published
        published = self._publish(started, source, version, metadata)
        self._is_behind = False
        return published

    def _read_whole(self, opened: OpenStoreVersion, layout: Layout) -> FileTensors:
        # Imported here: a sender reads weights nowhere else.
        from dbuffer.io.chain_reader import published_checksums, read_version

        contents = FileTensors.in_memory(layout)
        is_hashed = opened.manifest.checksums_xxh3 is not None
        checksums = read_version(opened, layout, contents, self._copier, hashed=is_hashed)
        if is_hashed and checksums != published_checksums(opened, layout, {}):
            raise StoreCorruptError(
                f"{opened.path}: version {opened.manifest.version} was damaged after it was "
                "published; go back to another version"
            )
        return contents

    def _refuse_idle_buffer(self, source: Source) -> None:
        """Raise if the weights contain a snapshot's tensor in the file that is overwritten next."""
        files = [file_under(tensor) for tensor in source.eager]
        if not any(files):
            return
        idle = self._writer.idle_file()
        for spec, file in zip(source.specs, files, strict=True):
            if file is not None and file == idle:
                raise InvalidWeightsError(
                    f"{spec.name} is a tensor of a snapshot, and its memory is the buffer of "
                    f"{self.store} that the next version overwrites. To go back to the snapshot's "
                    "version, call republish(), or call snapshot.copy() and send the copy after "
                    "the snapshot's with block"
                )


class PendingPublication(ProcessBound):
    """Version that is being published in another thread, as ``send(wait=False)`` returns it.

    Do not change the weights until :meth:`wait` has returned. The sender's next ``send`` and its
    ``close`` also wait for the publication. So does each step of an optimizer that you passed to
    ``guard``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._future: futures.Future[Publication] = futures.Future()
        self._unreported: list[str] = []
        weakref.finalize(self, _log_unreported, self._unreported, os.getpid())

    def begin(self, publish: Callable[[], Publication]) -> None:
        """Publish from a new thread, unless :meth:`cancel` is called first."""

        def run() -> None:
            if not self._future.set_running_or_notify_cancel():
                return
            try:
                publication = publish()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._unreported.append(first_line(error))
                self._future.set_exception(without_frames(error))
            else:
                self._future.set_result(publication)

        threading.Thread(target=run, name="dbuffer-send").start()

    def cancel(self) -> None:
        self._future.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the publish has ended, with success or with an error."""
        self._check_not_forked()
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> Publication:
        """Wait until every receiver can see the version. After that you may change the weights.

        Args:
            timeout_s: how long to wait. Default: without limit.

        Raises:
            WaitTimeoutError: the version was not published in time.
            InvalidWeightsError: something changed the weights meanwhile; nothing was published.
            ClosedError: this process is a forked child.
            DBufferError: any error of ``send``.
        """
        self._check_not_forked()
        if timeout_s is not None:
            options.seconds("timeout_s", timeout_s)
        if not futures.wait([self._future], timeout_s).done:
            raise WaitTimeoutError(
                f"the weights were not published within {timeout_s:g} s; do not change them yet, "
                "and call wait() again"
            )
        self._unreported.clear()
        return self._future.result()

    def take_unreported_error(self) -> BaseException | None:
        """Wait for the publish to end; return its error, unless the error was reported before."""
        with contextlib.suppress(futures.CancelledError):
            error = self._future.exception()
            if self._unreported:
                self._unreported.clear()
                return error
        return None

    def _check_not_forked(self) -> None:
        # A forked child lacks the publishing thread, and locks held during the fork stay locked.
        if self._is_inherited:
            raise ClosedError(
                "this process was forked from the process that publishes this version: wait in "
                "the process that called send()"
            )


def _log_unreported(unreported: list[str], pid: int) -> None:
    """Log an error that cannot be raised, because the program ends or dropped the sender."""
    if os.getpid() == pid:  # not in a forked child: the parent logs it
        for problem in unreported:
            logger.error("weights that were sent with wait=False were not published: %s", problem)


def watch_writes(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that raises `InvalidWeightsError` if a tensor was written since this call.

    The function compares autograd's counts of writes. It does not detect writes that bypass
    autograd (``tensor.data``, NumPy, another process) or writes to inference tensors.
    """
    watched = [
        (name, tensor, tensor._version)  # noqa: SLF001 - autograd's own count
        for name, tensor in zip(names, tensors, strict=True)
        if not tensor.is_inference()
    ]

    def require_unchanged() -> None:
        changed = [name for name, tensor, count in watched if tensor._version != count]  # noqa: SLF001
        if changed:
            raise InvalidWeightsError(
                f"{listed(changed)} changed while they were being published, so nothing was "
                "published: call wait() on the result of send(wait=False) before optimizer.step() "
                "(or sender.guard(optimizer) once), and before a forward pass that writes to them"
            )

    return require_unchanged
