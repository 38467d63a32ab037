"""`python -m jaxrl` is the command `jaxrl`."""

from __future__ import annotations

import sys

from jaxrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
