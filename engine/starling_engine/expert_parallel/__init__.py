"""Expert parallelism (EP): ranks share the experts of every layer, and experts move between ranks while they serve.

```
 worker/process/dp_sync_loop.py                           models/moe_block.py, in each layer with experts
        │ before each step                                       │ dispatch, then combine
        ▼                                                        ▼
 dp_sync.py                                               ranks.py
   DpSync: run the step, serve in it, or sleep              ExpertRanks: the placement in force
        │                                                        │
        ├─▶ epoch.py                                             ├─▶ exchange.py
        │     Epoch: communicator with the epoch's               │     AllToAll, AllGather: tokens to experts,
        │     ranks, and sockets that wake them                  │     and sums back
        │          ▲                                             └─▶ load.py
        │          │ joins the next one                                LoadWindow: counts each expert's tokens
        │    EpochPreparer, in a thread, for a resize                        │
        ▼          │                                                         │
 eplb_manager.py   │                                                         │
   EplbManager: now and then a placement that suits the load  ◀── counts ────┘
        │   │      │
        │   └──────┼─▶ eplb_search.py, in a thread ─▶ eplb.py: rebalance(load) -> Placement
        ▼          ▼
 rearrangement.py
   Rearrangement: loads experts in a thread; then ExpertRanks.set_placement, set_layer
        │
        ▼
 sources.py
   FastestSource ─┬─▶ CheckpointSource: the files
                  └─▶ PeerSource ── pieces of an expert ── ExpertServer of another rank (peers.py), found by PeerDirectory
```

A *placement* (`topology/placement.py`) says which rank holds which experts. An *epoch* (`topology/epoch.py`) is a numbered set of
ranks that exchange tokens. A resize begins a new epoch, with other ranks; EPLB changes the placement within one.
"""
