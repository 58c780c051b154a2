from starling_engine.worker.process import main

main()
