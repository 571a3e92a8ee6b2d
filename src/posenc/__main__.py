"""``python -m posenc``: the command, where no script of that name is on the path."""

from posenc.cli import main

if __name__ == "__main__":
    main()
