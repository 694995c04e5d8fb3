"""`Retention`: decides which files of a store stay, and removes all others.

A delta, or a weights file with its parts, stays while a manifest of buffer A, of buffer B or of a
kept version names the file. On a network mount, where no lock makes a writer wait for readers, the
file also stays while a reader may need it (see `Reason`). A kept version stays while it is pinned,
or while it is one of the newest ``num_kept`` kept versions.

This table lists all files that a killed process may leave in a store, and who removes each file.
The kernel drops the locks of the process.

====================================== ============= ===========================================
file                                   left by       removed by
====================================== ============= ===========================================
weights file, part or delta that no    sender, rank, `Retention.sweep` of any writer, as it
manifest names                         mirror        starts and as it begins each version. On a
                                                     local mount: at once. On a network mount:
                                                     once no reader may need the file
weights file, part or delta that is    sender, rank, `Retention.sweep`, after the next version
named only by a ``writing`` manifest,  mirror        has replaced the manifest
or by a ``complete`` manifest that
``CURRENT`` never named
``kept/ID`` without a manifest: the    sender,       `Retention.sweep`. A pinned version gets
version was being dropped              mirror        its manifest back instead
``kept/ID``, not pinned                `kept.pin`,   `Retention.sweep`, if there are more kept
                                       sender        versions than ``num_kept``
``kept/ID`` with a damaged manifest    the disk      `Retention.sweep`, unless the version is
                                                     pinned
``tmp/.NAME.RANDOM.tmp``: a record, or any process   `Retention.clear_up` of any writer, if
a version that was being kept                        older than a minute: as the writer starts,
                                                     and with a commit, but at most every ten
                                                     seconds
``receivers/ID.TOKEN.json``            receiver,     `Retention.clear_up`, once no sender can
                                       mirror        wait for the receiver. A new receiver with
                                                     this id removes it at once (`RecordFile`)
``refused/ID``                         a canary      `Retention.clear_up`, if old and if the
                                       engine        version is gone
``receivers/*``, damaged               the disk      the user: the log names the file
``CURRENT``, ``A/manifest.json``,      sender,       no process: the next writer replaces them
``B/manifest.json``, ``writer.json``   mirror
``writer.lock``, ``mirror.lock``       sender,       no process: they are locked again
                                       mirror
====================================== ============= ===========================================

Outside of a store, the user removes ``.NAME.*`` beside the checkpoint of ``dbuffer export``, and
``.dbuffer-doctor-*`` in a directory that ``dbuffer doctor`` has examined. `BucketTarget` removes a
bucket's old objects.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dbuffer.errors import DBufferError
from dbuffer.format import places
from dbuffer.format.lineage import VERSION_ID, Lineage
from dbuffer.format.manifest import Manifest, ReceiverRecord
from dbuffer.runtime.timing import TIMING
from dbuffer.runtime.trouble import log_once
from dbuffer.store import filesystem, kept
from dbuffer.store.buffer import Contents, DoubleBuffer
from dbuffer.store.filesystem import Descriptor, os_errors

logger = logging.getLogger(__name__)

Manifests = Mapping[str, Manifest | None]


class Reason(NamedTuple):
    """Reason why a delta, or a weights file with its parts, is not removed."""

    versions: range | None
    """Versions whose readers need the file. The range is empty if the file was never published.
    None if a dead writer left the file: a reader of any version outside of buffers A and B may need
    it."""
    unnamed_since: float = math.inf
    """Time at which the last manifest that named the file was replaced; infinite if a manifest
    still names the file."""
    superseded_at: float = math.inf
    """Time at which a newer version was published, which new readers open instead; infinite if
    there is no newer version."""

    @property
    def is_named(self) -> bool:
        return self.unnamed_since == math.inf


@dataclass(eq=False)
class Retention:
    """Removes the files that a store no longer needs. The store's writer calls it.

    On a network mount, a file that no manifest names any more stays for `Timing.keep_superseded_s`
    after a newer version was published: it may have readers that cannot write a record. If a record
    announces a version that needs the file, the file stays longer, up to ``reader_timeout_s``.
    Besides the versions in buffers A and B, the store keeps ``num_kept`` versions.
    """

    store: DoubleBuffer
    open_files: dict[Path, Descriptor]
    """Weights files that the writer has open. A file is closed before it is removed."""
    reader_timeout_s: float
    num_kept: int
    spared: str | None = None
    """Kept version (``kept/RUN-NUMBER``) that must stay, because it is being published again."""
    _reasons: dict[Path, Reason] = field(default_factory=dict)
    _flipped_at: float | None = None
    _cleared_at: float = field(default_factory=lambda: time.monotonic())

    def named_by(self, manifests: Manifests) -> dict[Path, range]:
        named: dict[Path, range] = {}
        for buffer, manifest in manifests.items():
            if manifest is not None:
                made_for = {self.store.weights_path(buffer, manifest): manifest.file_version}
                made_for |= {self.store.delta_path(later): later for later in manifest.chain[1:]}
                end = manifest.version + 1 if manifest.state == "complete" else 0
                for file, version in made_for.items():
                    named[file] = _longer(range(version.number, end), named.get(file))
        return named

    def note_flip(self, buffer: str, manifest: Manifest) -> None:
        self._flipped_at = time.monotonic()
        for file, versions in self.named_by({buffer: manifest}).items():
            self._reasons[file] = Reason(versions)

    def sweep(self, manifests: Manifests, next_one: Lineage | None = None) -> None:
        """Remove all weights files, deltas and kept versions that the store no longer needs.

        Call this method just after one of the ``manifests`` of buffers A and B was replaced, never
        before: the old manifest may name files that are removed here. Kept versions are dropped if
        they do not lead to ``next_one`` (the version about to be written), and the oldest ones if
        there are more than ``num_kept``.
        """
        # List the files first. If a version is pinned after this, its files are not in the list,
        # so they are not removed.
        directories = self.store.kept_directories()
        files = self._files_in([*places.BUFFERS, places.DELTAS_DIRECTORY, *directories])
        kept_versions = self._kept_versions()
        if next_one is not None:
            self._drop_excess(kept_versions, manifests, next_one)
        named = self.named_by({**manifests, **kept_versions})
        for buffer, manifest in kept_versions.items():
            if manifest is None:  # the manifest is damaged; the pinned version stays
                named |= {
                    file: range(0) for file in files if file.parent == directories.get(buffer)
                }
        self._reasons = self._find_reasons(files, named)
        self._remove_unneeded(files, manifests)
        logger.debug("%s: files kept, with reasons: %s", self.store.root, self._reasons)
        for buffer in directories.keys() - kept_versions.keys():
            if not any(file.parent == directories[buffer] for file in self._reasons):
                shutil.rmtree(directories[buffer], ignore_errors=True)

    def clear_up(self, *, pause_s: float = 0.0) -> None:
        """Remove temporary files and receivers' records that are no longer needed.

        Do nothing if the last call was less than ``pause_s`` ago.
        """
        if time.monotonic() - self._cleared_at < pause_s:
            return
        self._cleared_at = time.monotonic()
        try:
            scratch = self.store.root / places.SCRATCH_DIRECTORY
            now_s = filesystem.time_at(scratch)
            filesystem.remove_stale_temporaries(scratch, now_s)
            self._remove_old_records(now_s)
            self._remove_old_refusals(now_s)
        except (DBufferError, OSError) as error:
            logger.warning(
                "cannot remove temporary files and old records of %s: %s",
                self.store.root,
                str(error),
            )

    def _remove_old_records(self, now_s: float) -> None:
        """Remove records of receivers that ended long ago."""
        # Compare the files' times, because times in records come from many hosts' clocks.
        aged: list[tuple[float, Path, ReceiverRecord]] = []
        for record in self.store.receivers():
            path = self.store.record_path(record.receiver, record.token)
            aged.append((now_s - filesystem.touched_at(path), path, record))
        aged.sort(key=lambda row: row[0], reverse=True)
        last = {record.receiver: record.token for _, _, record in aged}
        for age_s, path, record in aged:
            keep_s = TIMING.forget_ephemeral_after_s
            if not record.is_ephemeral and last[record.receiver] == record.token:
                keep_s = TIMING.forget_receivers_after_s
            if age_s > keep_s and not self.store.may_live(record):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    message = "cannot remove the record of a dead receiver: %s"
                    log_once(logger, message, str(error))

    def _remove_old_refusals(self, now_s: float) -> None:
        """Remove old marks of refused versions that the store no longer has.

        Recent marks stay: the store of a mirror that lags may still have the version.
        """
        marks = filesystem.list_matching(self.store.root / places.REFUSED_DIRECTORY, "*")
        forget_s = TIMING.forget_receivers_after_s
        ours = [path for path in marks if VERSION_ID.fullmatch(path.name)]
        old = [path for path in ours if now_s - filesystem.touched_at(path) > forget_s]
        published = Contents(self.store).published(lost=True) if old else ()
        present = {str(manifest.id) for _, manifest in published}
        for path in old:
            if path.name not in present:
                path.unlink(missing_ok=True)

    def _files_in(self, directories: Iterable[str]) -> dict[Path, list[Path]]:
        """List deltas, and weights files with their parts, but no files of other programs."""
        files: defaultdict[Path, list[Path]] = defaultdict(list)
        for directory in directories:
            for path in filesystem.list_matching(self.store.root / directory, "*"):
                is_ours = places.is_weights_file(path.name) or places.is_delta_file(path.name)
                if is_ours and (path.is_symlink() or not path.is_dir()):
                    files[path.with_name(places.version_file(path.name))].append(path)
        return files

    def _kept_versions(self) -> dict[str, Manifest | None]:
        """Read the manifests of kept and pinned versions, by directory.

        The value is None if a pinned version's manifest is damaged. If a version was pinned while a
        writer was dropping it, restore the version's manifest.
        """
        pinned: dict[str, Manifest | None] = {}
        for buffer in self.store.kept_directories():
            if kept.is_pinned(self.store, buffer):
                pinned[buffer] = None
                dropped = self.store.root / buffer / places.DROPPED_FILE
                if dropped.exists():
                    filesystem.rename(dropped, dropped.with_name(places.MANIFEST_FILE))
        return pinned | self.store.kept()

    def _drop_excess(
        self, kept_versions: dict[str, Manifest | None], manifests: Manifests, next_one: Lineage
    ) -> None:
        num_kept = 0
        for buffer, manifest in reversed(list(kept_versions.items())):
            is_newest = manifest in manifests.values()
            if manifest is None or is_newest or kept.is_pinned(self.store, buffer):
                continue
            is_lost = not next_one.reaches(manifest.id)
            num_kept += not is_lost
            must_go = (is_lost or num_kept > self.num_kept) and buffer != self.spared
            if must_go and self._withdraw(buffer):
                del kept_versions[buffer]

    def _withdraw(self, buffer: str) -> bool:
        """Remove the manifest of a kept version, so that no new reader opens the version.

        Return False, and leave the manifest in place, if the version is pinned.
        """
        manifest = self.store.root / buffer / places.MANIFEST_FILE
        dropped = manifest.with_name(places.DROPPED_FILE)
        filesystem.rename(manifest, dropped)
        if kept.is_pinned(self.store, buffer):  # pinned since the last check
            filesystem.rename(dropped, manifest)
            return False
        return True

    def _find_reasons(
        self, files: dict[Path, list[Path]], named: dict[Path, range]
    ) -> dict[Path, Reason]:
        now_s = time.monotonic()
        unknown = files.keys() - named.keys() - self._reasons.keys()
        ages_s = self._ages_s(files, unknown)
        reasons = {}
        for file in files:
            reason = self._reasons.get(file)
            if file in named:
                reason = Reason(_longer(named[file], reason and reason.versions))
            elif reason is None:
                since = now_s - ages_s.get(file, 0.0)
                reason = Reason(None, since, since)
            elif reason.is_named:
                superseded_at = now_s if self._flipped_at is None else self._flipped_at
                reason = Reason(reason.versions, now_s, superseded_at)
            reasons[file] = reason
        return reasons

    def _ages_s(self, files: dict[Path, list[Path]], unknown: Set[Path]) -> dict[Path, float]:
        """Return lower bounds of the times since manifests last named files of a dead writer.

        Manifests may have named a file until the newer one of the manifests of A and B was written.
        In a store without deltas, they have not named it since the buffer's next file was made,
        because a buffer's manifest stops naming a file before that; use the older of the two times.
        All times are by the filesystem's clock. The time since this writer's start would be too
        short a bound: a writer such as `dbuffer publish` lives only for a moment.
        """
        if not (unknown and self.store.medium.reaches_other_hosts):
            return {}
        root = self.store.root
        with os_errors("look at old versions", root):
            marked_at = {}
            for directory in (root / buffer for buffer in places.BUFFERS):
                filesystem.refresh(directory)
                marked_at[directory] = filesystem.touched_at(directory / places.MANIFEST_FILE)
            # The latest of these times is the current time: this writer has just written a record.
            now_s = max(*marked_at.values(), filesystem.touched_at(root / places.WRITER_FILE))
            ages_s = dict.fromkeys(unknown, now_s - max(marked_at.values()))
            if any(places.is_delta_file(file.name) for file in files):
                return ages_s
            for directory in {file.parent for file in unknown} & marked_at.keys():
                written = {
                    file: max(map(filesystem.touched_at, parts))
                    for file, parts in files.items()
                    if file.parent == directory
                }
                changes = [*written.values(), marked_at[directory]]
                for file in written.keys() & unknown:
                    later = [changed_at for changed_at in changes if changed_at > written[file]]
                    ages_s[file] = now_s - min(later, default=now_s)
        return ages_s

    def _remove_unneeded(self, files: dict[Path, list[Path]], manifests: Manifests) -> None:
        """Remove files that no manifest names and, on a network mount, no reader needs any more."""
        unnamed = [file for file, reason in self._reasons.items() if not reason.is_named]
        readers: dict[int, str] = {}
        is_remote = self.store.medium.reaches_other_hosts
        if unnamed and is_remote:
            try:
                for record in self.store.readers():
                    if record.held is not None:
                        readers[record.held.number] = record.receiver
            except (DBufferError, OSError) as error:
                # A publish must not fail because an old file cannot be removed.
                logger.warning(
                    "keeping old versions, because their readers cannot be determined: %s",
                    str(error),
                )
                return
        in_buffers = {manifest.version for manifest in manifests.values() if manifest is not None}
        for file in unnamed:
            if not (is_remote and self._may_be_read(file, readers, in_buffers)):
                del self._reasons[file]
        for file in self.open_files.keys() - self._reasons:
            self.open_files.pop(file).close()
        for path in [path for file in files.keys() - self._reasons for path in files[file]]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the file only takes space
                logger.warning("cannot remove the old version %s: %s", path, str(error))

    def _may_be_read(self, file: Path, readers: dict[int, str], in_buffers: set[int]) -> bool:
        reason = self._reasons[file]
        if reason.versions is not None and not reason.versions:
            return False
        versions = readers.keys() - in_buffers if reason.versions is None else reason.versions
        reader = next((readers[number] for number in sorted(readers) if number in versions), None)
        now_s = time.monotonic()
        if now_s - reason.unnamed_since < self.reader_timeout_s:
            is_fresh = now_s - reason.superseded_at < TIMING.keep_superseded_s
            return reader is not None or is_fresh
        if reader is not None:
            name = "an unknown version"
            if reason.versions is not None:
                first, last = reason.versions[0], reason.versions[-1]
                name = f"version {last}" if first == last else f"versions {first} to {last}"
            message = "removing %s of %s, which %s has read for more than %g s"
            logger.warning(message, file, name, reader, self.reader_timeout_s)
        return False


def _longer(versions: range, before: range | None) -> range:
    return versions if before is None or versions.stop >= before.stop else before
