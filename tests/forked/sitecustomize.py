"""On the path of a program whose engine processes are to be forks, however deep below it they start: see `tests.fork_server`."""

import os
from pathlib import Path

from starling_engine.ipc import child

from tests import fork_server

child.start = fork_server.start
fork_server.join(Path(os.environ["STARLING_TEST_FORKS"]))
