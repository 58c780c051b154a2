"""Measures what structured output costs and gains.

    python bench/structured_output.py [steps | schemas | neighbours ...]

steps       JSON by SmolLM2-135M-Instruct: steps with jump-forward over steps without
schemas     time to first token of a new schema of 2 kB over that without a schema
neighbours  time between the tokens of a stream while hostile forms arrive, over that while none do; and the same for plain
            requests, as many as there were forms that the engine accepted

The last two run the Qwen3-0.6B shape with a vocabulary of some 150,000 tokens. What masks cost is in mask_cost.py.

Writes bench/results/structured_output.md.
"""

import argparse
import asyncio
import json
import site
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
import small_model
import tokenizers
from checkpoint import CACHE
from shared import machine
from starling_engine import AsyncEngine, EngineArgs, SamplingParams
from starling_engine.core.engine_core import EngineCore
from starling_engine.errors import InvalidRequest
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.frontend.resolve import resolve
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.params import StructuredOutputsParams
from starling_engine.request import EngineRequest
from starling_engine.structured_output import json_grammar

RESULTS = Path(__file__).parent / "results" / "structured_output.md"
SMALL, LARGE, WORDS = CACHE / "smollm2-135m", CACHE / "qwen3-0.6b-shape", CACHE / "tokenizer-150k"
THREADS = 2
VOCABULARY = 150_000

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 30},
        "last_name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "employment_status": {"enum": ["employed", "self-employed", "retired", "student", "unemployed"]},
        "home_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "maxLength": 40},
                "house_number": {"type": "integer", "minimum": 1, "maximum": 9999},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Italy", "Norway", "Peru", "Latvia"]},
            },
            "required": ["street_name", "house_number", "postal_code", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "age", "employment_status", "home_address"],
    "additionalProperties": False,
}
FACTS = [
    "Ann Rossi is 31, works in a bakery and lives in Via Roma 4, 00184 Rome, Italy.",
    "Bob Hansen, 67, stopped working last year. His house is number 12 in Storgata, 01840 Oslo, Norway.",
    "Carla Quispe, 22, studies law. She lives in Avenida Larco 1301, 15074 Lima, Peru.",
    "Juris Ozols is 45 and has a shop of his own; he lives at Brivibas iela 75, 10010 Riga, Latvia.",
]


def main() -> None:
    parts: dict[str, Callable[[], list[str]]] = {"steps": steps, "schemas": schemas, "neighbours": neighbours}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    wanted = parser.parse_args().parts or list(parts)
    if unknown := set(wanted) - parts.keys():
        parser.error(f"there is no part {', '.join(unknown)}")
    lines: list[str] = []
    for name in wanted:
        lines += [f"## {name}", "", *parts[name](), ""]
        print("\n".join(lines), file=sys.stderr, flush=True)
    RESULTS.write_text("\n".join(["# Structured output", "", machine(), "", *lines]))


# ---- in one process ----


def start(args: EngineArgs) -> EngineCore:
    config = resolve(args)[2]
    executor = ThreadExecutor(config.worker)
    executor.start()
    while (report := executor.ready(1)) is None:
        pass
    return EngineCore(config, executor, report)


def run(core: EngineCore, request: EngineRequest) -> tuple[list[int], int]:
    """Returns a request's tokens, and the steps behind the one with its first token."""
    core.add(request)
    tokens: list[int] = []
    first = 0
    while core.has_work:
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens += delta.tokens
            first = first or core.scheduler.stats.steps_total
    return tokens, core.scheduler.stats.steps_total - first


def steps() -> list[str]:
    small_model.write(SMALL)
    tokenizer, grammar = Tokenizer.load(SMALL), json_grammar(PERSON)
    core = start(EngineArgs(model=str(SMALL), num_threads=THREADS, max_model_len=2048, kv_cache_memory_bytes=1 << 28))
    counts: dict[bool, list[int]] = {True: [], False: []}
    for jumps, taken in counts.items():
        for number, fact in enumerate(FACTS):
            chat = [{"role": "user", "content": f"Write this person as JSON: {fact}"}]
            prompt = tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False)
            params = SamplingParams(temperature=0.0, max_tokens=400, speculative=jumps)
            request = EngineRequest(id=str(number), prompt_ids=prompt, params=params, grammar=grammar)
            tokens, count = run(core, request)
            json.loads(tokenizer.decode(tokens))
            taken.append(count)
    core.executor.shutdown()
    ratio = sum(counts[True]) / sum(counts[False])
    return [
        f"SmolLM2-135M writes {len(FACTS)} persons in {sum(counts[True])} steps with jump-forward, "
        f"in {sum(counts[False])} without: {ratio:.2f} of them."
    ]


def large_tokenizer() -> Path:
    """Trains a tokenizer of about 150,000 tokens, as large models have, on the Python sources of this environment."""
    if not (WORDS / "tokenizer.json").exists():
        files = [str(path) for path in sorted(Path(site.getsitepackages()[0]).rglob("*.py"))]
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        backend.train(
            files, tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<end>"])
        )
        WORDS.mkdir(parents=True, exist_ok=True)
        backend.save(str(WORDS / "tokenizer.json"))
    return WORDS


# ---- as a server has it ----


def served(part: Callable[[AsyncEngine], Any]) -> Any:
    async def go() -> Any:
        checkpoint.write(LARGE)
        args = EngineArgs(model=str(LARGE), tokenizer=str(large_tokenizer()), num_threads=THREADS, max_model_len=2048)
        engine = await AsyncEngine.start(args)
        try:
            return await part(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(go())


def new_schema(number: int) -> dict[str, Any]:
    """Returns a schema of some 2 kB that nobody has seen."""
    names = [f"field_{number}_{n}" for n in range(30)]
    kinds = [{"type": "string", "maxLength": 40, "description": "a text"}, {"type": "integer", "minimum": 0}, {"enum": ["a", "b"]}]
    properties = {name: kinds[n % len(kinds)] for n, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def schemas() -> list[str]:
    size = len(json.dumps(new_schema(0)))

    async def first_token(engine: AsyncEngine, form: StructuredOutputsParams | None, number: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=2, structured_outputs=form)
        began = time.perf_counter()
        async for _ in engine.stream([number % 1000 + 1] * 16, params):
            return time.perf_counter() - began
        raise AssertionError

    async def measure(engine: AsyncEngine) -> list[tuple[float, float]]:
        pairs = []
        for number in range(-2, 20):
            free = await first_token(engine, None, 2 * number + 10)
            formed = await first_token(engine, StructuredOutputsParams(json=new_schema(number)), 2 * number + 11)
            pairs.append((free, formed))
        return pairs

    pairs = served(measure)
    more = [1000 * (formed - free) for free, formed in pairs[2:]]
    return [
        f"A new schema of {size} bytes: the first token comes {statistics.median(more):.1f} ms later "
        f"({min(more):.1f}–{max(more):.1f}); the very first, which starts the process that tries grammars and reads the "
        f"vocabulary, {1000 * (pairs[0][1] - pairs[0][0]):.0f} ms."
    ]


def hostile() -> list[StructuredOutputsParams]:
    deep: Any = {"type": "integer"}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    many = {f"k{n}": {"type": "string"} for n in range(2000)}
    return [
        StructuredOutputsParams(json=deep),
        StructuredOutputsParams(json={"type": "object", "properties": many}),
        StructuredOutputsParams(json={"enum": [f"v{n}" for n in range(8000)]}),
        StructuredOutputsParams(regex="(a?){2000}b" * 5),
        StructuredOutputsParams(regex="(x+x+)+y" * 100),
        StructuredOutputsParams(regex="a?" * 20_000),
        StructuredOutputsParams(regex="(" * 10_000),
        StructuredOutputsParams(grammar="start: a\n" + "\n".join(f'{c}: {c}{c} | "x"' for c in "abcdefgh")),
        StructuredOutputsParams(grammar="start: " + " | ".join(f'"w{n}"' for n in range(20_000))),
        StructuredOutputsParams(choice=[f"choice {n}" for n in range(20_000)]),
        StructuredOutputsParams(regex="(b|c)a{100000}"),
        StructuredOutputsParams(choice=["lorem ipsum " * 8000]),
    ]


class Answer(NamedTuple):
    """What became of a form: `sent` seconds behind the first one, answered or refused in `seconds`, with `tokens` if accepted."""

    sent: float
    seconds: float
    tokens: int


def neighbours() -> list[str]:
    forms = hostile()

    async def gaps(engine: AsyncEngine) -> list[float]:
        found, last = [], time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
        async for _ in engine.stream([5] * 16, params):
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found[1:]

    async def attack(engine: AsyncEngine, answers: list[Answer]) -> None:
        start = time.perf_counter()
        while True:
            for form in forms:
                began, tokens = time.perf_counter(), 0
                with suppress(InvalidRequest):
                    output = await engine.complete([7] * 16, SamplingParams(max_tokens=20, structured_outputs=form))
                    tokens = len(output.outputs[0].token_ids)
                answers.append(Answer(began - start, time.perf_counter() - began, tokens))

    async def ask(engine: AsyncEngine, accepted: list[Answer]) -> None:
        """Sends a plain request when each form was sent that was accepted, for as many tokens."""
        start = time.perf_counter()
        for form in accepted:
            await asyncio.sleep(start + form.sent - time.perf_counter())
            await engine.complete([7] * 16, SamplingParams(max_tokens=form.tokens, ignore_eos=True))

    async def beside(engine: AsyncEngine, others: Coroutine[Any, Any, None]) -> list[float]:
        task = asyncio.create_task(others)
        await asyncio.sleep(3.0)
        found = await gaps(engine)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return found

    async def measure(engine: AsyncEngine) -> tuple[list[float], list[float], list[float], list[Answer]]:
        await gaps(engine)
        alone = await gaps(engine)  # and once more behind: a machine has better and worse minutes
        answers: list[Answer] = []
        attacked = await beside(engine, attack(engine, answers))
        plain = await beside(engine, ask(engine, [answer for answer in answers if answer.tokens]))
        return alone + await gaps(engine), attacked, plain, answers

    alone, attacked, plain, answers = served(measure)
    free, hit, usual = (1000 * statistics.quantiles(found, n=100)[98] for found in (alone, attacked, plain))
    seconds = [answer.seconds for answer in answers]
    return [
        f"p99 between the tokens of a stream: {free:.1f} ms alone, {hit:.1f} ms beside hostile forms ({hit / free:.2f}), "
        f"{usual:.1f} ms beside as many plain requests as forms were accepted ({usual / free:.2f}). "
        f"{len(answers)} forms were answered or refused, in {1000 * statistics.median(seconds):.0f} ms "
        f"(median; at most {1000 * max(seconds):.0f}); {sum(answer.tokens > 0 for answer in answers)} of them were accepted."
    ]


if __name__ == "__main__":
    main()
