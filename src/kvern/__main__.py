"""``python -m kvern`` is the command ``kvern``."""

import sys

from kvern.cli.entry import main

sys.exit(main())
