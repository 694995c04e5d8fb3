"""How Sphinx builds the site: `python3 dev.py docs`."""

import re
import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import MockFinder, _MockModule, _MockObject

import dbuffer

ROOT = Path(__file__).parents[1]

project = "dbuffer"
author = "dbuffer's contributors"
release = version = dbuffer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "dbuffer"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]

myst_heading_anchors = 3

# Importing them takes longer than all the rest, or they are not there (verl); their own names are
# documented elsewhere.
autodoc_mock_imports = ["peft", "ray", "sglang", "torchrl", "verl", "vllm"]
# Sphinx also imports modules to read their source, when autodoc mocks nothing: 4 s for vLLM alone.
sys.meta_path.insert(0, MockFinder(autodoc_mock_imports))
# A class of dbuffer passes keywords to the metaclass of vLLM's that it derives from.
_MockObject.__init_subclass__ = classmethod(lambda _cls, **_keywords: None)
# dbuffer compares vLLM's version with the newest tested one.
_MockModule.__version__ = "0"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__new__"}
autodoc_member_order = "bysource"
# Links between pages are checked. Docstrings name types of torch and of the standard library,
# whose own documentation would have to be fetched to check those.
nitpick_ignore_regex = [(r"py:.*", r".*")]

ROOT_PAGES = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "measuring": "benchmarks/README.md",
}
"""Pages of the site that lie outside of `docs/`, where people look for them."""


def read_root_page(app, docname, source):
    """Put such a file in the place of its page, and let links lead to pages, not to files."""
    text = source[0]
    if docname in ROOT_PAGES:
        path = ROOT / ROOT_PAGES[docname]
        app.env.note_dependency(str(path), docname=docname)
        before = re.sub(r"\]\((?:\.\./)?docs/", "](", path.read_text(encoding="utf-8"))
        before = re.sub(r"\[([^\]]+)\]\(tests/[^)]+\)", r"\1", before)  # the site has no tests
        text = re.sub(r"\]\((?=(?:benchmarks|examples)/)", "](../", before) + text
    for page, file in ROOT_PAGES.items():
        text = text.replace(f"](../{file}", f"]({page}.md").replace(f"]({file}", f"]({page}.md")
    source[0] = text


def keep_colons(_app, what, _name, _obj, _options, lines):
    """Put an empty comment first: in an attribute's first line napoleon takes "a: b" for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", read_root_page)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
