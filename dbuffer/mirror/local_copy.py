"""`LocalCopy`: the local store of a mirror while it copies the remote one."""

from __future__ import annotations

import contextlib
import logging
import time

from dbuffer.errors import StoreFullError, StoreNotFoundError
from dbuffer.format.chain import chain_of, trimmed
from dbuffer.format.layout import Layout
from dbuffer.format.lineage import VersionId
from dbuffer.format.manifest import UNDECODABLE
from dbuffer.io.chain_reader import ChainReader
from dbuffer.io.footer import KeptFooter
from dbuffer.io.tensors import FileTensors, KeptMappings
from dbuffer.io.transfer import OnBytes, chunks_of
from dbuffer.mirror.download import HeldObjects
from dbuffer.mirror.options import MirrorOptions
from dbuffer.mirror.relay import AcknowledgementRelay, RecordWriter
from dbuffer.mirror.sources import HeldOf, SourceReceiver
from dbuffer.publish.draft import Draft, counter
from dbuffer.publish.publication import Publication
from dbuffer.runtime.closing import Closing
from dbuffer.store.hold import Held, hold_newest
from dbuffer.store.writer import BufferWriter

logger = logging.getLogger(__name__)


class LocalCopy(Closing):
    """Publishes versions of a remote store once more, and relays acknowledgements to ``records``.

    It owns ``writer``.
    """

    def __init__(self, writer: BufferWriter, records: RecordWriter, options: MirrorOptions) -> None:
        self._copier = options.copier
        self._progress = options.progress
        self._chain: dict[VersionId, int] = {}
        """Deltas up to the version copied last."""
        self._footer = KeptFooter()
        self._writer, self._mappings = writer, KeptMappings()
        try:
            self._relay = AcknowledgementRelay(writer.store, records)
        except BaseException:
            writer.close()
            raise

    def close(self) -> None:
        """Close it; once more after an interrupt."""
        try:
            self._relay.close()
        finally:
            self._mappings.clear()
            self._writer.close()

    def check(self) -> None:
        """Do nothing: no other process writes while this one has the lock."""

    def copy(self, held: HeldOf, receiver: SourceReceiver) -> Publication:
        """Publish a held version once more; raise `OvertakenError` if it was overwritten."""
        started = time.monotonic()
        (remote, footer), manifest = self._footer.of_copy(held), held.manifest
        hashed = manifest.checksums_xxh3 is not None
        with (
            receiver.reader.reporting_unreadable(held),
            Draft(self._writer, self._mappings, manifest.lineage, footer, hashed=hashed) as draft,
        ):
            try:
                checksums = self._fill(draft, held, receiver, remote)
            except StoreNotFoundError as error:
                held.raise_for_loss(error)
            receiver.reader.verify(held, footer.layout, checksums)
            held.require_unchanged()
            chain = self._copy_deltas(held, draft)
            before, self._chain = self._chain, {}
            draft.commit(
                manifest.metadata,
                checksums,
                published_at=manifest.published_at,
                chain=chain_of(chain),
            )
            copied = [chain[each] for each in chain_of(chain)[1:] if each not in before]
            self._chain = chain
        delta_bytes = sum(copied) if copied else None
        return Publication.of(manifest.id, footer.layout, started, delta_bytes)

    def _fill(
        self, draft: Draft, held: HeldOf, receiver: SourceReceiver, remote: Layout
    ) -> list[int] | None:
        """Fill a draft with a held version; return its checksums, if it has any.

        Only what changed since an earlier version that is here is read, if deltas lead from there
        and checksums show that the file holds it.

        Raises:
            StoreNotFoundError: the version's files are gone.
        """
        total, hashed = draft.footer.layout.checksums_offset, held.manifest.checksums_xxh3
        if draft.is_mapped and hashed is not None:
            on_bytes = counter(self._progress, total)
            checksums = self._apply_changes(draft, held, receiver, on_bytes)
            if checksums is not None:
                return checksums
        on_bytes = counter(self._progress, total)
        if isinstance(held, Held):
            return draft.fill_from(held, remote, self._copier, on_bytes)
        if draft.is_mapped:
            is_hashed = hashed is not None
            return held.read_into(draft.mapped, self._copier, hashed=is_hashed, on_bytes=on_bytes)
        tensors = FileTensors.in_memory(draft.footer.layout)
        held.read_into(tensors, self._copier, hashed=False, on_bytes=on_bytes)
        return draft.fill(tensors.views, self._copier)

    def _apply_changes(
        self,
        draft: Draft,
        held: HeldOf,
        receiver: SourceReceiver,
        on_bytes: OnBytes | None,
    ) -> list[int] | None:
        """Apply deltas to the version in a draft's file; return None if it must be read whole."""
        since = self._put_earlier(draft, held)
        if since is None or since not in held.manifest.chain:
            return None
        try:
            self._fetch(held, receiver.reader.deltas_to_read(held, since))
        except (*UNDECODABLE, StoreNotFoundError) as error:
            logger.warning("copying version %d whole: %s", held.manifest.version, str(error))
            return None
        return receiver.reader.apply_changes(draft.mapped, since, held, on_bytes)

    def _fetch(self, held: HeldOf, versions: list[VersionId]) -> None:
        """Bring deltas that lead to versions into memory, if they are not in a store.

        This store has copies of some, which were made for the other buffer, mostly.
        """
        if isinstance(held, HeldObjects):
            store = self._writer.store
            held.fetch_deltas(versions, {each: store.delta_path(each) for each in self._chain})

    def _put_earlier(self, draft: Draft, held: HeldOf) -> VersionId | None:
        """Return the version that a draft's file holds, to apply deltas to.

        If none lead from there, as from a new file, the newest version of this store is copied into
        it: memory is read sooner than a network.
        """
        since, chain = draft.claim.held_before, held.manifest.chain
        if since in chain or not chain:
            return since
        newest = hold_newest(self._writer.store, newer_than=None)
        with contextlib.nullcontext() if newest is None else newest:
            if newest is None or newest.manifest.id not in chain:
                return since
            if newest.manifest.layout_xxh3 != draft.footer.layout_xxh3:
                return since
            ChainReader(newest, draft.footer.layout).read(draft.mapped, self._copier)
            return newest.manifest.id

    def _copy_deltas(self, held: HeldOf, draft: Draft) -> dict[VersionId, int]:
        """Copy the deltas that lead from the version copied last; return the chain they make."""
        manifest, chain = held.manifest, self._chain
        last = next(reversed(chain), manifest.id)
        is_joined = manifest.layout_xxh3 != draft.footer.layout_xxh3  # and deltas are of its parts
        if last not in manifest.chain[:-1] or is_joined:
            return {manifest.id: 0}
        try:
            self._fetch(held, manifest.deltas_after(last))
            for version in manifest.deltas_after(last):
                path, file = held.open_delta(version)
                with file:
                    chunks = chunks_of(file, path)
                    num_bytes = self._writer.add_delta(draft.claim, version, chunks)
                chain = {**chain, version: num_bytes}
        except (*UNDECODABLE, StoreNotFoundError, StoreFullError) as error:
            # The version itself is here, whole.
            logger.warning(
                "copying version %d without its deltas: %s", manifest.version, str(error)
            )
            return {manifest.id: 0}
        return trimmed(chain, draft.footer.layout.num_bytes, None)
