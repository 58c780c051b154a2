"""Measures what speculative decoding gains and costs at the Qwen3-0.6B shape in bf16, with the acceptance of a real model.

    python bench/speculation.py [--rounds N] [--answers copies|free] [BATCH ...]
    python bench/speculation.py --vain      prints when drafts that are never right end; writes nothing

SmolLM2-135M-Instruct answers prompts of two kinds: those that ask for a copy (edit this file, quote this page, JSON), and free
ones. Not each answer does what it is asked for: one copies if prompt lookup has at least COPIES of its tokens right, and one of
which it has a share f right is 1 / (1 - f) times as fast at most, if drafts cost nothing.

The large shape has random weights, so its answers are replaced by these: each step computes all that it would, and then takes the
small model's token. Drafts are then as good as they are on real text. Methods take turns on one engine.

Writes bench/results/speculation.md.
"""

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import checkpoint
import small_model
import torch
from checkpoint import CACHE
from shared import machine
from starling_engine import LLM, EngineArgs, SamplingParams
from starling_engine.args import speculative_of
from starling_engine.core.engine_core import EngineCore
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.frontend.resolve import resolve
from starling_engine.native.sampling_metadata import SamplingMetadata
from starling_engine.request import EngineRequest
from starling_engine.sampling.select import SampleOp, select_sample_op
from starling_engine.spec_decode.proposers import repeated
from starling_engine.spec_decode.speculator import Speculator
from starling_engine.spec_decode.token_index import TokenIndex
from starling_engine.worker import runner_factory

RESULTS = Path(__file__).parent / "results" / "speculation.md"
HERE = Path(__file__).parents[1]
THREADS = 2
LONGEST = 256
COPIES = 0.5
VAIN = 400
METHODS = {"none": None, "ngram": "ngram", "suffix": "suffix"}
PEOPLE = "Ann, 31, Rome; Bob, 45, Oslo; Cid, 27, Lima; Dora, 63, Bern; Eva, 19, Kyiv; Finn, 38, Riga; Gus, 52, Baku; Hal, 29, Doha"


def copying() -> list[str]:
    """Prompts that ask for what is mostly in them."""
    page, code = (HERE / "docs" / "sleep.md").read_text(), (HERE / "engine" / "starling_engine" / "byte_sizes.py").read_text()
    law = (HERE / "LICENSE").read_text()
    return [
        f"Here is a Python file.\n\n```python\n{code}```\n\nWrite the same file again, with the word `size` in place of `bytes`.",
        f"Write this list as JSON, an array of objects with the keys name, age and city: {PEOPLE}",
        f"Repeat this text word for word:\n\n{page[:1200]}",
        f"Here is a licence.\n\n{law[:1500]}\n\nQuote its first section word for word.",
        f"Write this list as YAML, with the keys name, age and city: {PEOPLE}",
        f"Add a line `# checked` at the top of this file and leave the rest as it is:\n\n```python\n{code}```",
    ]


def free() -> list[str]:
    """Prompts whose answers are nowhere yet."""
    return [
        "Tell me a story about a lighthouse keeper who finds a letter.",
        "Why is the sky blue? Explain it to a child.",
        "Write a poem about rain on a tin roof.",
        "What should I think of before I adopt a dog?",
        "Describe a market in a harbour town at dawn.",
        "Give advice to somebody who starts a new job on Monday.",
    ]


def traces(model: Path, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Returns token ids of each prompt and of the small model's greedy answer."""
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST)
    with LLM(str(model), num_threads=THREADS, max_model_len=4096, show_progress=False) as engine:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = engine.chat(chats, params, use_tqdm=False)
    return [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in outputs]


def guessed(prompt: list[int], output: list[int]) -> float:
    """Returns the share of an answer's tokens that prompt lookup has right, where it guesses before each."""
    config = speculative_of(EngineArgs(model="-", spec_method="ngram"))
    index, tokens, right = TokenIndex(config.prompt_lookup_min), list(prompt), 0
    index.extend(prompt)
    for token in output:
        places = index.matches(tokens, config.prompt_lookup_max)
        right += bool(places) and repeated(tokens, places[0].end, 1) == [token]
        tokens.append(token)
        index.extend([token])
    return right / len(output)


class Replay:
    """A sampling op that does its work, and then takes the token that a trace has; a request's seed is its trace's number."""

    def __init__(self, op: SampleOp) -> None:
        self._op = op
        self.tokens = torch.zeros(0, 0, dtype=torch.int64)

    def __call__(
        self, logits: torch.Tensor, metadata: SamplingMetadata[torch.Tensor], seed: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        self._op(logits, metadata, seed, position)
        return self.tokens[seed, position.clamp(max=self.tokens.shape[1] - 1)] if len(self.tokens) else seed


def start(model: Path) -> tuple[EngineCore, Replay]:
    """Starts a core in this process."""
    replay = Replay(select_sample_op(torch.device("cpu")))
    runner_factory.select_sample_op = lambda _: replay
    args = EngineArgs(model=str(model), num_threads=THREADS, max_model_len=4096, kv_cache_memory_bytes=2 << 30, step_target_ms=0)
    config = resolve(args)[2]
    executor = ThreadExecutor(config.worker)
    executor.start()
    while (report := executor.ready(1)) is None:
        pass
    return EngineCore(config, executor, report), replay


def tokens_per_second(core: EngineCore, asked: list[tuple[list[int], list[int]]], method: str | None) -> float:
    """Returns the rate of decoding, from the moment when all requests have their first token until they have all tokens."""
    config = speculative_of(EngineArgs(model="-", spec_method=method))
    core.scheduler.drafter = Speculator(config, core.scheduler.stats)
    for number, (prompt, output) in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=len(output), ignore_eos=True)
        core.add(EngineRequest(id=str(number), prompt_ids=prompt, params=params, seed=number))
    counts = [0] * len(asked)
    began = first = 0.0
    while core.has_work:
        for delta in core.step():
            counts[int(delta.id)] += len(delta.tokens)
        if not began and all(counts):
            began, first = time.perf_counter(), sum(counts)
    assert counts == [len(output) for _, output in asked]
    return (sum(counts) - first) / (time.perf_counter() - began)


def table(core: EngineCore, replay: Replay, kind: str, found: list[tuple[list[int], list[int]]], batch: int, rounds: int) -> str:
    """Returns a line of the results: each method's rate over that of none, the median of all rounds."""
    asked = [found[number % len(found)] for number in range(batch)]
    shortest = min(len(output) for _, output in asked)
    asked = [(prompt, output[:shortest]) for prompt, output in asked] if batch > 1 else asked
    sequences = [prompt + output for prompt, output in asked]
    replay.tokens = torch.zeros(batch, max(map(len, sequences)) + 1, dtype=torch.int64)
    for row, sequence in zip(replay.tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    for number in range(-1, rounds):  # the first fills the prefix cache
        each = {name: tokens_per_second(core, asked, method) for name, method in METHODS.items()}
        print(kind, batch, {name: f"{rate:.1f}" for name, rate in each.items()}, file=sys.stderr, flush=True)
        if number >= 0:
            for name, rate in each.items():
                ratios[name].append(rate / each["none"])
    cells = (f"{statistics.median(ratios[name]):.2f} ({min(ratios[name]):.2f}–{max(ratios[name]):.2f})" for name in METHODS)
    share = statistics.mean(guessed(prompt, output) for prompt, output in found)
    return f"| {kind} | {batch} | {share:.2f} | {' | '.join(cells)} |"


def vain(core: EngineCore, replay: Replay) -> str:
    """Returns how many drafts a step has in each second of a text whose drafts are found each time, and never right."""
    rng = random.Random(0)
    prompt, output = [rng.randrange(100, 112) for _ in range(64)], [rng.randrange(100, 112) for _ in range(VAIN)]
    replay.tokens = torch.tensor([prompt + output + [0]])
    core.scheduler.drafter = Speculator(speculative_of(EngineArgs(model="-", spec_method="ngram")), core.scheduler.stats)
    params = SamplingParams(temperature=0.0, max_tokens=VAIN, ignore_eos=True)
    core.add(EngineRequest(id="vain", prompt_ids=prompt, params=params, seed=0))
    drafts, steps, began = Counter[int](), Counter[int](), time.perf_counter()
    while core.has_work:
        before = core.scheduler.stats.spec_draft_tokens_total
        core.step()
        second = int(time.perf_counter() - began)
        steps[second] += 1
        drafts[second] += core.scheduler.stats.spec_draft_tokens_total - before
    return "drafts a step, second by second: " + " ".join(f"{drafts[second] / steps[second]:.2f}" for second in sorted(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", choices=("copies", "free"))
    parser.add_argument("--vain", action="store_true")
    options = parser.parse_args()
    small, large = CACHE / "smollm2-135m", CACHE / "qwen3-0.6b-shape"
    checkpoint.write(large)
    if options.vain:
        core, replay = start(large)
        print(machine(), vain(core, replay), sep="\n")
        core.executor.shutdown()
        return
    small_model.write(small)
    found: dict[str, list[tuple[list[int], list[int]]]] = {"copies": [], "free": []}
    for trace in traces(small, copying() + free()):
        found["copies" if guessed(*trace) >= COPIES else "free"].append(trace)
    kinds = [options.answers] if options.answers else [*found]
    core, replay = start(large)
    lines = []
    for batch in options.batches:
        for kind in kinds:
            all_ = found[kind]
            # Alone, each trace has a line: how far they copy differs.
            sets = [[trace] for trace in all_] if batch == 1 else [all_]
            lines += [table(core, replay, kind, some, batch, options.rounds) for some in sets]
    core.executor.shutdown()
    head = ["| answers | batch | guessed | none | ngram | suffix |", "|---|---:|---:|---:|---:|---:|"]
    text = [
        f"Tokens/s of decoding over those without drafts, medians (and extremes) of {options.rounds} rounds.",
        "Guessed is the share of the tokens that prompt lookup has right where it guesses before each.",
        "",
        machine(),
        "",
    ]
    RESULTS.write_text("\n".join([*text, *head, *lines]) + "\n")
    print("\n".join([*head, *lines]))


if __name__ == "__main__":
    main()
