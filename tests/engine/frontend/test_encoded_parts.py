"""Parts of chats that were encoded before: together they have the tokens of the whole text."""

import random
from pathlib import Path

import pytest
from starling_engine.frontend import encoded_parts
from starling_engine.frontend.chat import ChatTemplates
from starling_engine.frontend.encoded_parts import LEAST_CHARACTERS, EncodedParts, part_begins
from starling_engine.frontend.tokenizer import Tokenizer
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tests.agent.conftest import MODEL, REPOSITORY
from tests.engine.frontend.conftest import CHATML, CORPUS, KINDS

PIECES = (
    "<|im_start|>",
    "<|im_end|>",
    "</s>",
    "<s>",
    "<think>",
    "日本",
    "{tool call}",
    " ",
    "\n",
    "  ",
    "é",
    "▁",
    "<|im_",
    "|>",
    "x",
)


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    some = [*PIECES, *CORPUS, "word " * 40]
    return ["".join(rng.choices(some, k=rng.randrange(1, 40))) for _ in range(300)]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_tokens_of_the_whole(kind: str) -> None:
    backend = KINDS[kind]()
    parts = EncodedParts(backend)
    for text in texts(1) + texts(1) + texts(2):
        assert parts.encode(text) == backend.encode(text, add_special_tokens=False).ids, text


def test_the_models_own_tokenizer_cuts_at_its_turns() -> None:
    tokenizer = Tokenizer.load(REPOSITORY / MODEL)
    parts, begins = EncodedParts(tokenizer.backend), part_begins(tokenizer.backend)
    assert begins
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choices([*begins, *tokenizer.added_tokens, *CORPUS, " ", "\n"], k=30))
        assert parts.encode(text) == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_the_next_turn_of_a_chat_encodes_only_what_is_new(loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, came = loaded["byte_level"], list[str]()
    whole = encoded_parts.encoded

    def noted(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        came.append(text)
        return whole(backend, text, add_special_tokens)

    monkeypatch.setattr(encoded_parts, "encoded", noted)
    messages = [{"role": "system", "content": "Answer briefly. " * 20}, {"role": "user", "content": "Which fox jumps? " * 20}]
    tokenizer.encode(tokenizer.render_chat(messages), False)
    assert "Answer briefly." in "".join(came)
    came.clear()
    messages += [{"role": "assistant", "content": "The brown one."}, {"role": "user", "content": "And over what? " * 20}]
    prompt = tokenizer.render_chat(messages)
    ids = tokenizer.encode(prompt, False)
    assert "Answer briefly." not in "".join(came) and "And over what?" in "".join(came)
    assert ids == whole(tokenizer.backend, prompt.text, False)


def test_parts_that_were_used_least_recently_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_parts, "MOST_CHARACTERS", 4 * LEAST_CHARACTERS)
    parts = EncodedParts(KINDS["byte_level"]())
    for number in range(20):
        parts.encode(f"<|im_start|>{number:{LEAST_CHARACTERS - 12}}")
        parts.encode(f"<|im_start|>{0:{LEAST_CHARACTERS - 12}}")
    kept = [*parts._kept]
    assert len(kept) == 4 and kept[-1].endswith(" 0") and kept[-2].endswith("19")
    assert parts._characters == sum(map(len, kept))


def _with(*tokens: AddedToken | str) -> Backend:
    backend = Backend(models.BPE(unk_token="a", vocab={"a": 0}, merges=[]))
    backend.add_special_tokens([*tokens])
    return backend


@pytest.mark.parametrize(
    ("backend", "begins"),
    [
        (_with("<a>", "<abc>"), ["<abc>", "<a>"]),
        (_with("<a>", AddedToken("<b>", lstrip=True)), ["<a>"]),
        (_with("<a>", AddedToken("<b>", single_word=True)), ["<a>"]),
        (_with("<a>", AddedToken("<a>b", single_word=True)), []),
        (_with("<a>", AddedToken("<b>", normalized=True)), ["<a>"]),
        (_with("<a>", "[x<]"), ["[x<]"]),
        (_with("word", "_w", " w"), []),
    ],
    ids=["plain", "lstrip", "single word", "longer", "normalized", "overlapping", "words"],
)
def test_where_texts_are_cut(backend: Backend, begins: list[str]) -> None:
    assert part_begins(backend) == begins


def test_spelled_tokens_are_not_kept_as_the_templates(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["byte_level"])
    tokenizer = Tokenizer(tokenizer.backend, {}, ChatTemplates({"default": CHATML}))
    text = "x" * LEAST_CHARACTERS
    own = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}, {"role": "user", "content": text}]), False)
    spelled = tokenizer.render_chat([{"role": "user", "content": f"{text}<|im_end|>\n<|im_start|>user\n{text}"}])
    start = tokenizer.added_tokens["<|im_start|>"]
    assert own.count(start) == 3 and tokenizer.encode(spelled, False).count(start) == 2
