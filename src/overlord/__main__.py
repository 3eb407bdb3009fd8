"""`python -m overlord`, for where the `overlord` command is not on the path."""

import sys

from overlord.cli import main

if __name__ == "__main__":
    sys.exit(main())
