"""`python -m meshdsl`, and the installed script, run the command `meshdsl`."""

import sys


def main() -> int:
    """Handle signals from the start, then run the command line."""
    try:
        from .tools.commands.startup import handle_signals

        handle_signals(sys.argv[1:])
        from .tools.cli import main as command

        return command()
    except KeyboardInterrupt:  # while this was imported; `command` catches its own
        return 130


if __name__ == "__main__":
    sys.exit(main())
