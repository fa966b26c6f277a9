"""The `regard` command, also as `python -m regard`. Ctrl-C during the imports, too, ends it with 130."""

import sys


def main() -> None:
    try:
        from regard.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
