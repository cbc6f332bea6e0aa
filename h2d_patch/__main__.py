"""`python -m h2d_patch` is `h2d-patch`."""

import sys

from .cli import main

sys.exit(main())
