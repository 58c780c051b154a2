"""Forms become grammars in another process: hostile ones cost their own request and nothing else."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance
import pytest
from starling_engine import SamplingParams
from starling_engine.config import VocabularyConfig
from starling_engine.errors import InvalidRequest, ModelError, QueueFull, RequestFailed
from starling_engine.frontend.grammars import GRAMMAR_LIMITS, GrammarCompiler
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output.special_tokens import ReasoningMarks
from starling_engine.structured_output.vocabulary import read_vocabulary
from starling_engine.tokenizer_files import read_tokenizer

from tests.engine.real_engine import MODEL, wait_until

EOS = 2
VOCABULARY = VocabularyConfig(MODEL, 4096, (EOS,))
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}


def added_tokens(folder: str) -> dict[str, int]:
    backend = read_tokenizer(Path(folder)).backend
    return {token.content: number for number, token in backend.get_added_tokens_decoder().items()}


ADDED = added_tokens(MODEL)


def compiler(vocabulary: VocabularyConfig | None = VOCABULARY, added: dict[str, int] = ADDED, **more: Any) -> GrammarCompiler:
    marks = ReasoningMarks.find(added, lambda text: [*text.encode()])
    return GrammarCompiler(vocabulary, added, marks, **{"max_waiting": lambda: 8, **more})


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    made = compiler()
    yield made
    made.close()


async def grammar(compiler: GrammarCompiler, *, reasoning_open: bool = False, **wanted: Any) -> str:
    return await compiler.compile(StructuredOutputsParams(**wanted), reasoning_open=reasoning_open)


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return read_vocabulary(VOCABULARY)


# ---- forms, with a real vocabulary ----


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 12}', '{"a": "b"}'),
        ({"json_object": True}, '{"return": [1, null]}', "[1]"),
        ({"regex": r"def [a-z_]+\(\):"}, "def run_all():", "def run_all:"),
        ({"choice": ["self.assertEqual", "Grüße 日本"]}, "Grüße 日本", "Grüße"),
        (
            {"choice": ["x<|im_start|>a<|endoftext|>b"]},
            ["x", "<|im_start|>", "a", "<|endoftext|>", "b"],
            "x<|im_start|>a<|endoftext|>b",
        ),
        ({"json": {"const": "<|im_end|>"}}, '"<|im_end|>"', ['"', "<|im_end|>", '"']),
        ({"grammar": 'root ::= "x" ("+" "x")*'}, "x+x", "x+"),
        ({"structural_tag": TAGS}, "so: <f>12</f>.", "so: <f>a</f>."),
    ],
)
async def test_each_form(
    wanted: dict[str, Any], right: str | list[str], wrong: str | list[str], shared: GrammarCompiler, tokenizer: Any
) -> None:
    """An output is a text, or a list in which special tokens are tokens."""

    def tokens(output: str | list[str]) -> list[int]:
        pieces = [output] if isinstance(output, str) else output
        special = ADDED if isinstance(output, list) else {}
        return [id_ for piece in pieces for id_ in ([special[piece]] if piece in special else tokenizer.tokenize_str(piece))]

    matcher = llguidance.LLMatcher(tokenizer, await grammar(shared, **wanted))
    assert [_accepts(matcher, tokens(output)) for output in (right, wrong)] == [True, False]


async def test_a_token_that_the_model_has_no_row_of_is_text(tmp_path: Path) -> None:
    state = json.loads((Path(MODEL) / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    state["added_tokens"].append({"id": VOCABULARY.size, "content": "<image>", **token})
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    vocabulary = replace(VOCABULARY, tokenizer_path=str(tmp_path))
    made = compiler(vocabulary, added_tokens(str(tmp_path)))
    try:
        matcher = llguidance.LLMatcher(read_vocabulary(vocabulary), await grammar(made, choice=["an <image>"]))
    finally:
        made.close()
    assert _accepts(matcher, read_vocabulary(vocabulary).tokenize_str("an <image>"))


async def test_refusals_name_the_field_and_the_path(shared: GrammarCompiler) -> None:
    for wanted, field, words in [
        ({"json": {"items": {"maxLen": 1}}}, "json", "$.items.maxLen: "),
        ({"choice": ["a<|im_end|>"]}, "choice[0]", "<|im_end|> ends the output"),
        ({"regex": "a(?=b)"}, "regex", "look-around, including look-ahead and look-behind, is not supported"),
        ({"grammar": "start: <|im_start|> <nope>"}, "grammar", "the tokenizer has no special token <nope>"),
        ({"grammar": "start: <|endoftext|> | <|im_end|>"}, "grammar", "<|im_end|> ends the output"),
        ({"grammar": "start: a\na: b\nb: a"}, "grammar", "no output is possible"),
        ({"regex": "[a&&b]"}, "regex", "no output is possible"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            await grammar(shared, **wanted)
        assert caught.value.param == f"structured_outputs.{field}" and words in str(caught.value)
    with pytest.raises(InvalidRequest, match="no tokens that mark reasoning") as caught:
        await grammar(shared, choice=["a"], reasoning=True)
    assert caught.value.param == "structured_outputs.reasoning"


async def test_an_engine_without_a_vocabulary_refuses() -> None:
    with pytest.raises(InvalidRequest, match="no vocabulary"):
        await grammar(compiler(None), choice=["a"])


async def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = compiler(VocabularyConfig(str(tmp_path), 4096, (EOS,)))
    with pytest.raises(ModelError):
        await grammar(broken, choice=["a"])
    broken.close()


async def test_an_end_that_a_grammar_could_ask_for_is_refused() -> None:
    """The output ends in the middle of its form, for the core takes the text for the end."""
    textual = compiler(replace(VOCABULARY, eos_token_ids=(EOS, 300)))
    with pytest.raises(ModelError, match="a token that ends the model's outputs is text"):
        await grammar(textual, choice=["a"])
    textual.close()


# ---- reasoning ----


@pytest.fixture(scope="module", params=[("<think>", "</think>"), ("[THINK]", "[/THINK]")], ids=["special", "plain"])
def reasoner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GrammarCompiler, Any, Any]]:
    """A compiler, its vocabulary, and the tokenizer that it was read from. The library takes the first pair alone for special."""
    folder = tmp_path_factory.mktemp("reasoner")
    backend = read_tokenizer(Path(MODEL)).backend
    backend.add_tokens(list(request.param))
    backend.save(str(folder / "tokenizer.json"))
    vocabulary = VocabularyConfig(str(folder), 4098, (EOS,))
    made = compiler(vocabulary, added_tokens(str(folder)))
    yield made, read_vocabulary(vocabulary), backend
    made.close()


async def test_reasoning_is_a_part_of_the_grammar(reasoner: tuple[GrammarCompiler, Any, Any]) -> None:
    compiler, vocabulary, backend = reasoner
    start, end = 4096, 4097
    assert [vocabulary.is_special_token(token) for token in (start, end)] == [backend.id_to_token(start) == "<think>"] * 2

    def text(words: str) -> list[int]:
        return list(vocabulary.tokenize_str(words))

    for is_open in (False, True):
        wanted = await grammar(compiler, json={"type": "integer"}, reasoning=True, reasoning_open=is_open)
        matcher = llguidance.LLMatcher(vocabulary, wanted)
        opening = [] if is_open else [start]
        assert _accepts(matcher, [*opening, *text("first, \n then"), end, *text("\n\n12")])
        assert _accepts(matcher, [*opening, end, *text("12")])
        assert _accepts(matcher, text("12")) != is_open
        spelled = [token for character in backend.id_to_token(end) for token in text(character)]
        for wrong in (
            [*text("so"), *text("12")],
            [*text("so"), *spelled, end, *text("12")],
            [end, *text("so")],
            [EOS, end, *text("12")],
        ):
            assert not _accepts(matcher, [*opening, *wrong])
    ids = backend.encode("so").ids
    for prompt, is_open in [
        ([start], True),
        ([end, start, *ids], True),
        ([start, end], False),
        (ids, False),
        ([start, EOS, *ids], False),
    ]:
        assert compiler.has_opened_reasoning(prompt) == is_open


# ---- hostile forms ----


def nested(words: str, depth: int) -> Any:
    inner: Any = {}
    for _ in range(depth):
        inner = {words: inner}
    return inner


def chain(rule: str, length: int = 40, last: str = '"x"') -> str:
    rules = [f"r{at}: {rule.replace('NEXT', f'r{at + 1}')}" for at in range(length)]
    return "\n".join(["start: r0", *rules, f"r{length}: {last}"])


HOSTILE: dict[str, dict[str, Any]] = {
    # Those of other servers' reports.
    "150 levels": {"json": nested("items", 150)},
    "levels of text": {"json": "[" * 99_000},
    "an enum of 1e4 words": {"json": {"enum": [f"w{at}" for at in range(10_000)]}},
    "a remote reference": {"json": {"$ref": "http://169.254.169.254/"}},
    "a lookahead": {"regex": "(?=a)b"},
    "10,000 brackets": {"regex": "(" * 4_990 + "a" + ")" * 4_990},
    "5,000 optional letters": {"regex": "a?" * 5_000},
    "a pattern of optional letters": {"json": {"type": "string", "pattern": "a?" * 900}},
    # Others.
    "a forced billion": {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "a billion or more": {"regex": "(((a{0,1000}){0,1000}){0,1000}b){1000}"},
    "letters of all kinds": {"regex": r"(\p{L}{1,200}\p{N}{1,200}){1,200}"},
    "400 words at once": {"grammar": "start: T\nT: " + " & ".join(f"/(?s:.*)w{at}(?s:.*)/" for at in range(400))},
    "doubling rules": {"grammar": chain("NEXT NEXT")},
    "doubling choices": {"grammar": chain("NEXT | NEXT NEXT")},
    "doubling terminals": {"grammar": chain("NEXT NEXT").replace("r", "R").replace("staRt", "start")},
    "rules without an end": {"grammar": chain("NEXT", 900, "r0")},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "3,000 beginnings": {"grammar": "start: " + " | ".join(f'"a"~{at}' for at in range(1, 3_000))},
    "brackets of Lark": {"grammar": "start: " + "(" * 9_000 + '"a"' + ")" * 9_000},
    "brackets of GBNF": {"grammar": "root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000},
    "parametric explosion": {"grammar": "start: p::0x0\np::_: p::incr(_) p::incr(_) %if lt(_, 60)\n | \"a\" %if ge(_, 60)"},
    "substrings of 90,000 characters": {"grammar": 'start: %regex {"substring_chars": "' + "abc" * 30_000 + '"}'},
    "15,000 choices": {"choice": [f"w{at}" for at in range(15_000)]},
    "one long choice": {"choice": ["x" * 99_000]},
    "400 triggers": {"structural_tag": {"type": "structural_tag", "structures": [
        {"begin": f"<f{at}>", "schema": {"type": "object"}, "end": "</f>"} for at in range(400)],
        "triggers": [f"<f{at}>" for at in range(400)]}},
    "white space in a number": {"json": '{"const": ' + "1" * 90_000 + "}"},
}  # fmt: skip
REFUSED = ("150 levels", "a remote reference", "a lookahead", "a forced billion", "400 words at once")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processor_seconds(pid: int) -> float:
    """Returns those of a process and its children, which it may have waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children(pid)))


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_answered_or_refused(name: str, shared: GrammarCompiler) -> None:
    """A form takes half a second of a processor at most, and leaves nothing but the one copy that the next one finds."""
    await grammar(shared, choice=["before"])
    before = shared.pid
    assert before is not None
    own, others = time.process_time(), processor_seconds(before)
    try:
        await grammar(shared, **HOSTILE[name])
        assert name not in REFUSED
    except InvalidRequest as error:
        assert str(error.param).startswith("structured_outputs.") and len(str(error)) < 600
    assert await grammar(shared, choice=[name]) and shared.pid == before
    assert time.process_time() - own + processor_seconds(before) - others < 0.8, "0.5, and some for the end and the next copy"
    await wait_until(lambda: len(children(before)) == 1)


async def test_memory_is_limited() -> None:
    small = compiler(limits=replace(GRAMMAR_LIMITS, seconds=10.0, memory_bytes=24 << 20))
    await grammar(small, choice=["a"])
    before = small.pid
    with pytest.raises(InvalidRequest, match="the grammar takes more than 24 MiB of memory") as caught:
        await grammar(small, **HOSTILE["400 words at once"])
    assert caught.value.param == "structured_outputs.grammar"
    assert await grammar(small, choice=["b"]) and small.pid == before
    small.close()


async def test_a_process_that_was_killed_is_replaced() -> None:
    made = compiler()
    await grammar(made, choice=["a"])
    killed = made.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert await grammar(made, choice=["b"]) and made.pid != killed
    killed = made.pid
    made.close()
    await wait_until(lambda: not Path(f"/proc/{killed}").exists())


@pytest.fixture
def steps() -> Iterator[int]:
    """A process that wants a processor all the time, in a session of its own as an engine core is."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as process:
        yield process.pid
        process.kill()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has the niceness of a thread and of a session")
async def test_grammars_leave_a_processor_to_steps(steps: int) -> None:
    """Between two sessions the kernel halves it, whatever the niceness of their threads."""
    made = compiler()
    await grammar(made, choice=["a"])
    assert made.pid is not None
    processor = {min(os.sched_getaffinity(0))}
    for pid in (steps, made.pid, *_copies(made.pid)):
        os.sched_setaffinity(pid, processor)
    before = _processor_seconds(steps), _with_copies(made.pid)
    end = time.monotonic() + 2.0
    for number in range(1000):
        await grammar(made, choice=[f"{number} {word}" for word in range(2000)])
        if time.monotonic() > end:
            break
    taken, by_grammars = _processor_seconds(steps) - before[0], _with_copies(made.pid) - before[1]
    assert by_grammars < 0.25 * (by_grammars + taken)
    made.close()


def _with_copies(pid: int) -> float:
    return sum(map(_processor_seconds, (pid, *_copies(pid))))


def _copies(pid: int) -> list[int]:
    return [int(copy) for copy in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _processor_seconds(pid: int) -> float:
    """Processor time of a process, and of those children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# ---- the cache ----


async def test_nothing_is_logged_of_a_form_that_is_refused_when_its_client_has_gone(
    shared: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    leaves = asyncio.create_task(grammar(shared, regex="(left"))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    del leaves
    await grammar(shared, choice=["behind it"])
    gc.collect()
    assert not caplog.records


async def test_a_grammar_is_made_once_for_all_who_want_it() -> None:
    made = compiler(max_waiting=lambda: 0)
    tasks = [asyncio.create_task(grammar(made, choice=["a"])) for _ in range(20)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="0 grammars are waiting"):
        await grammar(made, choice=["b"])
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and len(set(results[1:])) == 1
    made.close()
    assert await grammar(made, choice=["a"]) == results[1]
    with pytest.raises(RequestFailed):
        await grammar(made, choice=["b"])


async def test_grammars_that_were_asked_for_last_are_kept_within_bytes() -> None:
    made = compiler(max_cached_bytes=14_000)
    await grammar(made, choice=["x" * 8_000, "y" * 8_000])
    assert made.cached_bytes == 0
    for letter in "abcad":
        await grammar(made, choice=[letter * 2_000])
        assert 0 < made.cached_bytes <= 14_000
    made.close()
    for letter in "cad":
        assert await grammar(made, choice=[letter * 2_000])
    with pytest.raises(RequestFailed):
        await grammar(made, choice=["b" * 2_000])


async def test_where_the_prompt_has_opened_reasoning_the_grammar_is_another_one(reasoner: tuple[GrammarCompiler, Any, Any]) -> None:
    texts = {await grammar(reasoner[0], choice=["a"], reasoning=True, reasoning_open=is_open) for is_open in (False, True)}
    assert len(texts) == 2


# ---- sizes ----


@pytest.mark.parametrize(
    ("wanted", "field", "words"),
    [
        ({"json": nested("items", 100_000)}, "json", "nested more than 200 levels"),
        ({"json": {"enum": list(range(5_000_000))}}, "json", "100000 characters"),
        ({"json": {"x" * 200_000: 1}}, "json", "100000 characters"),
        ({"json": "x" * 100_001}, "json", "100000 characters"),
        ({"regex": "a" * 100_001}, "regex", "100000 characters"),
        ({"choice": ["a" * 60_000, "b" * 60_000]}, "choice", "100000 characters"),
        ({"grammar": "a" * 100_001}, "grammar", "100000 characters"),
        ({"structural_tag": {"a": [["b" * 10] * 10_000]}}, "structural_tag", "100000 characters"),
        ({"structural_tag": nested("content", 300)}, "structural_tag", "nested more than 200 levels"),
    ],
)
def test_huge_forms_are_refused_before_anything_reads_them(wanted: dict[str, Any], field: str, words: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    started = time.process_time()
    with pytest.raises(InvalidRequest, match=words) as caught:
        params.validate(4096)
    assert caught.value.param == f"structured_outputs.{field}"
    assert time.process_time() - started < 1.0, "it was read"


def test_a_form_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["anyOf"] = [schema, schema]
    with pytest.raises(InvalidRequest, match=r"characters|nested"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)).validate(4096)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"json": 3}, "structured_outputs.json"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"grammar": 1}, "structured_outputs.grammar"),
    ],
)
def test_wrong_types_are_refused(wanted: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)).validate(4096)
    assert caught.value.param == field


async def test_an_integer_of_thousands_of_digits_is_refused(shared: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="digits") as caught:
        await grammar(shared, json={"const": 10**5_000})
    assert caught.value.param == "structured_outputs.json"


def test_choices_too_short_for_min_tokens_are_refused() -> None:
    for choice, reasoning, is_refused in [(["yes", "no"], False, True), (["yes", "Grüß"], False, False), (["no"], True, False)]:
        form = StructuredOutputsParams(choice=choice, reasoning=reasoning)
        params = SamplingParams(structured_outputs=form, min_tokens=6, max_tokens=9)
        if not is_refused:
            params.validate(4096)
            continue
        with pytest.raises(InvalidRequest, match="fewer bytes than 6 tokens") as caught:
            params.validate(4096)
        assert caught.value.param == "min_tokens"


def _accepts(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    return matcher.deep_copy().validate_tokens([*tokens, EOS]) == len(tokens) + 1
