"""`python killed.py FOLDER COUNT`: forks processes that use one folder, two at a time, and kills each after a moment.

Each writes, reads and evicts as fast as it can. COUNT are killed, and more, for MOST_SECONDS at most, while none was in the middle
of a file or nothing had to be evicted. It ends with 3 where one read wrong bytes, with 5 where one met half a file, and prints how
much was done.
"""

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

from starling_engine.kv_offload.secondary.base import ObjectMissing, TierError
from starling_engine.kv_offload.secondary.folder import janitor, usage
from starling_engine.kv_offload.secondary.folder.tier import open_folder

from tests.engine.kv_offload.objects import FILE, MODEL, content, read, write

NUMBERS, FITS = 60, 30
MOST_SECONDS = 90.0
LIMIT = FITS * FILE
CONTENT = [content(number) for number in range(NUMBERS)]


def use(folder: str, seed: int, pipe: int) -> None:
    """Writes to `pipe` when it is at work."""
    rng = random.Random(seed)
    # A life of some milliseconds is to see evictions too.
    janitor.INTERVAL, usage.DURATION = 0.001, 0.02
    tier = open_folder(folder, LIMIT, "auto", MODEL)
    for step in count():
        if step == 10:
            os.write(pipe, b".")
        number = rng.randrange(NUMBERS)
        try:
            write(tier, number)
            if read(tier, number) != CONTENT[number]:
                os._exit(3)
        except ObjectMissing:
            if tier.counters.corrupt:
                os._exit(5)
        except TierError:
            time.sleep(0.0005)


class Child:
    def __init__(self, folder: str, seed: int) -> None:
        self.started, pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                use(folder, seed, pipe)
            finally:
                os._exit(4)
        os.close(pipe)

    def work(self) -> None:
        """Returns when it is at work, or has ended."""
        os.read(self.started, 1)

    def end(self) -> int:
        """Kills it. Returns the status with which it had ended by itself, or a signal's number below 0."""
        os.close(self.started)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main(folder: str, kills: int) -> int:
    """Kills processes, two of which run at a time; some before they are at work."""
    rng = random.Random(0)
    seen: set[str] = set()
    leftovers, code = 0, -signal.SIGKILL
    young = Child(folder, 0)
    ends = time.monotonic() + MOST_SECONDS
    for seed in count(1):
        old, young = young, Child(folder, seed)
        if seed % 4:
            old.work()
        time.sleep(rng.uniform(0, 0.01))
        code = old.end()
        if code >= 0:
            break
        seen |= {path.name for path in Path(folder).rglob("*.kv")}
        leftovers += any(Path(folder).glob("tmp/*"))
        if seed >= kills and ((leftovers and len(seen) > FITS) or time.monotonic() > ends):
            break
    code = max(code, young.end())
    print(f"{len(seen)} objects, {leftovers} kills in the middle of a file")
    return max(code, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
