#!/usr/bin/env python3
"""Write the errors of reference.md from the docstrings of dbuffer/errors.py.

Needs Python and nothing else. A test runs `errors_table` and compares.
"""

import inspect
import re
import runpy
from pathlib import Path

HERE = Path(__file__).parent
ERRORS = HERE.parent / "dbuffer" / "errors.py"
PAGE = HERE / "reference.md"

HEAD = "| error | also a | what happened | what to do |\n| --- | --- | --- | --- |\n"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def errors_table() -> str:
    """Return the table of all errors, as Markdown."""
    module = runpy.run_path(str(ERRORS))
    base = module["DBufferError"]
    classes = [value for value in module.values() if inspect.isclass(value)]
    errors = [error for error in classes if issubclass(error, base) and error is not base]
    return HEAD + "".join(_row(error, base) for error in sorted(errors, key=lambda e: e.__name__))


def _row(error: type[Exception], base: type[Exception]) -> str:
    happened, _, advice = (inspect.getdoc(error) or "").partition("\n\n")
    parents = [kind for kind in error.__mro__[1:] if issubclass(kind, base) and kind is not base]
    # Omit a standard type that is a base of another one.
    others = [k for k in error.__mro__ if not issubclass(k, base) and issubclass(k, Exception)]
    others = [k for k in others if not any(o is not k and issubclass(o, k) for o in others)]
    kinds = ", ".join(f"`{kind.__name__}`" for kind in parents[:1] + others)
    cells = (f"`{error.__name__}`", kinds, _cell(happened), _cell(advice))
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("``", "`")
    return re.sub(r":\w+:(?=`)", "", plain).replace("|", "\\|")


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda _: errors_table(), page), encoding="utf-8")
