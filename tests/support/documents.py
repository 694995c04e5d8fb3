"""Code blocks of the README and the pages in `docs/`.

A block of `bash` has commands alone, to be pasted; their output is in a block of `text`.
A block that is not run says why, in an HTML comment above it::

    <!-- not run: needs a vLLM engine; shown by tests/programs/vllm_offline.py -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts),
]
TUTORIAL = DOCS / "tutorial.md"
"""Followed with real engines, by `tests/integrations/trl/test_tutorial.py`."""
CODE = {"python", "bash", "yaml", "json"}

NOT_RUN, PROGRAM = "not run", "run as a program"
_MARK = re.compile(rf"<!-- ({NOT_RUN}|{PROGRAM}): (.+) -->")
_FENCE = re.compile(r"```(.*)")


@dataclass(frozen=True)
class CodeBlock:
    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    mark: str | None
    reason: str

    def __str__(self) -> str:
        name = f"{self.page.relative_to(ROOT)}:{self.line}"
        return f"{name}: {self.reason}" if self.mark else name


def blocks_of(page: Path) -> Iterator[CodeBlock]:
    lines = page.read_text(encoding="utf-8").splitlines()
    begun: tuple[int, str, re.Match[str] | None] | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            continue
        if begun is None:
            begun = number + 1, fence[1], _MARK.fullmatch(lines[number - 1])
            continue
        first, language, mark = begun
        code = "\n".join(lines[first:number]) + "\n"
        kind, reason = mark.groups() if mark else (None, "")
        yield CodeBlock(page, first + 1, language, code, kind, reason)
        begun = None
    assert begun is None, f"{page}: a block has no end"


BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language in CODE]


def blocks(language: str, mark: str | None = None) -> list[CodeBlock]:
    return [block for block in BLOCKS if (block.language, block.mark) == (language, mark)]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))
