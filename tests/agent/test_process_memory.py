"""Memory of a process that has read large bodies, and when its collector looks for garbage."""

import subprocess
import sys

import pytest
from starling_agent.server.process_memory import give_large_blocks_back

BODIES = """
import ctypes, resource, sys
from starling_agent.server.process_memory import give_large_blocks_back

if sys.argv[1] == "given back":
    give_large_blocks_back()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def body(size):
    made = libc.malloc(size)
    ctypes.memset(made, 1, size)
    return made

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

libc.free(body(24 << 20))
before = resident()
bodies = []
for _ in range(8):
    bodies.append(body(8 << 20))
    body(64 << 10)  # lives on behind it
for each in bodies:
    libc.free(each)
print(resident() - before)
"""


@pytest.mark.skipif(not give_large_blocks_back(), reason="the C library has no such setting")
@pytest.mark.parametrize(("setting", "grows"), [("given back", False), ("as it is", True)])
def test_memory_of_large_bodies_goes_back_to_the_system(setting: str, grows: bool) -> None:
    done = subprocess.run([sys.executable, "-c", BODIES, setting], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 32 << 20) is grows, done.stdout


COLLECTIONS = """
import gc
from starling_agent.server.process_memory import collect_rarely

started = []
collect_rarely()
gc.callbacks.append(lambda phase, info: started.append(info["generation"]))
for _ in range(20):
    step = [[] for _ in range(8_000)]
    del step
print(len(started))
for _ in range(30_000):
    ring = []
    ring.append(ring)
print(len(started))
"""


def test_objects_of_a_large_step_start_no_collection_and_garbage_does() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True)
    of_steps, with_garbage = map(int, done.stdout.split())
    assert of_steps == 0
    assert with_garbage > 0
