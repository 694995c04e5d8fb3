"""``python -m dbuffer`` and the command ``dbuffer``."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from dbuffer.tools import cli
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"dbuffer: the command line needs {error.name}: "
            "pip install '.[cli]' in a clone of dbuffer"
        )
    sys.exit(cli.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
