from starling_engine.core.process import main

main()
