"""Types of records are read when their modules are imported, in one thread."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import msgspec
from dbuffer.format import delta, layout, manifest, objects

read = []
sys.setprofile(lambda frame, event, _: read.append(frame.f_code.co_name))
kinds = [manifest.Record]
for kind in kinds:
    kinds += kind.__subclasses__()
    if kind not in (manifest.Record, manifest.Versioned, manifest.OwnedRecord):
        try:
            msgspec.convert({}, kind)
        except msgspec.ValidationError:
            pass
sys.setprofile(None)
assert len(kinds) > 9, kinds
assert "get_class_annotations" not in read, read
"""


def test_no_record_is_described_when_it_is_decoded():
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True)
