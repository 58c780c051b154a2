"""`starling` with some of its constants changed, or a part that hangs: altered.py [MODULE:NAME=NUMBER | FAULT]... operator ...

Shortens what takes minutes, and causes faults that no test from outside can cause.
"""

import asyncio
import importlib
import sys
import time
from collections.abc import Callable

FOREVER = 3600.0


def a_reconcile_hangs() -> None:
    """Lets a reconcile wait for ever; everything else goes on."""
    from starling_operator.apply.applier import Applier

    async def hang(*_: object) -> None:
        await asyncio.sleep(FOREVER)

    Applier.carry_out = hang  # type: ignore[assignment, method-assign]


def the_loop_hangs() -> None:
    """Lets a decision take for ever: nothing else of the process runs."""
    from starling_operator import operator

    operator.plan = lambda *_: time.sleep(FOREVER)  # type: ignore[assignment, return-value]


FAULTS: dict[str, Callable[[], None]] = {fault.__name__: fault for fault in (a_reconcile_hangs, the_loop_hangs)}


def alter(alteration: str) -> None:
    if alteration in FAULTS:
        FAULTS[alteration]()
        return
    place, _, value = alteration.partition("=")
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    assert hasattr(found, name), f"{module} has no {name}"
    setattr(found, name, float(value))


if __name__ == "__main__":
    command = sys.argv.index("operator")
    for each in sys.argv[1:command]:
        alter(each)
    sys.argv[1:command] = []
    from starling_cli.main import main

    main()
