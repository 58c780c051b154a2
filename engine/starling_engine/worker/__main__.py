from starling_engine.child import import_for_good

import_for_good("starling_engine.worker.process").main()
