"""`python -m regard` is the `regard` command."""

from regard.cli import main

if __name__ == "__main__":
    main()
