"""Tree of all errors that dbuffer raises; each is also a standard error.

Catch :class:`DBufferError` to catch all of them, or the standard type (``TimeoutError``,
``ValueError``, ``OSError`` ...) if your code already catches that. Each takes one message, so that
it can be pickled and cross process boundaries.

The first paragraph of a docstring says what happened, the second what to do; ``docs/reference.md``
shows both.
"""


class DBufferError(Exception):
    """Base class of all errors raised by dbuffer."""


class StoreNotFoundError(DBufferError, FileNotFoundError):
    """The store's directory, or a file that it needs, does not exist.

    Check the path; if the store was removed, make a new sender, then new receivers.
    """


class StoreAccessError(DBufferError, OSError):
    """The filesystem refused access, or the store is not safe: others can write to it.

    Check the mount: read-only, permissions, a broken disk. If others can write to the store, follow
    the message (``chmod go-w``, or another path), or pass ``allow_shared_store=True``.
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

    def __init__(self, message: str, *, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting
        """Whether no later look at the same version can succeed."""


class StoreBusyError(DBufferError, BlockingIOError):
    """Another sender has this store open, or another follower of this process has the engine.

    Close the other one, whose process the message names, or use another directory. If it died
    together with its host, an NFSv4 server keeps its lock until the lease ends (90 s by default).
    """


class WriterSupersededError(DBufferError, RuntimeError):
    """Another sender took over the store. This one must not publish any more.

    Stop this process. If it is the right one, stop the other and make a new sender.
    """


class VersionError(DBufferError, ValueError):
    """A version is not above the last published one, no longer in the store, or not an integer.

    Publish a version above the last one, or leave ``version`` out; put a trainer's step in the
    metadata.
    """


class WaitTimeoutError(DBufferError, TimeoutError):
    """No version was published, or too few receivers acknowledged one, in time.

    Check that the trainer publishes into this directory. For receivers, the message says which
    version each has applied: look at the logs of the slow ones, or raise ``timeout_s``.
    """


class VersionRegressedError(DBufferError, RuntimeError):
    """The store went back to a lower version, was emptied or was replaced while a receiver used it.

    If that was intended, call ``follow_fork()`` on the receiver.
    """

    def __init__(self, message: str, *, is_forked: bool = False) -> None:
        super().__init__(message)
        self.is_forked = is_forked
        """Whether another run publishes there now, so that ``follow_fork()`` finds its versions."""


class ReceiverFailedError(DBufferError, RuntimeError):
    """A receiver that the sender waits for reported a failure, or its process has ended.

    The message names the receiver and the reason. Restart it, or publish weights that fit it.
    """


class OptionError(DBufferError, ValueError):
    """An option has an invalid value, or a value that does not fit where it is used.

    The message says which values are valid.
    """


class InvalidWeightsError(DBufferError, ValueError):
    """The weights or the metadata cannot be published, or were modified during the publish.

    Nothing was published. The message names the tensor, or the entry of the metadata, and the
    reason. With ``send(wait=False)``: call ``wait()`` on its result before ``optimizer.step()``,
    or ``sender.guard(optimizer)`` once.
    """


class UnsupportedError(DBufferError, NotImplementedError):
    """A trainer, engine, model, store or option is of a kind that dbuffer does not support.

    Nothing was changed. The message names the obstacle, and what to use instead.
    """


class WeightsMismatchError(DBufferError, ValueError):
    """The published weights do not fit the target, which was not changed, unless a note says so.

    The message lists the differences. Correct names with ``rename=`` and dtypes with ``dtype=``,
    or publish the tensors that a partial version lacks.
    """


class SnapshotEvictedError(DBufferError, RuntimeError):
    """A snapshot was open for longer than the sender waits, and the sender reused its buffer.

    Discard the data that was read, and open the newest version: the sender may have rewritten the
    file, if locks do not work. Copy faster, or raise the sender's ``reader_timeout_s``.
    """


class RankFailedError(DBufferError, RuntimeError):
    """A rank of a sharded trainer or of an engine failed or was lost; no rank continued.

    The message names the rank and the reason. If a rank was lost, make a new sender in a new job.
    """


class RankTimeoutError(RankFailedError, TimeoutError):
    """A rank did not reach the step at which the others waited for it.

    The message names the ranks and the step, and says how long the others waited.
    """


class ClosedError(DBufferError, ValueError):
    """A sender, receiver or mirror was used after ``close()``, or in a forked child.

    Make a new one; in a child, make it after the fork.
    """


class EngineEndedError(ClosedError):
    """A followed engine has ended, or its event loop or actor has.

    Follow the engine that replaces it.
    """


class NotReadyError(DBufferError, RuntimeError):
    """A call came in the wrong order: before a call that it needs, or too late.

    The message says which call must come first.
    """


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight, or sleeps. Its weights were not touched.

    Let the engine finish its requests, or wake it up, then call ``sync()``.
    """


class EngineUpdateError(DBufferError, RuntimeError):
    """An engine could not switch to a version. It still serves the previous weights.

    The message names the rank and the tensor. Publish weights that fit: the engine tries the next
    version.
    """


class EngineBrokenError(DBufferError, RuntimeError):
    """An engine's weights are half loaded and could not be repaired. It refuses to serve.

    Update it again, or restart it.
    """


class EngineUnreachableError(DBufferError, ConnectionError):
    """An engine's server, actor or event loop does not answer, or a server's answer is unknown.

    Check that it is up, and its address and API key.
    """
