"""The runner for a device with a queue of its own gives what the one on the host gives, whatever is in a step.

The queue here does all at once but tells so late, so that steps are launched before the host knows the tokens of the one before.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.core.engine_core import EngineCore
from starling_engine.kernels.runs import INTERPRETED
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.models.decoder import Decoder
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.queue import DeviceQueue, Mark
from starling_engine.request import EngineRequest
from starling_engine.worker import worker
from starling_engine.worker.batch import InputBatch
from starling_engine.worker.device_runner import DeviceRunner
from starling_engine.worker.graphs import Graphs, decode_sizes, mixed_sizes
from starling_engine.worker.step_buffer import Shape
from starling_engine.worker.step_writer import StepWriter

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run
from tests.engine.running import running

pytestmark = pytest.mark.timeout(100)
LAG = 0.002


class Late:
    def wait(self) -> None:
        time.sleep(LAG)


class LateQueue(InlineQueue):
    def mark(self) -> Mark:
        return Late()


class LatePlatform(CpuPlatform):
    async_scheduling = True
    queue: DeviceQueue | None = LateQueue()


@pytest.fixture(params=[True, False], ids=["recorded", "eager"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, workers are made for such a device. Its recordings run the work again, and so may ask the host."""

    def take() -> None:
        monkeypatch.setattr(worker, "select_platform", lambda *_: LatePlatform())
        if request.param:
            monkeypatch.setattr(Decoder, "asks_host", None)

    return take


@pytest.mark.parametrize("name", ["llama3.1", "qwen3-mixed", "qwen3-moe", "deepseek-v3"])
def test_greedy_tokens_equal_the_reference(name: str, device: Callable[[], None], tmp_path: Path) -> None:
    reference = make_reference(tmp_path, VARIANTS[name])
    device()
    with core_for(tmp_path, budget=24) as core:
        assert core.depth == 2
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(3)])
    for tokens, error in answers.values():
        assert error is None
        assert_greedy(tokens, reference)


def test_every_kind_of_request_is_answered_as_on_the_host(device: Callable[[], None], tmp_path: Path) -> None:
    """Random traffic in a cache that is too small for it: some are preempted, chunks of prompts run beside decodes."""
    make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    requests = [request(random.Random(number), number) for number in range(14)]
    with core_for(tmp_path, kv_blocks=30, budget=24) as core:
        expected = answers(core, requests)
    device()
    with core_for(tmp_path, kv_blocks=30, budget=24) as core:
        got = answers(core, requests)
        preempted = core.scheduler.stats.preemptions_total
    assert preempted > 0, "or this shows less than it says"
    assert got.keys() == expected.keys()
    for name, answer in got.items():
        assert answer.pop("numbers") == pytest.approx(expected[name].pop("numbers"), abs=1e-4), name
        assert answer == expected[name], name


def request(rng: random.Random, number: int) -> EngineRequest:
    prompt = rng.choices(range(512), k=rng.randint(1, 40))
    name, seed = f"r{number}", number
    if number % 7 == 3:
        pooling = PoolingParams(pooling=rng.choice(("last", "mean", "cls")))
        return EngineRequest(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=1), pooling=pooling)
    changes: dict[str, Any] = {}
    match number % 5:
        case 0:
            changes = {"logprobs": 3, "prompt_logprobs": 2}
        case 1:
            changes = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 1}
        case 2:
            changes = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
        case 3:
            changes = {"temperature": 1.5}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": rng.randint(30, 64), "ignore_eos": True, **changes})
    return EngineRequest(id=name, prompt_ids=prompt, params=params, seed=seed)


def answers(core: EngineCore, requests: list[EngineRequest]) -> dict[str, dict[str, Any]]:
    """All that each request was told; its floats apart."""
    found: dict[str, dict[str, Any]] = {r.id: {"tokens": [], "logprob_ids": [], "numbers": [], "end": None} for r in requests}
    for one in requests:
        assert core.add(one) is None
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline
        for delta in core.step():
            answer = found[delta.id]
            answer["tokens"] += delta.tokens
            for row in [*(delta.logprobs or []), *(delta.prompt_logprobs or [])]:
                answer["logprob_ids"].append(row.token_ids)
                answer["numbers"] += row.logprobs
            answer["numbers"] += delta.pooled or []
            answer["end"] = (delta.finish_reason, delta.error)
    core.scheduler.check_integrity()
    return found


def test_a_step_is_filled_up_to_the_next_size() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert decode_sizes(256)[-3:] == [224, 240, 256]
    assert mixed_sizes(100) == [32, 64]
    graphs = Graphs(InlineQueue(), 16, 100)
    assert graphs.decode(3) == (4, 4, True) and graphs.decode(16) == (16, 16, True) and graphs.decode(17) is None
    assert graphs.mixed(33, 16) == (64, 17, False)
    assert graphs.mixed(65, 2) is None and graphs.mixed(10, 17) is None


def test_padding_fits_tables_of_the_longest_sequence() -> None:
    """Prompts of at most that length, one behind the other, whatever else is in the step."""
    groups = [KVGroup(KVSpec(8, 1, 16, 4), (0,))]
    batch = InputBatch(groups, max_num_seqs=4, max_model_len=24, block_size=8)
    fields = StepWriter(batch, InlineQueue(), torch.device("cpu"), max_tokens=64).padding(Shape(64, 3))
    assert fields.query_start.tolist() == [0, 24, 48, 64] and fields.context_lens.tolist() == [24, 24, 16]
    assert fields.positions.tolist() == [*range(24), *range(24), *range(16)]
    assert set(fields.slots.tolist()) == {4} and set(fields.targets.flatten().tolist()) == {-1}


def test_a_size_that_cannot_be_recorded_runs_as_it_comes() -> None:
    ran: list[str] = []

    class Refuses(InlineQueue):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            work()
            raise torch.OutOfMemoryError("no memory for another recording")

    graphs = Graphs(Refuses(), 4, 4)
    shape = graphs.decode(2)
    assert shape is not None
    for _ in range(2):
        graphs.run(shape, lambda: ran.append("work"))
    assert len(ran) == 3, "tried once"


def test_a_size_is_recorded_once_and_again_after_memory_has_moved() -> None:
    ran: list[str] = []

    class Recorder(InlineQueue):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
            ran.append("record")
            return lambda: ran.append("replay")

    graphs = Graphs(Recorder(), 4, 4)
    shape = graphs.decode(2)
    assert shape is not None
    for _ in range(3):
        graphs.run(shape, lambda: ran.append("work"))
    assert ran == ["work", "record", "replay", "replay"]
    graphs.forget()
    graphs.run(shape, lambda: ran.append("work"))
    assert ran[4:] == ["work", "record"]


def test_a_fault_of_the_device_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later step could run on it: whoever supervises starts anew."""
    from starling_engine.errors import RankLost

    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    monkeypatch.setattr(worker, "select_platform", lambda *_: LatePlatform())

    class Broken:
        def wait(self) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with core_for(tmp_path) as core:
        run(core, [greedy("before", reference.prompt)])
        monkeypatch.setattr(LateQueue, "mark", lambda _: Broken())
        core.add(greedy("after", reference.prompt))
        with pytest.raises(RankLost, match="illegal memory access"):
            for _ in range(100):
                core.step()
                core.executor.check()


def test_the_runner_is_the_one_for_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lest the tests above compare the host with itself."""
    make_reference(tmp_path, VARIANTS["llama3.1"])
    monkeypatch.setattr(worker, "select_platform", lambda *_: LatePlatform())
    launched: list[object] = []
    launch = DeviceRunner.launch
    monkeypatch.setattr(DeviceRunner, "launch", lambda self, plan: launched.append(plan) or launch(self, plan))
    with core_for(tmp_path) as core:
        run(core, [greedy("one", [1, 2, 3])])
    assert len(launched) > 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; the tests of the kernels run on the GPU")
async def test_the_engine_runs_on_tritons_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU does but its graphs: the interpreter in the place of the GPU, as an argument of the engine."""
    monkeypatch.setenv(INTERPRETED, "1")
    reference = make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with running(model=str(tmp_path), device="interpreter", max_num_seqs=2, max_num_batched_tokens=32) as engine:
        output = await engine.complete(reference.prompt, params)
    assert list(output.outputs[0].token_ids) == reference.tokens[:4]
