"""`rlctl` and `python -m rlctl`."""

import signal
import sys


def main() -> int:
    """Run the command line. A Ctrl-C while it is imported ends the process without a traceback."""
    if heard := signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rlctl import cli

    if heard:
        signal.signal(signal.SIGINT, cli.interrupt)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
