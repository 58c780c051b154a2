"""`python e2e/cluster`: see README.md beside this file."""

import sys

from starling_cluster.cli import main

sys.exit(main())
