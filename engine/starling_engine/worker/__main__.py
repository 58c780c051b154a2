from starling_engine.ipc.child import import_for_good

import_for_good("starling_engine.worker.process.worker_process").main()
