"""What the schemes hand on to the senders and receivers that they make."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import torch

from dbuffer.errors import OptionError
from dbuffer.mirror import Mirror, start_mirror
from dbuffer.names import Rename
from dbuffer.receiver import WeightReceiver
from dbuffer.sender import WeightSender


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of :class:`dbuffer.WeightSender` and :class:`dbuffer.WeightReceiver`.

    It travels to workers with the scheme, so a ``rename`` that is a function must pickle.
    """

    num_threads: int = 1
    """Threads that copy, on either side."""
    durable: bool = False
    checksum: bool | Literal["auto"] = "auto"
    dtype: torch.dtype | None = None
    rename: Rename | None = None
    reader_timeout_s: float = 60.0
    verify: bool | Literal["auto"] = "auto"
    poll_interval_s: float = 1.0
    allow_shared_store: bool = False

    @classmethod
    def parse(cls, num_threads: int, options: dict[str, Any]) -> Self:
        """Make them from a scheme's keyword arguments.

        Raises:
            OptionError: (a ``ValueError``) there is no such option.
        """
        known = {item.name for item in fields(cls)}
        if unknown := options.keys() - known:
            raise OptionError(
                f"unknown options {sorted(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(num_threads=num_threads, **options)

    def make_sender(self, store: str | os.PathLike[str]) -> WeightSender:
        """Open a store for writing; directories above it are made as well."""
        Path(store).parent.mkdir(parents=True, exist_ok=True)
        return WeightSender(
            store,
            durable=self.durable,
            checksum=self.checksum,
            dtype=self.dtype,
            rename=self.rename,
            num_threads=self.num_threads,
            reader_timeout_s=self.reader_timeout_s,
            allow_shared_store=self.allow_shared_store,
        )

    def start_mirror(
        self, remote: str | os.PathLike[str], local: str | os.PathLike[str]
    ) -> Mirror | None:
        """Keep ``local`` the same as ``remote``, or stand by while another process does.

        None where both are one store.
        """
        return start_mirror(
            remote,
            local,
            poll_interval_s=self.poll_interval_s,
            num_threads=self.num_threads,
            reader_timeout_s=self.reader_timeout_s,
            allow_shared_store=self.allow_shared_store,
        )

    def make_receiver(
        self, store: str | os.PathLike[str], receiver_id: str | None = None
    ) -> WeightReceiver:
        """Open a store, which need not be there yet, for reading."""
        return WeightReceiver(
            store,
            receiver_id=receiver_id,
            poll_interval_s=self.poll_interval_s,
            verify=self.verify,
            num_threads=self.num_threads,
            allow_shared_store=self.allow_shared_store,
        )
