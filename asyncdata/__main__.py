"""``python -m asyncdata``."""

import sys

from asyncdata.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
