"""The steps of a publish that have a name, and of clearing up: where a sender may be stopped."""

from __future__ import annotations

import pytest
from support import Step

EVERY_PUBLISH = {
    "before it looks for the idle buffer": Step("call", "BufferWriter.claim"),
    "before the mark is written": Step("call", "replace_file", "manifest.json"),
    "mark written beside the manifest": Step("c_call", "replace", "manifest.json"),
    "mark in place": Step("c_return", "replace", "manifest.json"),
    "before the copy": Step("call", "WeightSender._copy"),
    "in the middle of the copy": Step("call", "FileTensors.hash_block", nth=4),
    "after the copy": Step("return", "WeightSender._copy"),
    "after the checksums": Step("call", "BufferWriter.commit"),
    "manifest begun": Step("c_return", "open", "manifest.json", nth=2),
    "manifest written beside the mark": Step("c_call", "replace", "manifest.json", nth=2),
    "manifest in place": Step("c_return", "replace", "manifest.json", nth=2),
    "before the pointer": Step("call", "replace_file", "CURRENT"),
    "pointer written beside the old one": Step("c_call", "replace", "CURRENT"),
}
REWRITE = {"after the lock": Step("return", "BufferWriter._lock_existing")}
NEW_FILE = {
    "before the new file": Step("call", "BufferWriter._create"),
    "new file empty": Step("call", "allocate"),
    "new file allocated": Step("return", "allocate"),
    "layout written": Step("return", "Footer.write"),
}
DURABLE = {
    "before the flush": Step("call", "sync_file"),
    "after the flush": Step("return", "sync_file"),
    "directory flushed": Step("return", "sync_directory", nth=2),
}
PUBLISHED = {
    "pointer in place": Step("c_return", "replace", "CURRENT"),
    "after the pointer": Step("return", "replace_file", "CURRENT"),
    "at the end": Step("return", "WeightSender.send"),
}
PUBLISHED_DURABLY = {
    "pointer in place, before its flush": Step("call", "sync_directory", nth=3),
}
RECOVERY = {
    "writer's lock taken": Step("return", "BufferWriter._take_writer_lock"),
    "writer's record begun": Step("c_return", "open", "writer.json"),
    "writer's record not in place": Step("c_call", "replace", "writer.json"),
    "writer's record in place": Step("c_return", "replace", "writer.json"),
    "before the temporaries go": Step("call", "remove_stale_temporaries"),
    "before files go": Step("call", "BufferWriter._remove_unnamed_files"),
    "after A's files went": Step("return", "BufferWriter._remove_unnamed_files"),
    "after all": Step("return", "BufferWriter._recover"),
}
SITUATIONS = {
    "in place": {**EVERY_PUBLISH, **REWRITE, **PUBLISHED},
    "first ever": {**EVERY_PUBLISH, **NEW_FILE, **PUBLISHED},
    "new layout": {**EVERY_PUBLISH, **REWRITE, **NEW_FILE, **PUBLISHED},
    "in place, durable": {**DURABLE, **EVERY_PUBLISH, **PUBLISHED, **PUBLISHED_DURABLY},
    "first ever, durable": {
        **DURABLE,
        **NEW_FILE,
        **EVERY_PUBLISH,
        **PUBLISHED,
        **PUBLISHED_DURABLY,
    },
}
AFTER_THE_FLIP = {**PUBLISHED, **PUBLISHED_DURABLY}.keys()

CASES = [
    pytest.param(situation, step, name in AFTER_THE_FLIP, id=f"{situation}: {name}")
    for situation, steps in SITUATIONS.items()
    for name, step in steps.items()
]
"""Situation, step, and whether the version is published by then."""
