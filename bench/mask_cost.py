"""Measures what grammars cost at batch 32 with a vocabulary of 151,936: applying masks alone, and each part of whole steps.

    python bench/mask_cost.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Steps with masks and without take turns. Masks are filled and tokens taken as a core does it, but one after the other with the
step, though a core fills them while the step runs. The vocabulary is made of the repository's own text.
"""

import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llguidance
import torch
from native_kernels import Clock
from shared import machine, model_asked_for
from starling_engine.config import WorkerConfig
from starling_engine.constraint import MaskRow
from starling_engine.native import ops, reference
from starling_engine.params import SamplingParams
from starling_engine.step import FOLLOWS, NewRequest, StepMasks, StepPlan
from starling_engine.structured_output import json_grammar
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.token_packing import pack_tokens, unpack_tokens
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.masks import MaskQueue, StepMasking
from starling_engine.worker.worker import Worker

REPOSITORY = Path(__file__).parents[1]
ROWS, VOCAB = 32, 151_936
WORDS = -(-VOCAB // 32)
PROMPT, BLOCKS, BLOCK_SIZE = 32, 32, 16
PAIRS, WARM = 60, 10
THREADS = os.cpu_count() or 1
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["attention", "matrix", "norm", "sampling"]},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "seconds": {"type": "number"},
        },
        "required": ["name", "kind", "sizes", "seconds"],
        "additionalProperties": False,
    },
}


class Vocabulary:
    """All bytes, the commonest parts of words, and an end: a trie like that of a trained tokenizer."""

    bos_token_id = None
    eos_token_id = VOCAB - 1
    special_token_ids = (VOCAB - 1,)

    def __init__(self) -> None:
        files = sorted(path for kind in ("*.py", "*.md", "*.cpp") for path in REPOSITORY.glob(f"[a-z]*/**/{kind}"))
        words = Counter(re.findall(r" ?\w+| ?[^\w\s]+|\s+", "".join(path.read_text() for path in files)))
        parts: Counter[bytes] = Counter()
        for word, count in words.items():
            for part in _parts(word.encode()):
                parts[part] += count
        common = [part for part, _ in parts.most_common(VOCAB - 257)]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *common, b"<end>"]
        assert len(self.tokens) == VOCAB, "the repository has too little text"

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _parts(word: bytes) -> Iterator[bytes]:
    for first in range(len(word)):
        yield from (word[first:end] for end in range(first + 2, min(len(word), first + 14) + 1))


class Parts:
    """Seconds of each part of a step, by its name, one entry a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self.timed(name):
                return call(*args)

        return timed


class Batch:
    """Decodes ROWS requests, each with a matcher of its own."""

    def __init__(self, model: Path, tokenizer: llguidance.LLTokenizer, parts: Parts) -> None:
        self._queue = MaskQueue()
        self._parts = parts
        self._template = llguidance.LLMatcher(tokenizer, json_grammar(SCHEMA))
        self._matchers = [self._matcher() for _ in range(ROWS)]
        self.bits = bytearray()
        """Masks of the last step."""
        self._worker = Worker(_config(model), lambda: None, lambda _: None, masks=self._queue)
        self._worker.prepare()
        self._step = 0
        self._prefill()

    def _matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._template.deep_copy(), WORDS)

    def _prefill(self) -> None:
        params = SamplingParams(temperature=0.7)
        new = [
            NewRequest(row, pack_tokens([row + 1] * PROMPT), PROMPT, [list(blocks_of(row))], row, params, None)
            for row in range(ROWS)
        ]
        self._run([0] * ROWS, PROMPT, new=new)

    def _run(self, starts: list[int], tokens: int, **changes: Any) -> list[int]:
        rows = list(range(ROWS))
        plan = StepPlan(self._step, 0, rows, starts, [tokens] * ROWS, [True] * ROWS, **changes)
        self._step += 1
        result = self._worker.launch(plan).finish()
        errors = [extras.error for extras in result.extras.values() if extras.error is not None]
        assert result.error is None and not errors, (result.error, errors)
        return unpack_tokens(result.tokens).tolist()

    def plain_step(self) -> None:
        self._run([FOLLOWS] * ROWS, 1)

    def masked_step(self) -> None:
        rows = list(range(ROWS))
        with self._parts.timed("filling masks"):
            self.bits = bytearray(b"\xff") * (4 * WORDS * ROWS)
            GrammarMatcher.fill([MaskRow(matcher, (), row) for row, matcher in enumerate(self._matchers)], self.bits)
        with self._parts.timed("handing them over"):
            self._queue.put(StepMasks(self._step, rows, bytes(self.bits)))
        tokens = self._run([FOLLOWS] * ROWS, 1, masked=rows)
        with self._parts.timed("taking tokens"):
            for matcher, token in zip(self._matchers, tokens, strict=True):
                matcher.advance(token)
        assert all(matcher.error is None for matcher in self._matchers)
        self._matchers = [self._matcher() if matcher.is_finished else matcher for matcher in self._matchers]


def blocks_of(row: int) -> range:
    return range(1 + BLOCKS * row, 1 + BLOCKS * (row + 1))


def _config(model: Path) -> WorkerConfig:
    return WorkerConfig(
        model_path=str(model),
        load_format="auto",
        device="cpu",
        dtype="bfloat16",
        seed=0,
        max_model_len=BLOCKS * BLOCK_SIZE,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * PROMPT,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=(ROWS * BLOCKS + 1) * 28 * 2 * 8 * BLOCK_SIZE * 128 * 2,
        memory_fraction=None,
        attention_backend="auto",
        num_threads=THREADS,
    )


def applying(grammar: bytearray) -> Iterator[str]:
    """Rows of the first table. `grammar` are the masks of a real step."""
    clock, rows, logits = Clock(3.0), torch.arange(ROWS), torch.randn(ROWS, VOCAB)
    one = torch.zeros(ROWS, WORDS, dtype=torch.int32)
    one[:, WORDS // 2] = 1
    masks = {
        "all": torch.full((ROWS, WORDS), -1, dtype=torch.int32),
        "one": one,
        "half, at random": torch.randint(-(2**31), 2**31 - 1, (ROWS, WORDS), dtype=torch.int32),
        "by a grammar": torch.frombuffer(grammar, dtype=torch.int32).view(ROWS, WORDS),
    }
    for name, words in masks.items():
        by_torch, by_op = (clock(apply, logits, rows, words) for apply in (reference.apply_token_bitmask, ops.apply_token_bitmask))
        yield f"| {name} | {by_torch * 1e3:.2f} | {by_op * 1e3:.3f} | {by_torch / by_op:.0f} |"


def in_steps(batch: Batch, parts: Parts) -> Iterator[str]:
    """Rows of the second table."""
    steps: dict[str, list[float]] = {"without masks": [], "with masks": []}
    for number in range(WARM + PAIRS):
        if number == WARM:
            parts.seconds.clear()
        for name, step in (("without masks", batch.plain_step), ("with masks", batch.masked_step)):
            began = time.perf_counter()
            step()
            if number >= WARM:
                steps[name].append(time.perf_counter() - began)
    plain = statistics.median(steps["without masks"])
    per_step = {name: statistics.median(seconds) for name, seconds in parts.seconds.items()}
    for name, seconds in [*per_step.items(), ("all of these", sum(per_step.values()))]:
        yield f"| {name} | {seconds * 1e3:.2f} | {seconds / plain:.1%} |"
    for name, each in steps.items():
        yield f"| a step {name} | {statistics.median(each) * 1e3:.1f} | {statistics.median(each) / plain:.1%} |"
    ratios = [masked / plain for plain, masked in zip(*steps.values(), strict=True)]
    yield f"| with / without, pair by pair | | {quartiles(ratios)} |"


def quartiles(ratios: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    model = model_asked_for()
    parts = Parts()
    receive = StepMasking.of
    timed = parts.wrapped("receiving them", receive)
    StepMasking.of = lambda self, plan, *rest: (timed if plan.masked else receive)(self, plan, *rest)
    Sampler._mask = parts.wrapped("applying them", Sampler._mask)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), n_vocab=VOCAB)
    batch = Batch(model, tokenizer, parts)
    lines = list(in_steps(batch, parts))
    torch.set_num_threads(THREADS)
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}. {THREADS} threads. Load: {os.getloadavg()[0]:.1f}.\n")
    print(f"| allowed of {ROWS} x {VOCAB:,} | torch (ms) | kernel (ms) | torch / kernel |\n|---|---:|---:|---:|", flush=True)
    for line in applying(batch.bits):
        print(line, flush=True)
    print("\n| part of a step | ms | of a step without |\n|---|---:|---:|", *lines, sep="\n")


if __name__ == "__main__":
    main()
