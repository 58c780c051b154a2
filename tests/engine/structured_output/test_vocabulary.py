"""A text of a form that spells a special token is text: other tokens spell it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import pytest
from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output.forms import grammar_of
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.structured_output.special_tokens import ReasoningMarks, SpecialTokens
from starling_engine.structured_output.trial import UnusableGrammar, try_grammar
from starling_engine.structured_output.vocabulary import read_vocabulary
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from tests.engine.frontend.conftest import byte_level, gemma, metaspace, sentence_piece, suffixed, unigram


def in_vocabulary() -> Backend:
    """Qwen 3's marks beside those of SmolLM2, whose model has its special tokens, too."""
    trained = json.loads(byte_level().to_str())["model"]
    special = ["<s>", "</s>", "<think>", "</think>"]
    vocab = {token: id_ for id_, token in enumerate([*special, *trained["vocab"]])}
    backend = Backend(models.BPE(vocab, [tuple(merge) for merge in trained["merges"]]))
    backend.pre_tokenizer, backend.decoder = byte_level().pre_tokenizer, byte_level().decoder
    backend.add_special_tokens(special[:2])
    backend.add_tokens(special[2:])
    return backend


def changing() -> Backend:
    """Qwen's normal form, and RoBERTa's space in front."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    return backend


def merged() -> Backend:
    """Gemma's, of which the model makes special tokens by its merges."""
    state = json.loads(gemma().to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    for left, right in (("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">"), ("<s>", "x")):
        for token in (left, right, left + right):
            vocab.setdefault(token, len(vocab))
        merges.append([left, right])
    assert Backend.from_str(json.dumps({**state, "added_tokens": []})).encode("<s>x", add_special_tokens=False).tokens == ["<s>x"]
    return Backend.from_str(json.dumps(state))


def unigram_with_bytes() -> Backend:
    """Makes a tokenizer whose special tokens are pieces of the model, and whose unknown characters are bytes."""
    letters = [(letter, -9.0) for letter in ["▁", *map(chr, range(33, 127))]]
    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), *letters]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), metaspace().decoder
    assert backend.encode("a<s>").tokens[-1] == "<s>"
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


MAKERS = (byte_level, in_vocabulary, changing, sentence_piece, gemma, merged, metaspace, unigram_with_bytes)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SpecialTokens]:
    return read(request.param(), tmp_path_factory.mktemp("tokenizer"))


def read(backend: Backend, folder: Path) -> tuple[llguidance.LLTokenizer, SpecialTokens]:
    backend.save(str(folder / "tokenizer.json"))
    end = backend.token_to_id("</s>")
    vocabulary = read_vocabulary(VocabularyConfig(str(folder), backend.get_vocab_size() + 30, (end,)))
    added = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
    assert vocabulary.vocab_size == backend.get_vocab_size() + 30 and not vocabulary.is_special_token(backend.token_to_id("x"))
    return vocabulary, SpecialTokens(
        {text: id_ for text, id_ in added.items() if vocabulary.is_special_token(id_)}, frozenset({end})
    )


def written(vocabulary: llguidance.LLTokenizer, grammar: str, text: str, *, forced: bool = True) -> list[int]:
    """Returns the tokens of a text under a grammar: those that are forced, and else the longest that are allowed."""
    try_grammar(grammar, vocabulary)
    matcher = GrammarMatcher(llguidance.LLMatcher(vocabulary, grammar, log_level=0), -(-vocabulary.vocab_size // 32))
    tokens: list[int] = []
    while not matcher.is_finished and vocabulary.decode_str(tokens) != text:
        if not (run := matcher.forced(100) if forced else ()):
            bits = bytearray(4 * matcher.words)
            GrammarMatcher.fill([(matcher, (), 0)], bits)
            allowed = [token for token in range(vocabulary.vocab_size) if bits[token // 8] & 1 << token % 8]
            rest = text.encode()[len(vocabulary.decode_bytes(tokens)) :]
            fit = [token for token in allowed if rest.startswith(spelled(vocabulary, token))]
            run = [max(fit, key=lambda token: len(spelled(vocabulary, token)))]
        assert matcher.allowed(run) == len(run)
        for token in run:
            matcher.advance(token)
            assert matcher.error is None
        tokens += run
    return tokens


def spelled(vocabulary: llguidance.LLTokenizer, token: int) -> bytes:
    """Returns what a token adds to a text; one that adds nothing fits none."""
    return vocabulary.decode_bytes([token]) or b"\xff"


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("special", ["<s>", "</s>"])
def test_constants_are_text(tokenizer: tuple[Any, SpecialTokens], special: str, forced: bool) -> None:
    """The end of the output is among them, and so is one that has to come behind what the model has chosen."""
    vocabulary, tokens = tokenizer
    expression = f"b+{special}x"
    tag = {"type": "json_schema", "json_schema": {"enum": ["a", f"b{special}x"]}}
    for form, text in [
        ({"json": {"const": special}}, f'"{special}"'),
        ({"json": {"enum": ["a", f"b{special}", f"bx{special}x"]}}, f'"bx{special}x"'),
        (
            {"json": {"properties": {special: {"const": 1}}, "required": [special], "additionalProperties": False}},
            f'{{"{special}":1}}',
        ),
        ({"json": {"type": "string", "pattern": f"^{expression}$"}}, f'"bb{special}x"'),
        ({"regex": expression}, f"bb{special}x"),
        ({"json": {"enum": [" a", "be\u0301 \u00e9 X"]}}, '"be\u0301 \u00e9 X"'),
        ({"grammar": f'start: "a" | "b" "{special}" x\nx: "x"'}, f"b{special}x"),
        ({"structural_tag": {"type": "structural_tag", "format": tag}}, f'"b{special}x"'),
    ]:
        grammar = grammar_of(StructuredOutputsParams(**form, disable_any_whitespace=True), tokens, None)
        found = written(vocabulary, grammar, text, forced=forced)
        assert vocabulary.decode_str(found) == text
        assert not tokens.ends & {*found} and not any(map(vocabulary.is_special_token, found))


def test_what_names_a_token_is_that_token(tokenizer: tuple[Any, SpecialTokens]) -> None:
    vocabulary, tokens = tokenizer
    tag = {"type": "tag", "begin": "<s>", "content": {"type": "regex", "pattern": "a"}, "end": "<s>"}
    for form, expected in [
        ({"grammar": 'start: "x" <s> "x"'}, ["x", "<s>", "x"]),
        ({"choice": ["x<s>x"]}, ["x", "<s>", "x"]),
        ({"structural_tag": {"type": "structural_tag", "format": tag}}, ["<s>", "a", "<s>"]),
    ]:
        grammar = grammar_of(StructuredOutputsParams(**form), tokens, None)
        ids = [
            id_ for piece in expected for id_ in ([tokens.ids[piece]] if piece in tokens.ids else vocabulary.tokenize_str(piece))
        ]
        assert written(vocabulary, grammar, "?") == ids


def test_marks_of_reasoning_are_tokens_and_constants_behind_them_are_text(tmp_path: Path) -> None:
    vocabulary, tokens = read(in_vocabulary(), tmp_path)
    marks = ReasoningMarks.find(tokens.ids, vocabulary.tokenize_str)
    assert marks is not None
    wanted = StructuredOutputsParams(json={"const": "</think>"}, reasoning=True)
    grammar = grammar_of(wanted, tokens, marks, reasoning_open=True)
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert matcher.consume_tokens([*vocabulary.tokenize_str("so"), *marks.ends])
    forced = [*vocabulary.tokenize_str('"</think>"'), *tokens.ends]
    assert marks.ends[0] not in forced and matcher.validate_tokens(forced) == len(forced)


def test_a_text_that_no_tokens_spell_is_refused(tmp_path: Path) -> None:
    """A tokenizer of bytes spells each text, unless it has lost some of them."""
    state = json.loads(byte_level().to_str())
    state["model"]["vocab"] = {token.replace("<", "lost"): id_ for token, id_ in state["model"]["vocab"].items()}
    vocabulary, tokens = read(Backend.from_str(json.dumps(state)), tmp_path)
    with pytest.raises(UnusableGrammar, match="cannot be spelled"):
        try_grammar(grammar_of(StructuredOutputsParams(json={"const": "a<s>"}), tokens, None), vocabulary)


def test_tokens_that_other_files_mark_as_special_are_no_text(tmp_path: Path) -> None:
    backend = byte_level()
    last = {str(backend.get_vocab_size()): {"content": "[X]", "special": True}}
    config = {"added_tokens_decoder": last, "extra_special_tokens": ["日本"], "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary, _ = read(backend, tmp_path)
    for text in ("[X]", "日本"):
        form = grammar_of(StructuredOutputsParams(json={"const": text}), SpecialTokens({}, frozenset()), None)
        assert not any(map(vocabulary.is_special_token, found := written(vocabulary, form, f'"{text}"'))), found
        assert vocabulary.is_special_token(backend.token_to_id(text) or int(*last))


def test_an_added_token_that_the_model_has_no_row_of_is_left_out(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(VocabularyConfig(str(tmp_path), size, (backend.token_to_id("</s>"),)))
    form = grammar_of(StructuredOutputsParams(json={"const": "<image>"}), SpecialTokens({}, frozenset()), None)
    assert vocabulary.vocab_size == size == backend.token_to_id("<image>")
    assert written(vocabulary, form, '"<image>"')


def test_a_token_without_a_row_may_stand_among_the_models_and_be_merged(tmp_path: Path) -> None:
    state = json.loads(in_vocabulary().to_str())
    size = in_vocabulary().get_vocab_size()
    state["added_tokens"].append({**state["added_tokens"][0], "id": size, "content": "<x"})
    state["model"]["vocab"]["<x"] = size
    state["model"]["merges"].append(["<", "x"])
    backend = Backend.from_str(json.dumps(state))
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(VocabularyConfig(str(tmp_path), size, (backend.token_to_id("</s>"),)))
    form = grammar_of(StructuredOutputsParams(json={"const": "<x"}), SpecialTokens({}, frozenset()), None)
    assert vocabulary.vocab_size == size == backend.token_to_id("<x")
    assert written(vocabulary, form, '"<x"')


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="no token ends"):
        read_vocabulary(VocabularyConfig(str(tmp_path), 400, ()))


@pytest.mark.parametrize("maker", [unigram, suffixed])
def test_a_tokenizer_without_bytes_is_refused(maker: Callable[[], Backend], tmp_path: Path) -> None:
    maker().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        read_vocabulary(VocabularyConfig(str(tmp_path), 200, (1,)))
