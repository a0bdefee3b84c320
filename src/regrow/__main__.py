"""Entry point of `python -m regrow`, the `regrow` command."""

import sys

from regrow.cli import main

if __name__ == "__main__":
    sys.exit(main())
