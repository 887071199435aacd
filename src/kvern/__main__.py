"""``python -m kvern`` is the command ``kvern``."""

import sys

from kvern.cli.main import main

sys.exit(main())
