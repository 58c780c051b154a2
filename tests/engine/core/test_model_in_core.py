"""The whole engine core over real architectures, against transformers: KV groups of different windows in one pool, preemption,
chunks, prefix hits, and faults of a step.
"""

from typing import Any

import pytest
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest

from tests.engine.checkpoints import STEPS, VARIANTS, VOCAB, Reference, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run


@pytest.fixture(
    scope="module",
    params=["qwen3-mixed", "ministral-mixed", "mistral-window", "llama3.1", "qwen3-moe", "deepseek-v3"],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS[request.param])


def test_many_at_once_under_pressure(reference: Reference) -> None:
    """The same request six times in a pool that holds about two, with chunks, hits and preemptions."""
    with core_for(reference.folder, kv_blocks=34, budget=24) as core:
        results = run(core, [greedy(str(i), reference.prompt, cache_salt=str(i % 3)) for i in range(6)])
        if not any(group.spec.window for group in core.scheduler.kv.groups):  # windows give their blocks back in time
            assert core.scheduler.stats.preemptions_total > 0
        for tokens, error in results.values():
            assert error is None
            assert_greedy(tokens, reference)
        again = run(core, [greedy("again", reference.prompt, cache_salt="0")])
        assert_greedy(again["again"][0], reference)
        assert core.scheduler.stats.prefix_hits_total > 0


def test_a_fork_copies_what_it_writes(reference: Reference) -> None:
    """The prompt's last block is shared by two that go on differently."""
    with core_for(reference.folder) as core:
        sampled = SamplingParams(temperature=1.0, max_tokens=STEPS, ignore_eos=True)
        alone = run(core, [EngineRequest(id="alone", prompt_ids=reference.prompt, params=sampled, seed=5)])
        fork = EngineRequest(id="fork", prompt_ids=reference.prompt, params=sampled, seed=5, fork_of="parent")
        results = run(core, [greedy("parent", reference.prompt, cache_salt="new"), fork])
        assert results["fork"] == alone["alone"]
        assert results["fork"][0] != results["parent"][0]
        assert_greedy(results["parent"][0], reference)


@pytest.mark.parametrize("temperature", [1e-37, 1e-45])
def test_next_to_no_temperature_is_greedy(reference: Reference, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=STEPS, ignore_eos=True)
    with core_for(reference.folder) as core:
        tokens, error = run(core, [EngineRequest(id="cold", prompt_ids=reference.prompt, params=params, seed=1)])["cold"]
    assert error is None
    assert_greedy(tokens, reference)


def test_a_resume_record_continues_where_another_core_stopped(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        record = greedy("resumed", reference.prompt, output_ids=reference.tokens[:20])
        tokens, _ = run(core, [record])["resumed"]
        assert len(tokens) == STEPS - 20
        assert_greedy(reference.tokens[:20] + tokens, reference)


def test_a_fault_is_pinned_on_its_request(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises is run again request by request; only the one that raises alone ends."""
    from starling_engine.worker.host.batch import InputBatch

    real = InputBatch.inputs

    def inputs(self: InputBatch, plan: Any) -> Any:
        if any(self.tokens[slot, 0] == VOCAB - 1 for slot in plan.slots):
            raise RuntimeError("no such thing")
        return real(self, plan)

    monkeypatch.setattr(InputBatch, "inputs", inputs)
    with core_for(reference.folder) as core:
        results = run(core, [greedy("good", reference.prompt), greedy("bad", [VOCAB - 1, 3, 4]), greedy("fine", reference.prompt)])
        assert "no such thing" in (results["bad"][1] or "")
        assert_greedy(results["good"][0], reference)
        assert_greedy(results["fine"][0], reference)
