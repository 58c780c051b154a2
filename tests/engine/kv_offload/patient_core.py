"""`python -m tests.engine.kv_offload.patient_core [ahead]`: a core whose every request looks up, however long the last ones waited.

By itself it computes again where that is quicker than its tiers, which on a busy machine is a matter of chance.
"""

import math

from starling_engine.core.process import main
from starling_engine.kv_offload import policies

if __name__ == "__main__":
    policies.PATIENCE = math.inf
    main()
