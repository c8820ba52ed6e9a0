"""``python -m arrayopt``: the command line, see `arrayopt.cli`."""

import sys

from arrayopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
