"""The router: stands before the groups of a service, and sends each request where its prefix is cached and there is time for it.

 client ─▶ app.py ─▶ prompt.py ─▶ hold.py ─▶ picker.py ─▶ upstream.py ─▶ an agent's endpoint
                     the prefix   its turn   the backend   the answer, or another backend
                     as blocks                  ▲
 agents ─▶ watch.py ──▶ backend.py ─────────────┤
           events.py ─▶ index.py ───────────────┘

Of tenants, `accounts.py` says whose a request is, `quota.py` what it may have, and `fair_share.py` whose turn it is.
While a canary runs, `canary.py` says which revision a request is for and counts what came of it; `shadows.py` compares tokens.
`picker.py`, `hold_queue.py`, `fair_share.py` and `index.py` know no client, no process and no clock. `epp/` gives the choice to a
gateway, which then carries the requests itself.
"""
