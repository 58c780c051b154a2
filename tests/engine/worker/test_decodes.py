"""Steps of few decodes, which the host runs by native calls: the same inputs, tokens and errors as those of any other step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starling_engine import LLM, SamplingParams, native
from starling_engine.native import ops, reference
from starling_engine.params import PoolingParams
from starling_engine.step import FOLLOWS, BlockAppend, NewRequest, StepPlan, StepResult
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.host.decodes import Decodes
from starling_engine.worker.host.recorded_steps import RecordedSteps
from starling_engine.worker.host.sampler import Sampler

from tests.engine.checkpoints import FAMILIES, make_reference
from tests.engine.instruction_sets import multiplies_by_tiles
from tests.engine.real_engine import MODEL

pytestmark = pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")

BLOCK, LONGEST, VOCAB, STATE_BLOCKS, SLOTS = 8, 96, 1200, 3, 6
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def make_batch() -> InputBatch:
    """Makes a batch of two KV groups and a recurrent state, with a sequence of 15, 16, 17 ... tokens in each slot."""
    anything: Any = None
    state: Any = SimpleNamespace(num_blocks=STATE_BLOCKS)
    batch = InputBatch([anything, anything], SLOTS, LONGEST, BLOCK, state=state)
    random = np.random.default_rng(1)
    new = []
    for slot in range(SLOTS):
        count = 15 + slot
        blocks = [random.integers(1, 500, blocks).tolist() for blocks in (2, 2, STATE_BLOCKS)]
        ids = pack_tokens(random.integers(0, VOCAB, count).tolist())
        new.append(NewRequest(slot, ids, count, blocks, 100 + slot, PARAMS[slot % len(PARAMS)], None))
    batch.apply(StepPlan(0, 0, [], [], [], [], new))
    return batch


def plan_of(slots: list[int], starts: list[int], **settings: Any) -> StepPlan:
    rows = len(slots)
    appends = [BlockAppend(slot, group, [501 + slot]) for slot in range(SLOTS) for group in (0, 1)]
    return StepPlan(1, 0, slots, starts, [1] * rows, [True] * rows, appends=appends, **settings)


def run_both(plan: StepPlan, logits: torch.Tensor) -> tuple[StepResult, StepResult]:
    """Runs a step both ways, on two batches; checks that the model's inputs are the same, and what the batches are afterwards."""
    nothing: Any = None
    one, other = make_batch(), make_batch()
    recorded = RecordedSteps(nothing, nothing, [table.shape[1] for table in one.tables], 0)

    def replay(_: int, rows: int, around: Any) -> Any:
        around.before(rows)
        return SimpleNamespace(sampled=around.after(logits.clone()[:rows]).numpy())

    recorded.replay = replay  # type: ignore[method-assign, assignment]
    results = StepResult(1, 0), StepResult(1, 0, [0] * len(plan.slots))
    decodes = Decodes(one, recorded)
    one.apply(plan)
    assert decodes.takes(plan)
    assert decodes.run(plan, results[0])

    other.apply(plan)
    step = other.gather(plan)
    expected = other.inputs(step)
    rows = len(plan.slots)
    assert torch.equal(recorded.inputs.ids[:rows], expected.ids)
    for group, (got, wanted) in enumerate(zip(recorded.inputs.metadata, expected.metadata, strict=True)):
        assert torch.equal(got.positions[:rows], wanted.positions)
        assert torch.equal(got.query_start[: rows + 1], wanted.query_start)
        assert torch.equal(got.context_lens[:rows], wanted.context_lens)
        if group < 2:  # where a state is kept, nobody reads it
            assert torch.equal(got.slot_mapping[:rows], wanted.slot_mapping)
        for row, length in enumerate(wanted.context_lens.tolist()):
            used = STATE_BLOCKS if group == 2 else -(-length // BLOCK)
            assert torch.equal(got.block_tables[row, :used], wanted.block_tables[row, :used])
    samples = step.samples(other.sampling_rows(plan))
    Sampler(ops.sample, reference.apply_token_bitmask).sample(logits.clone(), other, samples, None, results[1])
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.lengths, other.lengths)
    return results


@pytest.mark.parametrize("slots", [[3], [0, 1, 2, 3, 4, 5], [4, 1]])
@pytest.mark.parametrize("follow", [True, False])
def test_inputs_and_tokens_are_those_of_any_step(slots: list[int], follow: bool) -> None:
    starts = [FOLLOWS if follow else 14 + slot for slot in slots]
    one, other = run_both(plan_of(slots, starts), 4 * torch.randn(len(slots), VOCAB))
    assert one == other and one.counts == [1] * len(slots)


def test_rows_without_a_finite_logit_end_with_the_same_errors() -> None:
    logits = torch.randn(4, VOCAB)
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    one, other = run_both(plan_of([0, 1, 2, 3], [FOLLOWS] * 4), logits)
    assert one == other and one.counts == [1, 0, 0, 1] and set(one.extras) == {1, 2}


def test_what_asks_for_more_than_tokens_is_left_to_others() -> None:
    nothing: Any = None
    batch = make_batch()
    recorded = RecordedSteps(nothing, nothing, [table.shape[1] for table in batch.tables], 0)
    decodes = Decodes(batch, recorded)
    assert decodes.takes(plan_of([0, 1], [FOLLOWS] * 2))
    assert not decodes.takes(plan_of([0, 1], [FOLLOWS] * 2, masked=[1]))
    assert not decodes.takes(plan_of([0, 1], [FOLLOWS] * 2, num_drafts=[0, 0]))
    assert not decodes.takes(StepPlan(1, 0, [0, 1], [3, 4], [1, 1], [True, False]))
    assert not decodes.takes(StepPlan(1, 0, [0, 1], [3, 4], [1, 2], [True, True]))
    for slot, (sampling, pooling) in enumerate([(SamplingParams(logprobs=1), None), (None, PoolingParams())]):
        new = NewRequest(slot, pack_tokens([1, 2]), 2, [[1], [1], [1, 2, 3]], 0, sampling, pooling)
        batch.apply(StepPlan(2, 0, [], [], [], [], [new]))
        assert not decodes.takes(plan_of([slot, 5], [FOLLOWS] * 2)) and decodes.takes(plan_of([4, 5], [FOLLOWS] * 2))
    recorded.possible = False
    assert not decodes.takes(plan_of([4, 5], [FOLLOWS] * 2))


@pytest.mark.parametrize(
    "variant", [None, "qwen3.5", "gpt2"], ids=["the repository's model", "a hybrid", "one whose embeddings torch adds to"]
)
def test_an_engine_answers_the_same_by_them(variant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, some of which want more: steps of both kinds follow one another."""
    if multiplies_by_tiles():
        monkeypatch.setenv("STARLING_CPU_ISA", "avx512_bf16")  # what a row gets then depends on how many are in its step
    if variant is not None:
        changes = {**FAMILIES[variant].changes, "vocab_size": 4096}  # the tokenizer's
        make_reference(tmp_path, replace(FAMILIES[variant], changes=changes))
    prompts = [{"prompt_token_ids": [(3 + 7 * i * (n + 1)) % 200 for i in range(5 + n)]} for n in range(8)]
    params = [
        SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=12 + n, presence_penalty=float(n == 5), ignore_eos=True)
        for n in range(8)
    ]
    answers = []
    for eager in (False, True):
        settings = {
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": 32 << 20,
            "max_model_len": 256,
            "tokenizer": MODEL,
        }
        with LLM(MODEL if variant is None else str(tmp_path), enforce_eager=eager, **settings) as llm:
            outputs = [llm.generate(prompts[:n], params[:n], use_tqdm=False) for n in (1, 8)]
        answers.append([each.outputs[0].token_ids for some in outputs for each in some])
    assert answers[0] == answers[1]
