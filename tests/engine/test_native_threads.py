"""The native kernels' own threads, in the processes and threads that call them."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from starling_engine.native import load, ops, reference
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

IN_A_FORK = """
import os, torch
from starling_engine.native import ops
torch.set_num_threads(3)
weight, x = ops.pack_linear(torch.ones(800, 64, dtype=torch.bfloat16)), torch.ones(9, 64, dtype=torch.bfloat16)
before = ops.linear(x, weight).tolist()  # torch's own threads do not survive a fork
child = os.fork()
same = ops.linear(x, weight).tolist() == before
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""


def product(threads: int) -> tuple[Tensor, Tensor]:
    """Returns the kernel's result, and the expected one."""
    torch.set_num_threads(threads)
    x, weight = torch.randn(9, 66).bfloat16(), torch.randn(800, 66).bfloat16()
    return ops.linear(x, ops.pack_linear(weight)), reference.linear(x, reference.pack_linear(weight))


def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    wrong: list[str] = []

    def call_often(threads: int) -> None:
        for _ in range(50):
            actual, expected = product(threads)
            if not torch.allclose(actual.float(), expected.float(), atol=0.2, rtol=0.02):
                wrong.append(f"with {threads} threads")

    callers = [threading.Thread(target=call_often, args=(threads,)) for threads in (1, 2, 3, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_threads_without_work_take_no_processor() -> None:
    """The best of five: what else this process has may take some, and one that waits for work by looking takes all of it."""
    product(3)
    taken: list[float] = []
    while min(taken, default=1.0) >= 0.1 and len(taken) < 5:
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        taken.append(time.process_time() - before)
    assert min(taken) < 0.1, taken
