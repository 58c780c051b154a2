"""KV offload: chunks of the KV cache are kept below the device, to be found by later requests, restarts and other engines.

scheduler, core        base.OffloadManager, the only door (manager.TieredOffload; base itself where there are no tiers)
                         |- promotions, pin_quota   secondary -> primary, for requests that wait
                         |- loads                   primary -> device
                         |- demotions               device -> primary
                         |- write_back              primary -> secondary
                         |- policies                swap or recompute, look up or pass by, how much to write back
                         `- primary, jobs, stats    chunk slots, open orders, counters
                       --- orders ---------------------------------------------------------------------------------
each rank's worker     transfers.TransferThreads    carries orders out beside the steps
                         |- arena, copies           host memory, and copies between it and the device's pages
                         `- secondary               a folder of files, and a store over the network
"""
