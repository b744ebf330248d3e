"""`python -m inferq`: the command line."""

import sys

from inferq.cli import main

sys.exit(main())
