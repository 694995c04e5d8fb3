"""Imported last by the process that children are forked off, so that forks take little time.

A fork inherits how far its parent is from its next garbage collection, so that, by chance, every
child began with one. Such a collection goes through all that was ever imported and copies each
page of it: half a second of work for a child that lives for a hundredth of one.

A fork also copies an entry for each page of its parent. After an import of torch these are 60,000,
and a fork takes 17 ms of processor time; with huge pages it takes 5 ms.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MADV_COLLAPSE = 25
"""From Linux 6.1 on; elsewhere the call fails, and pages stay as they are."""


def freeze() -> None:
    """Collect all garbage, keep the rest out of later collections, and make its pages huge."""
    gc.collect()
    gc.freeze()
    gc.enable()
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_, path = f"{line} ".split(" ", 5)
        if access == "rw-p" and path.strip() in ("", "[heap]"):
            start, end = (int(address, 16) for address in place.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


freeze()
