"""What the engine says on a GPU: the same as transformers, or as the host, whatever is asked for and wherever weights and cache
were meanwhile.
"""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from starling_engine.config import SpeculativeConfig, TiersConfig
from starling_engine.kernels.ahead import LateKernels
from starling_engine.platforms.cuda import CudaQueue
from starling_engine.sleep import Slept
from starling_engine.step import StepPlan
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.device.graphs import Graphs
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.pending_step import PendingStep

from tests.engine.checkpoints import VARIANTS, make_reference, write_checkpoint
from tests.engine.core.test_drafts import Replay
from tests.engine.core.test_sleep import SleepDriver, ask_again
from tests.engine.cores import assert_greedy, core_for, greedy, run
from tests.engine.kv_offload.test_model import MIB, core_with, serve
from tests.engine.mixed_requests import assert_same, random_traffic
from tests.engine.models.test_rounded_caches import assert_alike
from tests.engine.rounding_caches import SCALES, cache_reference

DEVICE = "cuda"
EAGER = "steps are not recorded: enforce_eager"

pytestmark = [
    # Kernels are compiled in it, by all processes at once.
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.fixture(autouse=True)
def _recorded(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks the log: a step that could not be recorded is launched kernel by kernel, with the same results."""
    caplog.set_level("INFO", "starling.worker")
    yield
    said = {record.getMessage() for record in caplog.get_records("call")}
    assert {message for message in said if "not be recorded" in message or "not recorded" in message} <= {EAGER}


@pytest.fixture(autouse=True)
def _all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that compiles or loads a kernel fails. Another engine that gets ready in this process may."""
    serving, launch = threading.local(), DeviceRunner.launch

    def launched(runner: DeviceRunner, plan: StepPlan) -> PendingStep:
        serving.now = runner._late is not None
        try:
            return launch(runner, plan)
        finally:
            serving.now = False

    def refuse(_: LateKernels, *, repr: str, **__: object) -> None:
        assert not getattr(serving, "now", False), f"compiled while serving: {repr}"

    monkeypatch.setattr(DeviceRunner, "launch", launched)
    monkeypatch.setattr(LateKernels, "_note", refuse)


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("name", ["llama3.1", "qwen3-mixed", "qwen3-moe", "deepseek-v3"])
def test_greedy_tokens_equal_the_reference(name: str, eager: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = make_reference(tmp_path, VARIANTS[name])
    with core_for(tmp_path, device=DEVICE, enforce_eager=eager) as core:
        assert core.depth == 2, "steps are queued ahead"
        results = run(core, [greedy(str(n), reference.prompt) for n in range(3)])
    for tokens, error in results.values():
        assert error is None
        assert_greedy(tokens, reference)
    assert (EAGER in caplog.messages) == eager


def test_every_kind_of_request_is_answered_as_on_the_host(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-mixed"])
    assert_same(random_traffic(tmp_path, device=DEVICE), random_traffic(tmp_path))


def test_drafts_change_no_token(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-mixed"])
    expected = random_traffic(tmp_path, device=DEVICE)
    drafter = Replay(expected, random.Random(0))
    assert_same(random_traffic(tmp_path, drafter, device=DEVICE, speculative=SpeculativeConfig()), expected)
    assert drafter.drafted > 100


@pytest.mark.parametrize("name", ["llama3.1", "qwen3-moe"])
def test_answers_are_the_same_after_sleep(name: str, tmp_path: Path) -> None:
    """With weights that were in the host's memory, and with others read again; steps are recorded again."""
    reference = make_reference(tmp_path, VARIANTS[name])
    with core_for(tmp_path, device=DEVICE) as core:
        driver = SleepDriver(core)
        ask_again(core, reference, "before")
        for level in (1, 2, 1):
            assert driver.sleep(level) == Slept() and driver.wake() == Slept()
            ask_again(core, reference, f"after {level}")
        assert core.scheduler.stats.prefix_hits_total == 0, "the cache was dropped"


def test_a_cache_in_fp8_answers_as_the_reference_that_rounds(tmp_path: Path) -> None:
    reference, _ = cache_reference(tmp_path, "llama3.1", SCALES)
    with core_for(tmp_path, device=DEVICE, kv_cache="fp8") as core:
        results = run(core, [greedy(str(n), reference.prompt) for n in range(2)])
    for tokens, error in results.values():
        assert error is None
        assert_alike(tokens, reference)


def test_what_comes_back_from_the_cpu_tier_is_what_was_computed(tmp_path: Path) -> None:
    """In a cache that is too small: what is preempted goes there too."""
    write_checkpoint(tmp_path, VARIANTS["qwen3-mixed"])
    with core_with(tmp_path, None) as core:
        expected = serve(core)
    with core_with(tmp_path, TiersConfig(cpu_bytes=4 * MIB), kv_blocks=80, preempt="swap", device=DEVICE) as core:
        for _ in range(3):
            assert serve(core) == expected
            core.scheduler.kv.pool.evict_free_blocks()
        cpu = core.scheduler.snapshot().tiers["cpu"]
        assert cpu.hits_total and cpu.stored_bytes_total and cpu.loaded_bytes_total


def test_a_recording_that_a_call_has_ended_is_made_again() -> None:
    queue, shape = CudaQueue(torch.device(DEVICE, 0)), StepShape(1, 1, 1, width=1)
    graphs, total, calls = Graphs(queue, 1, 1, 1, 0), torch.zeros(1, device=DEVICE), iter(range(9))

    def work() -> None:
        total.add_(1)
        if next(calls) == 1:  # the first try to record it
            torch.cuda.synchronize()

    graphs.run(shape, work)
    graphs.run(shape, work)
    assert (graphs.not_recorded, total.item()) == (0, 2)
