"""A worker without a core, whose rows have masks; and checks that hold wherever it computes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from starling_engine.params import SamplingParams
from starling_engine.step import FOLLOWS, NewRequest, StepMasks, StepPlan, StepResult
from starling_engine.token_packing import pack_tokens, unpack_tokens
from starling_engine.worker.host.sampler import NO_TOKEN
from starling_engine.worker.masks import MaskQueue
from starling_engine.worker.worker import Worker

from tests.engine.bitmasks import words_of
from tests.engine.checkpoints import PROMPT, VOCAB, Reference
from tests.engine.workers import plain_worker

BLOCKS = 8
"""Blocks of each slot: room for 128 tokens."""
Allowed = Sequence[int]
ALL = range(VOCAB)
GREEDY = SamplingParams(temperature=0.0)


class MaskedWorker:
    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._masks = MaskQueue()
        sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_speculative_tokens": 3}
        config = plain_worker(model_path=str(folder), device=device, kv_cache_memory_bytes=4 << 20, **sizes)
        self._worker = Worker(config, lambda: None, lambda _: None, masks=self._masks)
        self._worker.prepare()
        self._step = 0
        self._taken: list[int] = []
        """Slots of the last prompts."""

    def prefill(self, prompt: list[int], params: Sequence[SamplingParams], masks: dict[int, Allowed]) -> StepResult:
        """A step with the same prompt in each slot, for other requests than before. `masks` has the allowed tokens, by row."""
        slots = list(range(len(params)))
        new = [
            NewRequest(slot, pack_tokens(prompt), len(prompt), [list(blocks_of(slot))], slot, sampling, None)
            for slot, sampling in enumerate(params)
        ]
        plan = StepPlan(
            self._next(),
            0,
            slots,
            [0] * len(slots),
            [len(prompt)] * len(slots),
            [True] * len(slots),
            new,
            freed_slots=self._taken,
            masked=sorted(masks),
        )
        self._taken = slots
        return self._run(plan, {row: [allowed] for row, allowed in masks.items()})

    def decode(
        self, slots: list[int], masks: dict[int, list[Allowed]], drafts: Sequence[int] = (), masked: list[int] | None = None
    ) -> StepResult:
        """A step of one token in each of these slots; the first has drafts. `masked` are all rows that have to have a mask."""
        counts = [1 + len(drafts), *(1 for _ in slots[1:])]
        plan = StepPlan(
            self._next(),
            0,
            slots,
            [FOLLOWS] * len(slots),
            counts,
            [True] * len(slots),
            num_drafts=[count - 1 for count in counts] if drafts else [],
            drafts=pack_tokens(list(drafts)),
            masked=sorted(masks) if masked is None else masked,
        )
        return self._run(plan, masks)

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _run(self, plan: StepPlan, masks: dict[int, list[Allowed]]) -> StepResult:
        if masks:
            every = [torch.isin(torch.arange(VOCAB), torch.tensor(allowed).long()) for row in masks.values() for allowed in row]
            bits = words_of(torch.stack(every)).numpy().tobytes()
            self._masks.put(StepMasks(plan.step_id, list(masks), bits))
        return self._worker.launch(plan).finish()


def blocks_of(slot: int) -> range:
    return range(1 + BLOCKS * slot, 1 + BLOCKS * (slot + 1))


def tokens_of(result: StepResult) -> list[list[int]]:
    """The tokens of each row."""
    tokens = unpack_tokens(result.tokens).tolist()
    ends = [sum(result.counts[: row + 1]) for row in range(len(result.counts))]
    return [tokens[end - count : end] for end, count in zip(ends, result.counts, strict=True)]


def errors_of(result: StepResult) -> dict[int, str]:
    return {row: extras.error for row, extras in result.extras.items() if extras.error is not None}


def check_impossible_rows(worker: MaskedWorker, reference: Reference) -> None:
    """Rows without a token that is possible end with an error, sampled in whatever way; the others are as without them."""
    sampled, filtered = SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    params = [
        GREEDY,
        sampled,
        GREEDY,
        filtered,
        SamplingParams(temperature=0.0, banned_token_ids=[7]),
        SamplingParams(temperature=0.9, min_tokens=2, stop_token_ids=[5], logprobs=1),
        SamplingParams(temperature=0.7, top_p=0.8, allowed_token_ids=[3], presence_penalty=1.0),
        filtered,
    ]
    free = tokens_of(worker.prefill(reference.prompt, params, {}))
    masks: dict[int, Allowed] = {2: [7], 3: [], 4: [7], 5: [5], 6: [4, 8], 7: [9, 500]}
    result = worker.prefill(reference.prompt, params, masks)
    assert errors_of(result) == dict.fromkeys((3, 4, 5, 6), NO_TOKEN)
    assert result.counts == [1, 1, 1, 0, 0, 0, 0, 1] and not result.extras[5].logprobs
    tokens = tokens_of(result)
    assert tokens[:3] == [[reference.tokens[0]], free[1], [7]] and tokens[7][0] in masks[7]
    result = worker.decode([0, 2, 7], {1: [[]]})
    assert errors_of(result) == {1: NO_TOKEN} and result.counts == [1, 0, 1]
    assert tokens_of(result)[0] == [reference.tokens[1]]


def check_logprobs(worker: MaskedWorker, reference: Reference) -> None:
    """Log probabilities are the model's own: before the mask, as before penalties and bans."""
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.8, logprobs=2, banned_token_ids=[9], repetition_penalty=1.5),
    ]
    result = worker.prefill(reference.prompt, params, {0: [7], 1: [8, 9]})
    logprobs = reference.logits[PROMPT - 1].log_softmax(-1)
    likeliest = logprobs.topk(2).indices.tolist()
    for row, token in enumerate((7, 8)):
        (found,) = result.extras[row].logprobs or ()
        assert found.token_ids == [token, *likeliest]
        assert found.logprobs == pytest.approx(logprobs[found.token_ids].tolist(), abs=1e-4)
        assert found.rank == 1 + int((logprobs > logprobs[token]).sum())


def check_drafts(worker: MaskedWorker, reference: Reference) -> None:
    """Masks behind a draft that is not accepted forbid nothing; behind one that is, a row without a token ends."""
    _, second, third = reference.tokens[:3]
    worker.prefill(reference.prompt, [GREEDY, GREEDY], {})
    wrong = (second + 1) % VOCAB
    result = worker.decode([0, 1], {0: [ALL, [], []], 1: [[second]]}, drafts=[wrong, 0])
    assert not errors_of(result) and tokens_of(result) == [[second], [second]]
    result = worker.decode([0, 1], {0: [[third], [], []]}, drafts=[third, 0])
    assert errors_of(result) == {0: NO_TOKEN} and tokens_of(result) == [[], [third]]
