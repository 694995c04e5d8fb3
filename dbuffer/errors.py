"""Every error that dbuffer raises: one tree, and each error also a standard one.

Catch :class:`DBufferError` for all of them, or the standard type (``TimeoutError``,
``ValueError``, ``OSError`` ...) where the code around already does. Each takes one message,
so that all of them pickle and cross process boundaries.

A docstring says what happened, then what to do; ``docs/errors.md`` is made of both.
"""


class DBufferError(Exception):
    """Base class of all errors raised by dbuffer."""


class StoreNotFoundError(DBufferError, FileNotFoundError):
    """The store's directory, or a file that it needs, does not exist.

    Check the path; if the store was removed, make a new sender, then new receivers.
    """


class StoreInsecureError(DBufferError, PermissionError):
    """The store belongs to another user, or others can write to it.

    Run ``chmod go-w`` on the path that the message names, or pass ``allow_shared_store=True``.
    """


class StoreAccessError(DBufferError, OSError):
    """The filesystem refused a read, a write, a flush or a lock that the store needs.

    Look at the mount: read-only, permissions, a broken disk. The last version stays published.
    """


class StoreFullError(StoreAccessError):
    """The filesystem has no room for another version. The last one stays readable.

    Make room for two versions (or raise the quota), then publish again.
    """


class StoreCorruptError(DBufferError, ValueError):
    """A file of the store is damaged or inconsistent. Nothing of it was used.

    Publish again: that replaces the damaged buffer.
    """


class StoreFormatError(StoreCorruptError):
    """The store was written in a format that this version of dbuffer does not read.

    Use the same version of dbuffer at both ends.
    """


class StoreMismatchError(DBufferError, ValueError):
    """A directory that was to become a store holds a checkpoint, or other weights.

    Give another directory, or remove this one. Of TorchRL's own double buffer the weights can be
    moved aside: ``move_torchrl_aside=True``.
    """


class ChecksumError(StoreCorruptError):
    """Bytes differ from those published, or there are no checksums to verify them with.

    Publish again; the message names the tensors. Without checksums: make the sender with
    ``checksum=True``.
    """


class WriterActiveError(DBufferError, BlockingIOError):
    """Another sender has this store open; a store has one sender at a time.

    Close the other sender, whose process the message names, or use another directory.
    """


class WriterSupersededError(DBufferError, RuntimeError):
    """Another sender took the store over. This one must not publish any more.

    Stop this process; if it is the right one, stop the other and make a new sender.
    """


class VersionError(DBufferError, ValueError):
    """A version that is not above the last published one, no longer there, or not an integer.

    Publish a version above the last one, or leave ``version`` out; put a trainer's step in the
    metadata.
    """


class VersionTimeoutError(DBufferError, TimeoutError):
    """No version, or none newer than the one asked for, was published in time.

    Check that the trainer runs, and publishes into this very directory.
    """


class VersionRegressedError(DBufferError, RuntimeError):
    """The store went back to a lower version, or became empty, under a receiver.

    It was emptied or restored from a copy: make a new receiver.
    """


class StoreReplacedError(VersionRegressedError):
    """The store was emptied or replaced, then recreated: its versions are another run's.

    Call ``start_over()`` on the receiver if that was meant.
    """


class AcknowledgementTimeoutError(DBufferError, TimeoutError):
    """Too few receivers acknowledged a version in time.

    The message says which version each receiver has applied; look at the slow ones' logs, or
    raise ``timeout_s``.
    """


class ReceiverFailedError(DBufferError, RuntimeError):
    """A receiver that was waited for reported a failure, or its process has ended.

    The message names the receiver and says why; restart it, or publish weights that fit it.
    """


class ReceiverActiveError(DBufferError, BlockingIOError):
    """Another living receiver has this name; a record in a store has one owner.

    Close that one, whose process the message names, or choose another ``receiver_id``.
    """


class OptionError(DBufferError, ValueError):
    """An option has an invalid value.

    The message says which values are valid.
    """


class TargetTypeError(DBufferError, TypeError):
    """The target of a load is of a type that cannot hold weights.

    Load into a module, a dictionary of tensors or a function.
    """


class InvalidWeightsError(DBufferError, ValueError):
    """The weights or the metadata cannot be published. Nothing was written.

    The message names the tensor, or the entry of the metadata, and what is wrong with it.
    """


class WeightsChangedError(DBufferError, RuntimeError):
    """Weights were changed while ``send(wait=False)`` was publishing them. Nothing was published.

    Call ``wait()`` on what it returned before ``optimizer.step()``, or ``sender.guard(optimizer)``
    once.
    """


class ResidencyError(DBufferError, NotImplementedError):
    """A model's parameters cannot live in a store's buffers. The model was not touched.

    Publish with a :class:`WeightSender`; the message says what stands in the way.
    """


class WeightsMismatchError(DBufferError, ValueError):
    """The published weights do not fit the target. The target was not touched.

    The message lists the differences: mend names with ``rename=``, dtypes with ``dtype=``, or
    what a partial version lacks.
    """


class SnapshotEvictedError(DBufferError, RuntimeError):
    """A snapshot was held for longer than the sender waits, and its buffer was taken.

    Discard what was read and open the newest version; copy faster, or raise the sender's
    ``reader_timeout_s``.
    """


class RankFailedError(DBufferError, RuntimeError):
    """A rank of a sharded trainer or of an engine failed or was lost; no rank went on.

    The message names the rank and its reason. If one was lost, make a new sender in a new job.
    """


class RankTimeoutError(RankFailedError, TimeoutError):
    """A rank did not arrive where the others waited for it.

    The message says which ranks, where, and how long they were waited for.
    """


class TrainerUnsupportedError(DBufferError, NotImplementedError):
    """A trainer shards its weights in a way that is not supported. Nothing was published.

    The message says which kind it is; FSDP2 and DeepSpeed are supported.
    """


class ClosedError(DBufferError, ValueError):
    """A sender or receiver was used after ``close()``, or in a forked child.

    Make a new one; in a child, make it after the fork.
    """


class EngineEndedError(ClosedError):
    """A followed engine is dead, or the event loop or actor that it lived in is.

    Follow the engine that you start in its place.
    """


class NotReadyError(DBufferError, RuntimeError):
    """A call came before the one that it needs, or after the last one.

    The message says which call must come first.
    """


class BridgeSetupError(OptionError, RuntimeError):
    """Atropos' bridge lacks what it needs to begin: its nodes, its parameter mapping.

    Run in the SLURM job, or provide the mapping file that the message names.
    """


class BridgeStateError(ClosedError, RuntimeError):
    """Atropos' bridge was used before ``initialize()``, or has nothing to publish.

    Call ``initialize()``, and give it a model or tensors.
    """


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight, or sleeps. Its weights were not touched.

    Let the ``LLM`` finish its requests, or wake it, then ``sync()``.
    """


class EngineUnsupportedError(DBufferError, NotImplementedError):
    """The engine was not started in a way that lets it take weights from a store.

    Start it as the message says (backend, extension or loader), with dbuffer installed beside it.
    """


class EngineUpdateError(DBufferError, RuntimeError):
    """An engine could not switch to a version. It serves on with the weights that it had.

    The message names rank and tensor: publish weights that fit; the next version is tried again.
    """


class EngineBrokenError(DBufferError, RuntimeError):
    """An engine's weights are half loaded and could not be repaired. It refuses to serve.

    Update it again, or restart it.
    """


class EngineUnreachableError(DBufferError, ConnectionError):
    """An engine's server does not answer, or not as one of its kind does.

    Check that the server is up, its address and its key.
    """
