"""``python -m longstraw_backend``: the ``longstraw`` command without an installation."""

import sys

from longstraw_backend.cli import main

sys.exit(main())
