#!/usr/bin/env python3
"""Write errors.md from the docstrings of dbuffer/errors.py: `python3 docs/make_errors.py`.

Needs Python and nothing else. A test runs `errors_page` and compares.
"""

import inspect
import re
import runpy
from pathlib import Path

HERE = Path(__file__).parent
ERRORS = HERE.parent / "dbuffer" / "errors.py"
PAGE = HERE / "errors.md"

HEAD = """\
<!-- Made by docs/make_errors.py from dbuffer/errors.py: change that, and run it. -->
# Errors

Each error derives from `dbuffer.DBufferError` and from a standard type: catch the first to catch
all of dbuffer's errors, or the second if your code already catches that. Each has one message and
can be pickled, so that it crosses process boundaries. All are importable from `dbuffer`.

```python
import dbuffer

try:
    dbuffer.WeightReceiver("/dev/shm/policy", poll_interval_s=-1)
except ValueError as error:  # OptionError is both
    assert isinstance(error, dbuffer.DBufferError)
```

Errors of other code are not wrapped: Python's own for a missing argument, those of a function given
to `load_into`, torch's, the engines'.

| error | also a | what happened | what to do |
| --- | --- | --- | --- |
"""


def errors_page() -> str:
    """The whole page, as Markdown."""
    module = runpy.run_path(str(ERRORS))
    base = module["DBufferError"]
    found = [value for value in module.values() if inspect.isclass(value)]
    errors = [error for error in found if issubclass(error, base) and error is not base]
    return HEAD + "".join(_row(error, base) for error in sorted(errors, key=lambda e: e.__name__))


def _row(error: type[Exception], base: type[Exception]) -> str:
    happened, _, advice = (inspect.getdoc(error) or "").partition("\n\n")
    parents = [kind for kind in error.__mro__[1:] if issubclass(kind, base) and kind is not base]
    # Of the standard types, those that no other one of them already says.
    others = [k for k in error.__mro__ if not issubclass(k, base) and issubclass(k, Exception)]
    others = [k for k in others if not any(o is not k and issubclass(o, k) for o in others)]
    kinds = ", ".join(f"`{kind.__name__}`" for kind in parents[:1] + others)
    cells = (f"`{error.__name__}`", kinds, _cell(happened), _cell(advice))
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("``", "`")
    return re.sub(r":\w+:(?=`)", "", plain).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(errors_page(), encoding="utf-8")
