"""`WeightReceiver`: reads a store's newest version, as a snapshot or into a target."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from dbuffer import errors
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import MAX_NUMBER, Lineage, VersionId
from dbuffer.format.manifest import (
    Manifest,
    Pointer,
    host_in_id,
    is_receiver_id,
    metadata_for_record,
)
from dbuffer.format.places import POINTER_FILE
from dbuffer.io.copier import Copier
from dbuffer.io.devices import any_on_gpu
from dbuffer.io.tensors import FileTensors
from dbuffer.receive.follow_loop import Followed, check_version
from dbuffer.receive.reader import Snapshot, SnapshotTensors, VersionReader
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.runtime.trouble import TranslatedErrors, log_once
from dbuffer.store import filesystem, kept
from dbuffer.store.buffer import DoubleBuffer, pointer_to
from dbuffer.store.open_version import OpenStoreVersion, OvertakenError, open_newest, open_version
from dbuffer.store.records import RecordFile
from dbuffer.store.watcher import Watcher
from dbuffer.weights.checkpoint import DEFAULT_SHARD_BYTES, write_checkpoint
from dbuffer.weights.targets import Matcher, refuse_adapter, require_names

if TYPE_CHECKING:  # its import takes as long as torch's
    from tensordict import TensorDictBase

logger = logging.getLogger(__name__)

Target: TypeAlias = (
    "nn.Module"
    " | TensorDictBase"
    " | MutableMapping[str, torch.Tensor]"
    " | Callable[[Iterable[tuple[str, torch.Tensor]]], Any]"
)


_NO_FAILURES = (
    OvertakenError,
    errors.ClosedError,
    errors.SnapshotEvictedError,
    errors.VersionError,
    errors.WaitTimeoutError,
)
"""Errors that say nothing about whether the newest version can be applied."""


class WeightReceiver(Followed, Closing, ProcessBound):
    """Reader of a store. Any number of receivers, in any processes, can follow one store.

    A receiver can be made before the store exists. Use it in one thread at a time. With its first
    version it writes its record, ``receivers/ID.TOKEN.json``, into the store. If the store's newest
    version does not descend from the version that the receiver saw last (a fork), methods that read
    the version pointer raise `VersionRegressedError` until :meth:`follow_fork` is called.

    Args:
        store: the store's directory.
        receiver_id: name for acknowledgements: up to 128 letters, digits and ``._-``. A sender that
            waits for a name waits for all living receivers with that name. Default: host, process
            id and a random part.
        poll_interval_s: longest time between two reads of the version pointer during a wait. If the
            filesystem reports events, a wait reads the pointer at once after a publish.
        verify: check every tensor against its checksum. ``"auto"``: on network mounts only. True
            refuses versions that were published without checksums.
        num_threads: threads that copy. Default: this process's cores, at most 8.
        allow_shared_store: accept a directory that belongs to another user, or that other users can
            write to.
    """

    record: RecordFile

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        receiver_id: str | None = None,
        poll_interval_s: float = 0.5,
        verify: bool | Literal["auto"] = "auto",
        num_threads: int | None = None,
        allow_shared_store: bool = False,
    ) -> None:
        super().__init__()
        is_ephemeral = receiver_id is None
        if receiver_id is None:
            receiver_id = f"receiver-{host_in_id()}-{os.getpid()}-{secrets.token_hex(4)}"
        if not (isinstance(receiver_id, str) and is_receiver_id(receiver_id)):
            rule = "1 to 128 letters, digits, '.', '_' or '-', the first no '.' or '-'"
            options.refuse("receiver_id", receiver_id, rule)
        options.choice("verify", verify, (True, False, "auto"))
        self.receiver_id = receiver_id
        self._store = DoubleBuffer(store, allow_shared_store=allow_shared_store)
        self.poll_interval_s = options.positive_seconds("poll_interval_s", poll_interval_s)
        self._copier = Copier(num_threads)
        self._watcher = Watcher(self._store.root, POINTER_FILE)
        self._is_closed = False
        self.record = RecordFile(self._store.root, receiver_id)
        self.record.set(is_ephemeral=is_ephemeral)
        self.reader = VersionReader(self._store, self.record, self._copier, verify)
        self._pointer: Pointer | None = None
        self.left: Lineage | None = None
        """Newest version that this receiver had seen before it last followed a fork, or None if it
        has followed none."""
        self._read_last: tuple[VersionId, dict[str, Any]] | None = None
        self._loaded: int | None = None
        self.notes_wait = True
        """Whether to log that there is no version yet, the next time that none is found."""
        self._matcher = Matcher()
        self._loaded_names: dict[str, int] = {}
        """Names of all tensors loaded so far, and the first version that contained each name."""

    @property
    def store(self) -> Path:
        return self._store.root

    def newest(self) -> Pointer | None:
        """Return the pointer to the newest version, or None if there is none."""
        return self._store.newest_pointer() if self._store.exists() else None

    @property
    def last_seen(self) -> Lineage | None:
        """Newest version that this receiver has seen, with the runs that lead to it, or None."""
        return None if self._pointer is None else self._pointer.lineage

    @contextlib.contextmanager
    def open(
        self,
        newer_than: int | None = None,
        timeout_s: float = 60.0,
        *,
        version: int | VersionId | None = None,
        acknowledge: bool = True,
    ) -> Iterator[Snapshot]:
        """Open the newest version for a ``with`` block.

        If the block ends without an error, the version is acknowledged as applied. An error that
        leaves the block is reported to senders that wait for this receiver.

        Args:
            newer_than: wait for a version above this one. Default: any version will do.
            timeout_s: how long to wait for the version.
            version: open exactly this version, by number or id.
            acknowledge: whether to acknowledge the version.

        Raises:
            WaitTimeoutError: the version was not published within ``timeout_s``.
            VersionError: ``version`` is no longer in the store.
            VersionRegressedError: the store was emptied or replaced. If this is raised at the end
                of the block, discard all data that the block read.
            SnapshotEvictedError: at the end of the block: the block took longer than the sender
                waits. Discard all data that the block read.
            StoreCorruptError, StoreAccessError: the version cannot be read.
        """
        self._check_open()
        check_version("newer_than", newer_than)
        if not isinstance(version, VersionId):
            check_version("version", version)
        options.seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        find = functools.partial(self._wait_and_open, newer_than, version, deadline, timeout_s)
        while True:
            with self._opened(find, is_reported=acknowledge) as opened:
                if opened is None:
                    continue
                try:
                    tensors = self.reader.read(opened)
                except OvertakenError:
                    continue
                verify = self.reader.verifies_copies
                try:
                    yield Snapshot(opened, tensors, self._copier, verify=verify)
                finally:
                    self.reader.keep_memory(opened, tensors)
                if not opened.is_unchanged():
                    self._store.newest_pointer(self._pointer)  # raises if the store was emptied
                    raise errors.SnapshotEvictedError(
                        f"version {opened.manifest.version} of {self.store} was open for longer "
                        "than the sender waits, so its buffer was reused; open the newest version"
                    )
                if acknowledge:
                    self._set_applied(opened.manifest.lineage)
                return

    @contextlib.contextmanager
    def reporting(self, version: VersionId | None) -> Iterator[None]:
        """If the ``with`` block raises an error, note the error in the receiver's record.

        If ``version`` is given, the record has the error until a version is acknowledged. Otherwise
        the error concerns the store, and stays until a block without ``version`` succeeds.
        """
        try:
            yield
        except _NO_FAILURES:
            raise
        except Exception as error:
            self.record.write_problem(error, version)
            raise
        record = self.record.current
        if version is None and record.problem is not None and record.problem_version is None:
            self.record.write(problem=None)

    def open_seen(
        self, newer_than: int | None = None
    ) -> contextlib.AbstractContextManager[OpenStoreVersion | None]:
        """Open the version that :meth:`wait_for_version` returned last, but read no tensor of it.

        The ``with`` block gets None if the version is not above ``newer_than``.
        """
        self._check_open()
        find = functools.partial(self._open_newest, newer_than, reread=False)
        return self._opened(find, is_reported=False)

    @contextlib.contextmanager
    def _opened(
        self, find: Callable[[], OpenStoreVersion | None], *, is_reported: bool
    ) -> Iterator[OpenStoreVersion | None]:
        reporting = self.reporting if is_reported else contextlib.nullcontext
        opened = None
        try:
            with TranslatedErrors(self._unmap_lost), reporting(None):
                opened = find()
            with contextlib.nullcontext() if opened is None else reporting(opened.manifest.id):
                yield opened
        finally:
            if opened is not None:
                opened.close()
            if opened is not None or self.record.current.held is not None:
                self.record.write(held=None)

    def load_into(
        self,
        target: Target,
        *,
        partial: bool = False,
        draft: bool = False,
    ) -> int | None:
        """Load the newest version, unless this receiver has loaded it already.

        If a sender overwrites the version that is being loaded, the newest version is loaded
        instead. If this second load fails, the target can hold parts of both versions; then a note
        on the error says so.

        Args:
            target: a module or a dictionary of tensors, filled in place; or a function such as
                vLLM's ``model.load_weights``, called with an iterator of ``(name, tensor)`` pairs
                that is valid only during the call. A coroutine function is refused.
            partial: leave those tensors of the target unchanged that the version lacks. The target
                must have all of the version's tensors. A version that lacks a tensor loaded earlier
                is refused, because that tensor would keep its earlier values: use one receiver for
                one target.
            draft: load the version's draft, instead of the model that it drafts for.

        Returns:
            Number of the loaded version, or None if the store has no version, or no newer one.

        Raises:
            WeightsMismatchError: names, shapes or dtypes differ; or the version is an adapter, has
                no draft, or lacks a tensor of an earlier version. The target is unchanged, unless a
                note on the error says otherwise.
            VersionRegressedError: the newest version does not follow the last one seen.
            StoreCorruptError: the store is damaged.
        """
        overwritten: int | None = None
        while True:
            self._check_open()
            find = functools.partial(self._open_newest, self._loaded)
            try:
                with self._opened(find, is_reported=True) as opened:
                    if opened is None:
                        return None
                    manifest = opened.manifest
                    refuse_adapter(manifest.metadata)
                    self._load(opened, target, partial, draft)
                    opened.require_unchanged()
                    self._loaded = manifest.version
                    self._set_applied(manifest.lineage)
                    return manifest.version
            except OvertakenError:
                overwritten = None if self._pointer is None else self._pointer.version
                message = "version %d of %s was overwritten while it was loaded; loading the newest"
                logger.warning(message, overwritten, self.store)
            except Exception as error:
                if overwritten is not None:
                    error.add_note(
                        f"the target may hold parts of version {overwritten}, which was "
                        "overwritten while it was loaded"
                    )
                raise

    def save_pretrained(
        self,
        directory: str | os.PathLike[str],
        *,
        version: int | VersionId | None = None,
        draft: bool = False,
        model: str | os.PathLike[str] | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        on_bytes: Callable[[int, int], None] = lambda *_: None,
    ) -> VersionId:
        """Save a version as a checkpoint: safetensors files that transformers and vLLM load.

        The checkpoint is written beside ``directory`` and renamed once it is complete. The version
        is not acknowledged as applied. Needs the extra ``safetensors``.

        Args:
            directory: directory to create. If it exists, it must be empty, and no mount point.
            version: number or id of a version in the store. Default: the newest version.
            draft: save the version's draft, instead of the model that it drafts for.
            model: checkpoint directory to copy the configuration and tokenizer from.
            shard_bytes: maximum size of a file, unless a single tensor is larger.
            on_bytes: called with the number of bytes written so far, and the total.

        Returns:
            The version's id.

        Raises:
            VersionError: ``version`` is not in the store.
            WaitTimeoutError: nothing was published yet.
            WeightsMismatchError: the version is an adapter (use peft's ``save_adapter``), or has no
                draft.
            SnapshotEvictedError: saving took longer than the sender waits; nothing was saved.
            StoreFullError, StoreAccessError: the checkpoint cannot be written.
            UnsupportedError: a tensor's dtype does not exist in safetensors files.
        """
        path = options.directory("directory", directory)
        options.whole_number("shard_bytes", shard_bytes)
        beside = None if model is None else options.directory("model", model)
        is_fixed = path.is_symlink() or path.is_mount()  # no directory can be renamed to it
        if is_fixed or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            rule = "a new or an empty directory, not a mount point or a link: name one below it"
            options.refuse("directory", directory, rule)
        filesystem.make_directory(path.parent, parents=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            made = Path(scratch, "checkpoint")
            with self.open(version=version, timeout_s=0.0, acknowledge=False) as snapshot:
                refuse_adapter(snapshot.metadata)
                write_checkpoint(
                    made,
                    snapshot.tensors.part(_part_of(snapshot.layout, draft=draft)),
                    beside=beside,
                    shard_bytes=shard_bytes,
                    on_bytes=on_bytes,
                )
            # Rename only after the ``with`` block, which raises if a writer overwrote the version.
            filesystem.rename(made, path)
        return snapshot.id

    def follow(
        self, newer_than: int | None = None, stop_event: threading.Event | None = None
    ) -> Iterator[Snapshot]:
        """Yield a snapshot of each newest version, which is acknowledged after the loop body.

        Versions that are published and replaced during the loop body are skipped. The first version
        is above ``newer_than``, if given. If ``stop_event`` is set, the loop ends within a tenth of
        a second. Raise :class:`SnapshotEvictedError` if the loop body took longer than the sender
        waits.
        """
        while True:
            with self.reporting(None):
                if self.wait_for_version(newer_than, None, stop_event) is None:
                    return
            with self.open(newer_than) as snapshot:
                yield snapshot
            newer_than = snapshot.version
            del snapshot  # unmap the version before waiting for the next one

    def wait_or_follow_fork(
        self,
        newer_than: int | None,
        timeout_s: float | None,
        stop_event: threading.Event | None = None,
    ) -> int | None:
        """Wait as :meth:`wait_for_version` does, but if the store has forked, follow the fork."""
        try:
            return self.wait_for_version(newer_than, timeout_s, stop_event)
        except errors.VersionRegressedError as error:
            if not error.is_forked:
                raise
            newest = self.newest()  # first, because it can raise
            self.follow_fork()
            self._pointer = newest
            return None if newest is None else newest.version

    def acknowledge(self, version: int) -> None:
        """Record in the store that this receiver has applied ``version``.

        Raises:
            VersionError: ``version`` was not published.
        """
        self._check_open()
        options.whole_number("version", version, at_most=MAX_NUMBER)
        if self._pointer is None or self._pointer.version < version:
            self._look()
        goal = None if self._pointer is None else self._pointer.lineage.at(version)
        if self._pointer is None or goal is None:
            raise errors.VersionError(f"version {version} was not published in {self.store}")
        self._set_applied(self._pointer.lineage.to(goal))
        self.record.write(held=None)

    def follow_fork(self) -> None:
        """Accept the store's newest version, whichever run (start of a sender) published it.

        :meth:`load_into` with ``partial`` still requires all tensors that were loaded before.
        """
        self.left = self.last_seen
        self._pointer = self._loaded = None
        self.record.set(
            applied=None, runs=[], metadata={}, held=None, problem=None, problem_version=None
        )

    def wake(self) -> None:
        """Wake :meth:`wait_for_version` in another thread, so that it checks its stop event."""
        self._watcher.wake()

    def close(self) -> None:
        """Stop watching the store. This receiver's last acknowledgement stays in the store."""
        if self._is_inherited:
            return  # in a forked process: threads and files belong to the parent
        self._is_closed = True
        self._watcher.close()
        self.record.close()
        self._copier.close()
        self.reader.close()

    def _check_open(self) -> None:
        if self._is_closed or self._is_inherited:
            raise errors.ClosedError(
                f"this receiver of {self.store} is closed, or is of a parent process; "
                "make a new one"
            )

    def _wait(self, timeout_s: float) -> bool:
        return self._watcher.wait(timeout_s)

    def _look(self) -> int | None:
        self._check_open()
        with TranslatedErrors(self._unmap_lost):
            if not self._store.exists():
                if self._pointer is not None:
                    raise errors.StoreNotFoundError(f"the store at {self.store} was removed")
                self._note_wait()
                return None
            self._store.check()
            pointer = self._store.newest_pointer(self._pointer)
        if pointer is None:
            self._note_wait()
            return None
        self._pointer = pointer
        return pointer.version

    def _unmap_lost(self, error: BaseException) -> None:
        """Unmap the weights files if the store was removed or replaced, to free their space."""
        if isinstance(error, errors.StoreNotFoundError | errors.VersionRegressedError):
            self.reader.unmap()

    def _note_wait(self) -> None:
        """Log once if the first look finds no store or version: the path may be mistyped."""
        if self.notes_wait:
            self.notes_wait = False
            if state := self._store.state_without_version():
                log_once(logger, "waiting for a first version in %s%s", self.store, state)

    def _open_newest(
        self, newer_than: int | None, *, reread: bool = True
    ) -> OpenStoreVersion | None:
        """Open the newest version if there is one, and if it is above ``newer_than``.

        With ``reread`` False, open the version that the pointer named when it was last read.
        """
        if self._pointer is None and not self._store.exists():
            self._note_wait()
            return None
        opened = open_newest(
            self._store,
            newer_than=newer_than,
            last=self._pointer,
            reread=reread,
            announce=self._announce,
        )
        if opened is not None:
            self._pointer = pointer_to(opened.buffer, opened.manifest)
            self._remember_metadata(opened.manifest)
        elif self._pointer is None:
            self._note_wait()
        return opened

    def _set_applied(self, version: Lineage) -> None:
        read_last, metadata = self._read_last, dict[str, Any]()
        if read_last is not None and read_last[0] == version.id:
            metadata = read_last[1]
        elif (manifest := self._store.manifest_of(version.id)) is not None:
            metadata = metadata_for_record(manifest.metadata)
        self.record.set(
            applied=version.id,
            runs=list(version.runs),
            metadata=metadata,
            problem=None,
            problem_version=None,
        )

    def _remember_metadata(self, manifest: Manifest) -> None:
        # Keep a copy of the metadata: the snapshot's user can modify the original.
        self._read_last = manifest.id, metadata_for_record(manifest.metadata)

    def _announce(self, version: VersionId) -> None:
        if self.record.current.held != version:
            self.record.write(held=version)

    def _wait_and_open(
        self,
        newer_than: int | None,
        version: int | VersionId | None,
        deadline: float,
        timeout_s: float,
    ) -> OpenStoreVersion | None:
        # A version given by its id is already published: there is nothing to wait for.
        above = version - 1 if isinstance(version, int) else newer_than
        if self.wait_for_version(above, max(0.0, deadline - time.monotonic())) is None:
            missing = "no version" if above is None else f"no version above {above}"
            raise errors.WaitTimeoutError(
                f"{missing} was published within {timeout_s:g} s in {self.store}"
                f"{self._store.state_without_version()}"
            )
        if version is None:
            return self._open_newest(newer_than, reread=False)
        # Open only the requested version: the newest version may be damaged.
        if not isinstance(version, VersionId) and self._pointer is not None:
            version = self._pointer.lineage.at(version) or version
        opened = open_version(self._store, version, self._announce)
        if opened is None:
            raise kept.missing(self._store, version)
        self._remember_metadata(opened.manifest)
        return opened

    def _load(self, opened: OpenStoreVersion, target: Target, partial: bool, draft: bool) -> None:
        layout = self.reader.layout(opened)
        part = _part_of(layout, draft=draft)
        if callable(target) and not isinstance(target, nn.Module | Mapping):
            tensors = self.reader.read(opened)
            self._remember_names(opened, part.indices.keys(), partial)
            # Clone each tensor: the target may keep it, but later versions overwrite its memory.
            views = SnapshotTensors(tensors.data, part)
            pairs = ((name, tensor.clone()) for name, tensor in views.items())
            with contextlib.closing(pairs):
                returned = target(pairs)
            if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
                returned.close()
                raise errors.OptionError(
                    f"load_into loaded nothing: the call of {target!r:.200} only made a "
                    f"{type(returned).__name__}; give a function that loads before it returns"
                )
            return
        match = self._matcher.match(target, part, partial=partial)
        tensors = self.reader.read(opened, keep=True)  # damage shows before the target is touched
        loaded = tensors if part is layout else FileTensors(tensors.data, part)
        try:
            match.require_ties(loaded.tensor)
        except errors.WeightsMismatchError:
            opened.require_unchanged()
            raise
        self._remember_names(opened, part.all_names, partial)
        if any_on_gpu(match.targets):
            self.reader.expect_device(tensors)
        # Verify the copy as well: a writer that ignores locks can overwrite the version meanwhile.
        hashed = self.reader.verifies_copies
        checksums = match.fill(loaded, self._copier, hashed=hashed and part is layout)
        if hashed and checksums is None:
            checksums = self._copier.checksums(tensors)
        self.reader.verify(opened, tensors.layout, checksums)

    def _remember_names(self, opened: OpenStoreVersion, names: Set[str], partial: bool) -> None:
        """Remember loaded names.

        With ``partial``, raise if ``names`` lacks a name that an earlier load had: the name's
        tensor would keep its old value.
        """
        version = opened.manifest.version
        if partial:
            require_names(self._loaded_names, names, version)
        # Remember the names before the load, which can fail after it has written some tensors.
        self._loaded_names |= dict.fromkeys(names - self._loaded_names.keys(), version)


def _part_of(layout: Layout, *, draft: bool) -> Layout:
    part = layout.draft if draft else layout.target
    if part is None:
        raise errors.WeightsMismatchError(
            "the version has no draft: a sender publishes one with send(weights, draft=draft)"
        )
    return part
