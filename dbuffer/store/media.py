"""The medium of a directory: the one place where the kind of a mount is asked."""

from __future__ import annotations

import os
from pathlib import Path

from dbuffer.errors import OptionError
from dbuffer.store import mounts
from dbuffer.store.filesystem import MOUNT_VARIABLE
from dbuffer.store.local import LOCAL_FILESYSTEMS, LocalMedium
from dbuffer.store.medium import Medium
from dbuffer.store.network import NetworkMedium

MEDIA: dict[str, type[Medium]] = {medium.name: medium for medium in (LocalMedium, NetworkMedium)}
"""All media, by their name in ``DBUFFER_MOUNT``."""


def medium_of(path: Path) -> Medium:
    """Choose the medium of ``path``, which need not exist yet.

    Raises:
        OptionError: ``DBUFFER_MOUNT`` names no medium.
        StoreAccessError: the path leads into a loop of links.
    """
    found = mounts.mount_of(path).filesystem
    name = os.environ.get(MOUNT_VARIABLE, "auto")
    if name == "auto":
        name = (LocalMedium if found in LOCAL_FILESYSTEMS else NetworkMedium).name
    if name not in MEDIA:
        names = ", ".join(map(repr, MEDIA))
        raise OptionError(f"invalid {MOUNT_VARIABLE} {name!r:.80}: use {names} or 'auto'")
    return MEDIA[name](path, found)
