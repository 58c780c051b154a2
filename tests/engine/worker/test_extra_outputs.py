"""Extra outputs of some rows cost the others nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.models.decoder import Decoder
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.sleep import MemoryCommand, MemoryReply, ReleaseMemory, RestoreMemory
from starling_engine.step import StepPlan
from starling_engine.worker.device.device_adjuster import DeviceAdjuster
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.device.extra_outputs import ExtraOutputs
from starling_engine.worker.device.graphs import Graphs

from tests.engine.checkpoints import VARIANTS, make_reference
from tests.engine.cores import core_for
from tests.engine.late_device import use_late_device
from tests.engine.mixed_requests import KINDS, answers

pytestmark = pytest.mark.timeout(60)
TOKENS = 24
PLAIN: dict[str, Any] = {}
NOT_FINITE = "the model gave no finite logit to choose from"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model; workers run it on a late device that records steps."""
    make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr, recorded=True)
    return tmp_path


def of_kinds(kinds: list[dict[str, Any]]) -> list[EngineRequest]:
    settings = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    return [
        EngineRequest(id=str(n), prompt_ids=[5, n, 9, 5], params=SamplingParams(**{**settings, **kind}), seed=n)
        for n, kind in enumerate(kinds)
    ]


def spy(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, note: Callable[..., object]) -> list[Any]:
    """Returns a list that gets `note` of the arguments of each call from now on."""
    noted: list[Any] = []
    real = getattr(owner, name)

    def call(*args: Any) -> Any:
        noted.append(note(*args))
        return real(*args)

    monkeypatch.setattr(owner, name, call)
    return noted


def test_a_step_is_replayed_with_any_extra_outputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose prompts are read prevent it only while the prompts are computed."""
    with core_for(folder) as core:
        plans = spy(monkeypatch, DeviceRunner, "launch", lambda _, plan: plan)
        decodes = spy(monkeypatch, Graphs, "run", lambda _, shape, __: shape.width == 1)
        found = answers(core, of_kinds(KINDS))
    assert all(answer["end"] in {("length", None), ("stop", None)} for answer in found.values())
    alone = [plan for plan in plans if isinstance(plan, StepPlan) and all(plan.sample) and set(plan.num_tokens) == {1}]
    assert len(alone) > TOKENS - 3 and len(alone) == sum(decodes)


def test_only_rows_with_adjusted_logits_are_sampled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adjusted = spy(monkeypatch, DeviceAdjuster, "adjust", lambda _, __, at, *___: len(at))
    memory = spy(monkeypatch, DeviceAdjuster, "_words_of_all", lambda _: None)
    scored = spy(monkeypatch, ExtraOutputs, "_score", lambda _, samples, *__: len(samples))
    with core_for(folder) as core:
        most = core.scheduler.config.max_num_samples
        assert adjusted == scored == [most] and memory, "measured, so that the KV cache leaves room for it"
        adjusted.clear()
        memory.clear()
        scored.clear()
        answers(core, of_kinds([PLAIN, {"temperature": 1.0}]))
        assert not adjusted and not memory and not scored
        answers(core, of_kinds([PLAIN, {"presence_penalty": 1.0}, PLAIN, {"logprobs": 2}, {"min_tokens": 3}]))
    assert set(adjusted) <= {1, 2} and 2 * TOKENS <= sum(adjusted) <= 2 * (TOKENS + 1), "one more before the end is known"
    assert set(scored) == {1} and TOKENS <= sum(scored) <= TOKENS + 1


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_a_row_without_finite_logits_ends_its_request(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel skips such logits, and adjustments do not hide them."""
    make_reference(tmp_path, VARIANTS["llama3.1"])
    if late:
        use_late_device(monkeypatch.setattr)
    logits = Decoder.logits

    def broken(self: Decoder, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found = logits(self, hidden, out)
        found[:, 77] = torch.nan
        return found

    with core_for(tmp_path) as core:
        monkeypatch.setattr(Decoder, "logits", broken)
        found = answers(core, of_kinds([PLAIN, {"temperature": 0.8, "top_p": 0.9}, {"presence_penalty": 1.0, "logprobs": 1}]))
    assert [(answer["tokens"], answer["end"]) for answer in found.values()] == 3 * [([], ("error", NOT_FINITE))]


def test_a_device_that_slept_has_no_request_left(folder: Path) -> None:
    with core_for(folder, prefix_caching=False) as core:

        def carry_out(order: MemoryCommand) -> None:
            core.executor.send(order)
            while not (replies := core.executor.replies(0.1)):
                core.executor.check()
            assert replies == [MemoryReply()]

        requests = of_kinds([*KINDS[:2], *KINDS[4:7]])
        before = answers(core, requests)
        carry_out(ReleaseMemory(1))
        carry_out(RestoreMemory(["weights", "kv_cache"]))
        assert answers(core, requests) == before
