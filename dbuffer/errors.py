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


class StoreAccessError(DBufferError, OSError):
    """The filesystem refused access, or the store is not safe: others can write to it.

    Look at the mount: read-only, permissions, a broken disk. For a shared directory, run
    ``chmod go-w`` on the path that the message names, or pass ``allow_shared_store=True``.
    """


class StoreFullError(StoreAccessError):
    """The filesystem has no room for another version. The last one stays readable.

    Make room for two versions (or raise the quota), then publish again.
    """


class StoreCorruptError(DBufferError, ValueError):
    """A file of the store is damaged or inconsistent, or cannot be verified. It was not used.

    Publish again: that replaces the damaged buffer. Without checksums: make the sender with
    ``checksum=True``.
    """


class StoreBusyError(DBufferError, BlockingIOError):
    """Another sender has this store open, or another follower of this process has the engine.

    Close that one, whose process the message names, or use another directory.
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


class WaitTimeoutError(DBufferError, TimeoutError):
    """No version was published, or too few receivers acknowledged one, in time.

    Check that the trainer publishes into this very directory. For receivers, the message says which
    version each of them has applied; look at the logs of the slow ones, or raise ``timeout_s``.
    """


class VersionRegressedError(DBufferError, RuntimeError):
    """The store went back to a lower version, became empty, or was replaced, under a receiver.

    Call ``start_over()`` on the receiver if that was meant. :attr:`history` is None where the
    store was emptied, or restored from a copy.
    """

    def __init__(self, message: str, history: str | None = None) -> None:
        super().__init__(message)
        self.history = history
        """History of the store that took the place of the one before; None: no other is known."""


class ReceiverFailedError(DBufferError, RuntimeError):
    """A receiver that was waited for reported a failure, or its process has ended.

    The message names the receiver and says why; restart it, or publish weights that fit it.
    """


class OptionError(DBufferError, ValueError):
    """An option has an invalid value, or one that does not fit the place where it is used.

    The message says which values are valid.
    """


class InvalidWeightsError(DBufferError, ValueError):
    """The weights or the metadata cannot be published, or were modified meanwhile.

    Nothing was published. The message names the tensor, or the entry of the metadata, and the
    reason. With ``send(wait=False)``: call ``wait()`` on its result before ``optimizer.step()``,
    or ``sender.guard(optimizer)`` once.
    """


class UnsupportedError(DBufferError, NotImplementedError):
    """A trainer, an engine, a model or a store is of a kind that dbuffer does not support.

    Nothing was touched. The message names the obstacle, and what to use instead.
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


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight, or sleeps. Its weights were not touched.

    Let the ``LLM`` finish its requests, or wake it, then ``sync()``.
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
