"""What tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the repository."""

NEEDS_ALL = "needs the extra `development`"
"""Why tests are skipped in an environment for the tests of the core alone."""
