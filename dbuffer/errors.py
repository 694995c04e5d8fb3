"""All errors that dbuffer raises. Every error class also derives from a standard error.

Catch :class:`DBufferError` to catch all of dbuffer's errors. If your code already catches the
standard type (``TimeoutError``, ``ValueError``, ``OSError`` ...), it catches dbuffer's error too.
Errors take a single message, so that they can be pickled and cross process boundaries.

In each docstring, the first paragraph names the problem and the second the remedy.
``docs/reference.md`` shows both paragraphs.
"""


class DBufferError(Exception):
    """Base class of all errors raised by dbuffer."""


class StoreNotFoundError(DBufferError, FileNotFoundError):
    """The store's directory, or a required file in it, does not exist.

    Check the path. If the store was removed, make a new sender, then new receivers.
    """


class StoreAccessError(DBufferError, OSError):
    """The filesystem refused access, or other users can write to the store, which is unsafe.

    If access was refused, check the mount's state, its permissions and the disk. If other users can
    write to the store, follow the message (``chmod go-w``, or another path), or pass
    ``allow_shared_store=True``.
    """


class StoreFullError(StoreAccessError):
    """The filesystem has no room for another version. The last version stays readable.

    Free enough space for two versions, or raise the quota, then publish again.
    """


class StoreCorruptError(DBufferError, ValueError):
    """A file of the store is damaged or inconsistent, or cannot be verified. The file was not used.

    Publish again, which replaces the damaged buffer. If the message says that there are no
    checksums, make the sender with ``checksum=True``.
    """

    def __init__(self, message: str, *, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting
        """Whether the error is permanent: every later read of the same version would fail too."""


class StoreBusyError(DBufferError, BlockingIOError):
    """Another sender has this store open, or the engine has another follower in this process.

    Close the other sender or follower (the message names its process), or use another directory. If
    the sender's host crashed, wait until the NFSv4 server releases the sender's lock (after 90 s by
    default).
    """


class WriterSupersededError(DBufferError, RuntimeError):
    """Another sender took over the store. This sender can no longer publish.

    Stop this process. If this process should publish, stop the other sender instead, and make a new
    sender in this process.
    """


class VersionError(DBufferError, ValueError):
    """A version number is not above the last published one, not in the store, or not an integer.

    Publish a version number above the last one, or leave ``version`` out. A trainer's step belongs
    in the metadata.
    """


class WaitTimeoutError(DBufferError, TimeoutError):
    """No version was published in time, or too few receivers acknowledged a version in time.

    Check that the trainer publishes into this directory. If receivers are late, the message lists
    the version that each receiver has applied. Look at the late receivers' logs, or raise
    ``timeout_s``.
    """


class VersionRegressedError(DBufferError, RuntimeError):
    """The store went back to a lower version, was emptied or was replaced while a receiver used it.

    If that was intended, call ``follow_fork()`` on the receiver.
    """

    def __init__(self, message: str, *, is_forked: bool = False) -> None:
        super().__init__(message)
        self.is_forked = is_forked
        """Whether another run (another start of a sender) now publishes into the store. If so,
        ``follow_fork()`` follows it."""


class ReceiverFailedError(DBufferError, RuntimeError):
    """A receiver that the sender waits for reported a failure, or the receiver's process ended.

    The message names the receiver and the reason. Restart the receiver, or publish weights that fit
    its model.
    """


class OptionError(DBufferError, ValueError):
    """An option or argument has an invalid value, or its value does not fit the other arguments.

    The message says which values are valid.
    """


class InvalidWeightsError(DBufferError, ValueError):
    """The weights or the metadata cannot be published, or were modified during the publish.

    Nothing was published. The message names the tensor or the metadata entry, and the reason. If
    weights were modified during ``send(wait=False)``, call ``wait()`` on its result before
    ``optimizer.step()``, or call ``sender.guard(optimizer)`` once.
    """


class UnsupportedError(DBufferError, NotImplementedError):
    """dbuffer does not support this kind of trainer, engine, model, store or option.

    Nothing was changed. The message names the unsupported kind, and an alternative.
    """


class WeightsMismatchError(DBufferError, ValueError):
    """The published weights do not fit the model, engine or tensors that should receive them.

    The message lists the differences. Correct names with ``rename=`` and dtypes with ``dtype=``. If
    a partial version lacks tensors, publish them too. Nothing was loaded, unless a note on the
    error says otherwise.
    """


class SnapshotEvictedError(DBufferError, RuntimeError):
    """A snapshot was open for longer than the sender waits for readers, so its buffer was reused.

    Discard the data that you read from the snapshot: the sender may have overwritten the file
    meanwhile. Open the newest version. To prevent this error, copy faster, or raise the sender's
    ``reader_timeout_s``.
    """


class RankFailedError(DBufferError, RuntimeError):
    """A rank of a sharded trainer or of an engine failed or no longer answers. All ranks stopped.

    The message names the rank and the reason. If a rank no longer answers, make a new sender in
    a new job.
    """


class ClosedError(DBufferError, ValueError):
    """A sender, receiver or mirror was used after ``close()``, or in a forked child.

    Make a new sender, receiver or mirror. In a child process, make it after the fork.
    """


class EngineEndedError(ClosedError):
    """A followed engine, its event loop or its actor has ended.

    Follow the engine that replaces it.
    """


class NotReadyError(DBufferError, RuntimeError):
    """A call needs another call first, or needs a file or object that does not exist.

    The message names the missing call, file or object.
    """


class EngineBusyError(DBufferError, RuntimeError):
    """The engine has requests in flight, or sleeps. Its weights were not changed.

    Wait until the engine has finished its requests, or wake it up, then call ``sync()``.
    """


class EngineUpdateError(DBufferError, RuntimeError):
    """An engine could not switch to a version. It still serves the previous weights.

    The message names the rank and the tensor. Publish weights that fit the engine. The engine
    tries the next version by itself.
    """


class EngineBrokenError(DBufferError, RuntimeError):
    """An engine's weights are half loaded and could not be repaired. The engine refuses to serve.

    Update the engine again, or restart it.
    """


class EngineUnreachableError(DBufferError, ConnectionError):
    """An engine's server, actor or event loop does not answer, or gives an unexpected answer.

    Check that the engine runs, and that its address and API key are correct.
    """
