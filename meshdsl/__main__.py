"""`python -m meshdsl`, and the installed script, run the command `meshdsl`."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
