"""`python killed.py FOLDER COUNT`: forks processes that use one folder, and kills each after a moment.

Each writes, reads and evicts as fast as it can. It ends with 1 where one read wrong bytes, and prints how much was done.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from starling_engine.tiers.far import FarError, Missing
from starling_engine.tiers.folder import keeper, open_folder

from tests.engine.tiers.objects import FILE, MODEL, content, read, write

NUMBERS, LIMIT = 60, 30 * FILE
CONTENT = [content(number) for number in range(NUMBERS)]


def use(folder: str, seed: int) -> None:
    rng = random.Random(seed)
    # A life of some milliseconds is to see evictions too.
    keeper.CONFIRM = keeper.SOON = 0.001
    tier = open_folder(folder, LIMIT, "auto", MODEL)
    while True:
        number = rng.randrange(NUMBERS)
        try:
            write(tier, number)
            if read(tier, number) != CONTENT[number]:
                os._exit(3)
        except Missing:
            pass
        except FarError:
            time.sleep(0.001)


def kill_one(folder: str, seed: int) -> int:
    """The child's exit status: it should be the kill's."""
    child = os.fork()
    if child == 0:
        try:
            use(folder, seed)
        finally:
            os._exit(4)
    time.sleep(random.Random(~seed).uniform(0.001, 0.045))
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main(folder: str, count: int) -> int:
    seen: set[str] = set()
    leftovers = 0
    for seed in range(count):
        status = kill_one(folder, seed)
        if not os.WIFSIGNALED(status):
            print(f"child {seed} ended by itself: {os.waitstatus_to_exitcode(status)}")
            return 1
        seen |= {path.name for path in Path(folder).rglob("*.kv")}
        leftovers += any(Path(folder).glob("tmp/*"))
    print(f"{len(seen)} objects, {leftovers} kills in the middle of a file")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
