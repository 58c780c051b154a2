"""`python -m tests.engine.parallel.late_worker HOW ADDRESS RANK`: a worker whose device works on its own.

HOW: recorded or eager; slow or breaks (rank 1's device); fails-RANK (a step of that rank).
"""

import sys

from starling_engine.worker.process.worker_process import main

from tests.engine import late_device
from tests.engine.late_device import BreakingQueue, LateQueue, use_late_device
from tests.engine.parallel.failing_worker import fail_once

if __name__ == "__main__":
    how = sys.argv.pop(1)
    breaks = how == "breaks" and sys.argv[-1] == "1"
    if how == f"fails-{sys.argv[-1]}":
        fail_once()
    if how == "slow" and sys.argv[-1] == "1":
        late_device.LAG = 0.03
    use_late_device(setattr, recorded=how == "recorded", queue=BreakingQueue() if breaks else LateQueue())
    main()
