"""Compiles a rank's kernels while its weights are loaded, by all CPUs at once, where Triton's cache does not have them yet.

A process of its own builds the rank on torch's meta device and runs all kinds of steps there (`kernels.ahead`). What fails there is
compiled as it comes, one kernel after the other, as the rank warms up.

usage: python -m starling_engine.worker.warm, with a `Work` as JSON on its standard input
"""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from starling_engine.config import WorkerConfig
from starling_engine.ipc.child import die_with_parent
from starling_engine.ipc.priority import lower_priority
from starling_engine.kernels.ahead import Variant, compile_variants, note_launches, pretend
from starling_engine.kv.layer_specs import kv_groups, state_group
from starling_engine.model_config.config import load_model_config
from starling_engine.parallel.absent import absent_ranks
from starling_engine.parallel.communicator import no_tick
from starling_engine.platforms.cgroup import cpu_limit
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.shapes_only import ShapesOnlyPlatform
from starling_engine.platforms.triton_support import GpuKind
from starling_engine.weights.dummy import load_dummy
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.masks import MaskQueue, StepMasking
from starling_engine.worker.memory_plan import allocate, kv_dtype
from starling_engine.worker.setup import RankSetup

logger = logging.getLogger("starling.worker")

POLL_SECONDS = 0.1
MOST_SECONDS = 300.0
"""Time for all kernels; what is compiled by then is found in any case."""
MOST_COMPILERS = 16
"""Processes of all ranks of a node. There are some dozens of kernels, and the longest of them takes as long as several others."""
COMPILER_BYTES = 1 << 30
"""Memory of one, with ptxas, beyond what it shares with the process that began it."""
AS_THEY_COME = "kernels are compiled as they come, for they could not be compiled ahead: %s"


class Work(msgspec.Struct, frozen=True):
    config: WorkerConfig
    target: GpuKind


class KernelCompilation:
    """Kernels that are being compiled, by a process of its own. `wait` comes before the first of them runs.

    Whatever becomes of that process, the rank starts.
    """

    def __init__(self, config: WorkerConfig, target: GpuKind) -> None:
        self._began = time.perf_counter()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._done = _mark(config, target)
            if not self._done.exists():
                self._process = self._start(Work(config, target))
        except OSError as error:  # of the folder with compiled kernels, the one for temporary files, or the process
            logger.warning(AS_THEY_COME, error)

    def _start(self, work: Work) -> subprocess.Popen[bytes]:
        # Files, for a pipe may be full, and is open as long as anyone has it.
        with tempfile.TemporaryFile() as order, ExitStack() as failed:
            order.write(msgspec.json.encode(work))
            order.seek(0)
            self._said = failed.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-m", "starling_engine.worker.warm"],
                stdin=order, stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
            )  # fmt: skip
            failed.pop_all()  # open as long as the process may write
        with suppress(OSError):
            lower_priority(process.pid)  # before it starts threads and compilers: weights are loaded first
        return process

    def wait(self, tick: Callable[[], None]) -> None:
        """Returns when all are compiled, when it is known that not all can be, or when that takes too long."""
        if self._process is None:
            return
        with self._said:
            status = self._status(self._process, tick)
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
        if status is None:
            logger.warning(AS_THEY_COME, f"that took more than {MOST_SECONDS:g} s")
        elif status:
            logger.warning(AS_THEY_COME, last or f"the process ended with status {status}")
        else:
            logger.info("kernels were compiled in %.1f s, beside the weights: %s", time.perf_counter() - self._began, last)
            with suppress(OSError):  # kernels may be found in a folder that takes no others
                self._done.parent.mkdir(parents=True, exist_ok=True)
                self._done.touch()

    def _status(self, process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int | None:
        """Returns how the process ended. None if it took too long: then it is killed, and so are those that it has begun."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            if time.perf_counter() - self._began > MOST_SECONDS:
                os.killpg(process.pid, signal.SIGKILL)
                return None
            tick()


def variants_of(config: WorkerConfig) -> list[Variant]:
    """Returns the kernels of all kinds of steps of a rank. In a process that has called `pretend`, and launches nothing else."""
    return note_launches(lambda: meet_kernels(shapes_only_runner(config)))


def meet_kernels(runner: DeviceRunner) -> None:
    """Runs all kinds of steps."""
    with torch.inference_mode():
        runner.peak_bytes()
        runner.warm()
        runner.record()


def shapes_only_runner(config: WorkerConfig) -> DeviceRunner:
    """Makes the rank's runner, with tensors that have shapes alone."""
    platform = ShapesOnlyPlatform()
    setup = RankSetup.choose(config, platform, lambda _: absent_ranks(config))
    with torch.inference_mode():
        model = setup.build_model(setup.expert_ranks())
        load_dummy(model, config.seed, platform.device)
        groups, state = kv_groups(setup.model, config), state_group(setup.model, config)
        factory = setup.runner_factory(model, groups, state, no_tick, StepMasking(MaskQueue()))
        runner = factory.make(allocate(groups, 1, kv_dtype(config), platform.device, state, model.layers))
    assert isinstance(runner, DeviceRunner), "devices with a queue have no other"
    return runner


def _mark(config: WorkerConfig, target: GpuKind) -> Path:
    """Returns a file beside the compiled kernels, which is there when those of this rank are, and code and model are the same."""
    from triton import __version__, knobs

    of = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        of.update(path.read_bytes())
    settings = replace(config, first_rank=0, rendezvous=None, counters="", seed=0, num_threads=1)
    of.update(msgspec.json.encode((settings, target)))
    of.update(repr(load_model_config(Path(config.model_path))).encode())
    return Path(knobs.cache.dir) / f"starling-{of.hexdigest()[:32]}"


def compilers(cpus: int, memory: int, local_ranks: int) -> int:
    """Returns how many processes compile for one of a node's ranks: what all of them take leaves half of the memory to weights."""
    return max(1, min(MOST_COMPILERS, cpus, memory // 2 // COMPILER_BYTES) // max(1, local_ranks))


def main() -> None:
    die_with_parent()
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    config = work.config
    pretend(work.target)
    variants = variants_of(config)
    processes = compilers(cpu_limit(), CpuPlatform().available_memory(), config.local_ranks)
    local = (config.first_rank + config.rank) % max(1, config.local_ranks)
    # Ranks of a node compile the same, each beginning elsewhere.
    count = compile_variants(variants, processes, local * processes)
    print(f"{count} by {processes} processes", file=sys.stderr)


if __name__ == "__main__":
    main()
