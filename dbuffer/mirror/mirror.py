"""`Mirror`: follows a remote store and publishes each newest version again in a local one.

One process a node reads the network, once a version; every rank of the node maps the local store.
Bytes go from the remote file straight to their place in the local one, and are checked there
before the version is published. Versions keep their numbers, their metadata and their identity.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from dbuffer.errors import (
    ClosedError,
    DBufferError,
    OptionError,
    StoreCorruptError,
    StoreFullError,
    StoreNotFoundError,
    UnsupportedError,
    VersionRegressedError,
    WaitTimeoutError,
    WriterSupersededError,
)
from dbuffer.format import places
from dbuffer.format.layout import Layout
from dbuffer.format.manifest import Pointer, host_in_id
from dbuffer.io.copier import Copier
from dbuffer.io.footer import Footer
from dbuffer.io.transfer import chunks_of
from dbuffer.mirror.relay import AcknowledgementRelay
from dbuffer.publish.delta_chain import Link, names_in, trimmed
from dbuffer.publish.draft import Draft, Drafts
from dbuffer.publish.publication import Publication
from dbuffer.publish.sender import Progress, counter
from dbuffer.receive.receiver import WeightReceiver
from dbuffer.runtime import options
from dbuffer.runtime.closing import Closing, ProcessBound
from dbuffer.runtime.trouble import Trouble
from dbuffer.store import filesystem
from dbuffer.store.buffer import DoubleBuffer, Held
from dbuffer.store.filesystem import Descriptor, os_errors
from dbuffer.store.foreign import require_no_other_weights
from dbuffer.store.records import Spare
from dbuffer.store.writer import BufferWriter, writer_lock

logger = logging.getLogger(__name__)

MIRROR_LOCK_FILE = "mirror.lock"

_STAND_BY_S = 0.5
"""How often a mirror that stands by looks whether the one before it has ended."""

_PREPARED_S = 10.0
"""How long another mirror may take between its election and having a stale store put away."""

_LOOK_S = 0.01

_FINAL = (ClosedError, OptionError, WriterSupersededError)
"""What trying again does not mend. All else may pass: a network that is cut, a full disk, a damaged
version, a store that is being emptied, a mode that somebody sets right."""


class _OneStoreError(OptionError):
    """Remote and local store are one, seen through two mounts: fine for readers."""


class Mirror(Closing, ProcessBound):
    """Keeps a local store the same as a remote one.

    Any number may be started for one local store: one is elected, by a lock that the kernel drops
    when its process ends, and the others stand by. What receivers of the local store acknowledge
    is carried to the remote one, where the sender waits for it.

    Where the remote store is started over while it is mirrored, the local one goes on with what it
    holds then; each receiver of that one decides for itself whether to follow.

    Args:
        remote: the store to follow; it may come later.
        local: the store to publish in, on ``/dev/shm`` best. What an earlier mirror left there of
            another store is removed, unless a receiver uses it.
        poll_interval_s: how often the remote store is looked at, where no event comes.
        num_threads: threads that read. Default: the machine's cores, at most 8.
        reader_timeout_s: how long to wait for local readers of the buffer to be written.
        allow_shared_store: accept directories that belong to someone else, or that others can
            write to.
        move_torchrl_aside: of the local store, as for `WeightSender`.
        on_copied: called with each version that was published, in the mirror's thread: readers may
            have it already, :attr:`version` and :attr:`stats` say so, and
            :meth:`wait_until_current` waits until the call has returned. Its ``duration_s`` is from
            finding it to having published it.
        progress: called with the bytes read so far, and in all, from several threads.

    Raises:
        OptionError: an option is not what it may be.
    """

    def __init__(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        poll_interval_s: float = 1.0,
        num_threads: int | None = None,
        reader_timeout_s: float = 60.0,
        allow_shared_store: bool = False,
        move_torchrl_aside: bool = False,
        on_copied: Callable[[Publication], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        remote, local = options.directory("remote", remote), options.directory("local", local)
        self._remote = DoubleBuffer(remote, allow_shared_store=allow_shared_store)
        self._local = DoubleBuffer(local, allow_shared_store=allow_shared_store)
        if filesystem.real_path(remote) == filesystem.real_path(local):
            raise OptionError(f"{remote} and {local} are one directory: there is nothing to mirror")
        self._poll_interval_s = options.positive_seconds("poll_interval_s", poll_interval_s)
        self._reader_timeout_s = options.seconds("reader_timeout_s", reader_timeout_s)
        self._allow_shared_store = allow_shared_store
        self._move_torchrl_aside = options.flag("move_torchrl_aside", move_torchrl_aside)
        self._on_copied = on_copied
        self._progress = progress
        self._copier = Copier(num_threads)
        self._known: _Described | None = None
        self._chain: list[Link] = []
        self._have: int | None = None
        self._begins_anew = False
        self._told: int | None = None
        self._tried: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: Descriptor | None = None
        self._drafts: Drafts | None = None
        self._writing = contextlib.ExitStack()
        self._receiver: WeightReceiver | None = None
        self._trouble = Trouble(logger)
        self._error: Exception | None = None
        self._stats = {"copied": 0.0, "copied_bytes": 0.0, "copy_s": 0.0, "failures": 0.0}

    @property
    def is_elected(self) -> bool:
        """Whether it is this mirror that copies, and no other of the node."""
        return self._lock is not None

    @property
    def version(self) -> int | None:
        """The newest version that it has published, or found published."""
        return self._have

    @property
    def stats(self) -> dict[str, float]:
        """Versions and bytes copied, seconds that took, failures."""
        return dict(self._stats)

    def start(self) -> Self:
        """Mirror in a thread, until :meth:`close`. Returns when the local store is fit to be read.

        Raises:
            OptionError: the local store holds another store's versions, and is in use.
        """
        if not self._elect():
            self._wait_until_prepared()
        thread = threading.Thread(target=self._run_in_thread, name="dbuffer-mirror", daemon=True)
        thread.start()
        self._thread = thread  # one that could not begin cannot be joined
        return self

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Mirror in this thread, until ``stop_event`` is set.

        What may pass (a network that is cut, a full disk, a damaged version, an emptied store) is
        logged, noted in the remote store, and tried again, less and less often.

        Raises:
            OptionError: the local store holds another store's versions.
            WriterSupersededError: as for a sender.
        """
        stop = stop_event or self._stop
        if self._lock is None and not self._elect():
            self._wait_until_prepared()
            logger.info("another mirror of %s is at work: standing by", self._local.root)
            while self._lock is None and not stop.wait(_STAND_BY_S):
                self._elect()
        if not stop.is_set():
            self._follow(stop)

    def is_current(self) -> bool:
        """Whether the local store holds the remote one's newest version, or both hold nothing.

        The stores are looked at, and nothing else: ``on_copied`` may not have been called yet.
        """
        remote, local = _newest_identity(self._remote), _newest_identity(self._local)
        return remote == local

    def wait_until_current(self, timeout_s: float = 60.0) -> None:
        """Wait until the local store holds what was the newest version when this was called.

        Where it is this mirror that copied it, ``on_copied`` has been called with it by then; it
        must not wait itself.

        Raises:
            OptionError: ``timeout_s`` is no time.
            WaitTimeoutError: it does not, in time.
            DBufferError: what ended this mirror.
        """
        deadline = time.monotonic() + options.seconds("timeout_s", timeout_s)
        wanted = self._remote.newest_pointer()
        if self._receiver is not None:
            self._receiver.wake()
        while not self._has(wanted):
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                problem = None if self._receiver is None else self._receiver.record.current.problem
                raise WaitTimeoutError(
                    f"{self._local.root} did not catch up with {self._remote.root} within "
                    f"{timeout_s:g} s" + ("" if problem is None else f": {problem}")
                )
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop. What was copied stays; a mirror that stands by takes over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._copier.close()
        self._give_up()

    def _has(self, wanted: Pointer | None) -> bool:
        if wanted is None:
            return True
        pointer = self._local.newest_pointer() if self._local.exists() else None
        if pointer is None or pointer.version < wanted.version or pointer.history != wanted.history:
            return False
        is_ours_to_tell = self.is_elected or self._error is not None
        return not is_ours_to_tell or (self._told or 0) >= wanted.version

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except _OneStoreError as error:
            logger.info("%s", error)
        # There is nobody to raise it to: it is kept for who waits, and told.
        except Exception as error:
            self._error = error
            logger.exception("the mirror of %s has ended", self._remote.root)
        finally:
            self._give_up()

    def _elect(self) -> bool:
        """Become the mirror of the local store, if no other is; see that it is fit to be read."""
        filesystem.make_directory(self._local.root, parents=True)
        self._local.check()
        require_no_other_weights(self._local.root, move_torchrl_aside=self._move_torchrl_aside)
        path = self._local.root / MIRROR_LOCK_FILE
        lock = filesystem.take_lock(path, "mirror's", may_lack_locks=False)
        if lock is None:
            return False
        try:
            self._put_away_stale()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return True

    def _give_up(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _wait_until_prepared(self) -> None:
        """Wait until the elected mirror has seen to what was in the local store."""
        deadline = time.monotonic() + _PREPARED_S
        while self._is_stale() and not self._must_keep_for_readers():
            if time.monotonic() > deadline:
                raise OptionError(
                    f"a mirror of another store than {self._remote.root} is at work in "
                    f"{self._local.root}; stop it, or give another directory"
                )
            time.sleep(_LOOK_S)

    def _is_stale(self) -> bool:
        """Whether there are versions in the local store that a mirror made from another store."""
        pointer = self._local.pointer()
        if pointer is None or self._is_same_history():
            return False
        # The newest decides: where a sender has taken a mirror over, the older one may be a copy.
        manifest = self._local.manifest(pointer.buffer)
        return manifest is not None and manifest.origin is not None

    def _is_same_history(self) -> bool:
        if not self._remote.exists():
            return False
        remote, local = self._remote.writer(), self._local.writer()
        return remote is not None and local is not None and remote.history == local.history

    def _put_away_stale(self) -> None:
        """Empty the local store of what an earlier mirror left there, if nobody uses it."""
        if not self._is_stale() or self._must_keep_for_readers():
            return
        if users := self._users():
            raise OptionError(
                f"{self._local.root} holds versions of another store than {self._remote.root}, "
                f"and {', '.join(users)} use them; stop them, or give another directory"
            )
        logger.warning("%s holds versions of another store: emptying it", self._local.root)
        root = self._local.root
        with writer_lock(root), os_errors("empty a stale store", root):
            # What was applied was of that store: the next one's sender must not hear of it.
            for path in (root / places.RECEIVERS_DIRECTORY).glob("*.json"):
                path.unlink(missing_ok=True)
            # The pointer before the rest: without it nobody looks at that.
            for name in (places.POINTER_FILE, places.WRITER_FILE):
                (root / name).unlink(missing_ok=True)
            for buffer in places.BUFFERS:
                shutil.rmtree(root / buffer)

    def _users(self) -> list[str]:
        return [r.receiver for r in self._local.receivers() if self._local.may_live(r)]

    def _must_keep_for_readers(self) -> bool:
        """Whether the network may be away, and receivers use what came before."""
        return not self._remote.exists() and bool(self._users())

    def _follow(self, stop: threading.Event) -> None:
        receiver = WeightReceiver(
            self._remote.root,
            receiver_id=self._receiver_id(),
            poll_interval_s=self._poll_interval_s,
            num_threads=self._copier.num_threads,
            allow_shared_store=self._allow_shared_store,
        )
        # A container that has this one's host name may have such a mirror of its own.
        name = receiver.receiver_id
        receiver.record.spare = Spare(f"{name}-{secrets.token_hex(4)}")
        self._receiver = receiver
        with receiver:
            while not stop.is_set():
                try:
                    self._follow_one_history(receiver, stop)
                except VersionRegressedError as error:
                    self._start_over(receiver, error)

    def _follow_one_history(self, receiver: WeightReceiver, stop: threading.Event) -> None:
        self._drafts = None
        with contextlib.ExitStack() as self._writing:
            while not stop.is_set():
                try:
                    self._copy_newer(receiver, stop)
                except _FINAL:
                    raise
                except VersionRegressedError as error:
                    if error.history is not None:
                        raise
                    self._note_problem(receiver, error)
                    self._wait_to_retry(receiver, self._trouble.note(error), stop)
                # The last two: no memory, or no more threads, for now.
                except (DBufferError, OSError, MemoryError, RuntimeError) as error:
                    self._note_problem(receiver, error)
                    self._wait_to_retry(receiver, self._trouble.note(error), stop)
                else:
                    self._trouble.end(f"mirroring {self._remote.root}")

    def _start_over(self, receiver: WeightReceiver, why: VersionRegressedError) -> None:
        """Go on with what the remote store holds now; local readers see another history begin."""
        logger.warning("%s (mirroring it)", why)
        receiver.start_over()
        self._begins_anew = True
        self._have = self._told = self._tried = None

    def _open_drafts(self, receiver: WeightReceiver) -> Drafts:
        """The local store's; its writer is made when there is something to write."""
        if self._drafts is None:
            with contextlib.ExitStack() as begun:
                drafts = Drafts(self._open_writer(receiver.history))
                begun.callback(drafts.close)
                begun.callback(AcknowledgementRelay(self._local, self._remote.root).close)
                self._writing.push(begun.pop_all())
            self._drafts = drafts
        return self._drafts

    def _open_writer(self, history: str | None) -> BufferWriter:
        remote, local = self._remote.writer(), self._local.writer()
        if remote is None:
            raise StoreNotFoundError(f"{self._remote.root} has no record of its sender")
        if local is not None and local.run == remote.run:
            raise _OneStoreError(
                f"{self._remote.root} and {self._local.root} are one store under two names: "
                "there is nothing to mirror"
            )
        history = history or remote.history
        pointer = self._local.pointer()
        if pointer is not None and (local is None or local.history != history):
            if not self._begins_anew:
                raise OptionError(
                    f"{self._local.root} holds version {pointer.version} of another store than "
                    f"{self._remote.root}; give another directory, or remove that one"
                )
        elif pointer is not None:
            self._require_not_put_back(pointer.version)
            self._have = self._told = pointer.version
            self._tried = max(self._tried or 0, pointer.version)
        self._begins_anew = False
        return BufferWriter(
            self._local.root,
            durable=False,
            reader_timeout_s=self._reader_timeout_s,
            allow_shared_store=self._allow_shared_store,
            history=history,
        )

    def _require_not_put_back(self, have: int) -> None:
        """Refuse a remote store that an older copy has replaced."""
        newest = self._remote.newest_pointer()
        if newest is None or newest.version < have:
            raise OptionError(
                f"{self._remote.root} went back to version {newest and newest.version}, and "
                f"{self._local.root} holds version {have} of it: was it put back from a copy? "
                "Give another directory, or remove the local one"
            )

    def _copy_newer(self, receiver: WeightReceiver, stop: threading.Event) -> None:
        """Wait for a version that the local store does not have, and copy it."""
        self._forget_problem(receiver)
        newest = receiver.wait_for_version(self._have, None, stop)
        if newest is None:
            return
        self._tried = newest
        drafts = self._open_drafts(receiver)
        with receiver.hold_seen(self._have) as held:
            if held is None:
                return
            copied = self._copy(held, receiver, drafts)
        if copied is None:
            return
        self._have = copied.version
        self._stats["copied"] += 1
        self._stats["copied_bytes"] += copied.num_bytes
        self._stats["copy_s"] += copied.duration_s
        receiver.record.write(
            staged_version=copied.version, problem=None, problem_version=None, stats=self.stats
        )
        if self._on_copied is not None:
            self._on_copied(copied)
        self._told = copied.version

    def _copy(self, held: Held, receiver: WeightReceiver, drafts: Drafts) -> Publication | None:
        """Publish a version once more; None if it was overwritten meanwhile."""
        started = time.monotonic()
        known, manifest = self._describe(held), held.manifest
        layout = known.footer.layout
        hashed = manifest.checksums_xxh3 is not None
        with (
            receiver.reporting_unreadable(held),
            drafts.begin(manifest.version, known.footer, hashed=hashed) as draft,
        ):
            if not self._fill(draft, held, receiver, known) or not held.is_unchanged():
                return None
            chain = self._pass_on(held, draft, known)
            before, self._chain = self._chain, []
            draft.commit(
                manifest.metadata,
                published_at=manifest.published_at,
                origin=manifest.identity,
                chain=names_in(chain),
            )
            passed = [link.delta_bytes for link in chain[1:] if link not in before]
            self._chain = chain
        return Publication.of(manifest.version, layout, started, sum(passed) if passed else None)

    def _fill(self, draft: Draft, held: Held, receiver: WeightReceiver, known: _Described) -> bool:
        """Fill a draft with a held version; False if a writer was faster.

        Only what changed since the version that its file holds, where deltas tell and checksums
        show that the file still holds it.
        """
        layout = known.footer.layout
        if draft.is_mapped and held.manifest.checksums_xxh3 is not None:
            on_bytes = counter(self._progress, layout.checksums_offset)
            since = draft.claim.held_before
            draft.checksums = receiver.apply_changes(draft.mapped, since, held, on_bytes)
            if draft.checksums is not None:
                return True
        try:
            on_bytes = counter(self._progress, layout.checksums_offset)
            draft.fill_from(held, known.remote, self._copier, on_bytes)
        except StoreNotFoundError as error:
            held.require_overtaken(error)
            return False
        checksums = draft.checksums
        return checksums is None or receiver.checksums_match(held, layout, checksums)

    def _pass_on(self, held: Held, draft: Draft, known: _Described) -> list[Link]:
        """Copy the deltas that lead from the version copied last; the chain that this gives."""
        manifest, chain = held.manifest, self._chain
        leads_here = chain and chain[-1].identity in manifest.chain
        if not leads_here or known.footer.layout_xxh3 != known.remote_xxh3:
            return [Link(manifest.identity, 0)]
        try:
            for identity in manifest.deltas_after(chain[-1].identity):
                path, file = held.open_delta(identity)
                with file:
                    num_bytes = draft.add_delta(chunks_of(file, path), identity)
                chain = [*chain, Link(identity, num_bytes)]
        except (
            StoreNotFoundError,
            StoreCorruptError,
            StoreFullError,
            UnsupportedError,
        ) as error:
            # The version itself is here, whole.
            logger.warning("not passing on what changed since the version before: %s", error)
            return [Link(manifest.identity, 0)]
        return trimmed(chain, known.footer.layout, None)

    def _describe(self, held: Held) -> _Described:
        """The layouts there and here; those of the last version, where nothing has changed."""
        if self._known is None or self._known.remote_xxh3 != held.manifest.layout_xxh3:
            remote = held.read_layout()
            footer = Footer.of(remote.joined())
            self._known = _Described(held.manifest.layout_xxh3, remote, footer)
        return self._known

    def _note_problem(self, receiver: WeightReceiver, error: Exception) -> None:
        self._stats["failures"] += 1
        receiver.record.write_problem(error, None, stats=self.stats)

    def _forget_problem(self, receiver: WeightReceiver) -> None:
        """Take a problem with the remote store off the record, when it has passed."""
        if receiver.record.current.problem is not None and self._tried == self._have:
            receiver.wait_for_version(None, 0)
            receiver.record.write(problem=None, stats=self.stats)

    def _wait_to_retry(
        self, receiver: WeightReceiver, wait_s: float, stop: threading.Event
    ) -> None:
        """Wait; not any longer, when there is a newer version than the one that failed."""
        try:
            receiver.wait_for_version(self._tried, wait_s, stop)
        except VersionRegressedError as error:
            if error.history is None:
                stop.wait(wait_s)
        except DBufferError:
            stop.wait(wait_s)

    def _receiver_id(self) -> str:
        """The same when it is started again: one record a node and local store."""
        return f"mirror-{host_in_id()}-{xxhash.xxh3_64_hexdigest(os.fsencode(self._local.root))}"


@dataclass(frozen=True, slots=True)
class _Described:
    """What is known of a version, for the next."""

    remote_xxh3: str | None
    remote: Layout
    footer: Footer
    """Of the local file, in which parts are put together."""


def start_mirror(
    remote: str | os.PathLike[str],
    local: str | os.PathLike[str] | None,
    **more: Any,
) -> Mirror | None:
    """Start a mirror for a receiver, which reads ``local``; None where there are no two stores.

    Every receiver of a node may call it: one mirror works, and the others stand by. ``more``: as
    for `Mirror`.

    Raises:
        OptionError: an option is not what it may be.
        OptionError: the local store holds another store's versions, and is in use.
    """
    if local is None:
        return None
    remote, local = options.directory("remote", remote), options.directory("local", local)
    if filesystem.real_path(local) == filesystem.real_path(remote):
        return None
    return Mirror(remote, local, **more).start()


def _newest_identity(store: DoubleBuffer) -> str | None:
    pointer = store.newest_pointer() if store.exists() else None
    manifest = None if pointer is None else store.manifest(pointer.buffer)
    return None if manifest is None else manifest.identity
