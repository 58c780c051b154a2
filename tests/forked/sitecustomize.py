"""On the path of a program whose engine processes are to be forks, however deep below it they start: see `tests.forks`."""

import os
from pathlib import Path

from starling_engine.ipc import child

from tests import forks

child.start = forks.start
forks.join(Path(os.environ["STARLING_TEST_FORKS"]))
