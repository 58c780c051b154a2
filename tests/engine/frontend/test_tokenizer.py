"""Encoding, decoding and the spelling of tokens, held against transformers and against the tokenizers' own decoders."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.tokenizer import Tokenizer, Truncation
from starling_engine.tokenizer_files import read_tokenizer_json
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.engine.frontend.conftest import BYTE_KINDS, KINDS

PYDOC = Path("models/starling-pydoc")
TEXTS = [
    "", " ", "  two spaces", "The quick brown fox\n\n\tjumps", "Grüße 🎉👩‍👩‍👧 日本語", "<s>hello</s>", "a<|im_end|>b <think> c",
    "x = {tool call}\n", "\x00\x7f", "e\u0301", "▁▁", "<0xE2>", "\ufffd",
]  # fmt: skip


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(
    kind: str, text: str, loaded: dict[str, Tokenizer], references: dict[str, PreTrainedTokenizerFast]
) -> None:
    ours, theirs = loaded[kind], references[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncates_as_transformers(
    kind: str, side: Literal["left", "right"], loaded: dict[str, Tokenizer], references: dict[str, PreTrainedTokenizerFast]
) -> None:
    ours, theirs = loaded[kind], references[kind]
    theirs.truncation_side = side
    for special in (True, False):
        for length in (ours.num_around(special) + 1, 4, 50):
            ids = ours.encode(TEXTS[3], special, Truncation(length, side))
            assert ids == theirs.encode(TEXTS[3], add_special_tokens=special, truncation=True, max_length=length)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_tokens_of_a_text(kind: str, loaded: dict[str, Tokenizer]) -> None:
    beginnings = [loaded[kind].first_tokens(TEXTS[3], count) for count in range(1, 60)]
    assert beginnings[0] != TEXTS[3] == beginnings[-1] and all(TEXTS[3].startswith(each) for each in beginnings)
    assert [len(each) for each in beginnings] == sorted(len(each) for each in beginnings)


@pytest.mark.parametrize("kind", KINDS)
def test_knows_its_special_tokens(kind: str, loaded: dict[str, Tokenizer], references: dict[str, PreTrainedTokenizerFast]) -> None:
    ours, theirs = loaded[kind], references[kind]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.has_chat_template


@pytest.mark.skipif(not PYDOC.exists(), reason="the model is not there")
def test_reads_the_model_of_this_repository() -> None:
    ours, theirs = Tokenizer.load(PYDOC), AutoTokenizer.from_pretrained(PYDOC)
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    prompt = ours.render_chat(messages).text
    for tokenize, opened in ((False, False), (False, True), (True, True)):
        more = {"return_dict": False, "tokenize": tokenize, "add_generation_prompt": opened}
        assert ours.apply_chat_template(messages, tokenize=tokenize, add_generation_prompt=opened) == theirs.apply_chat_template(
            messages, **more
        )
    assert prompt == ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(conversation=messages, return_dict=False) == ours.apply_chat_template(messages)
    with pytest.raises(TypeError, match="return_tensors"):
        ours.apply_chat_template(messages, return_tensors="pt")
    for text in [*TEXTS, prompt]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind: str, text: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[kind]
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    plain = text if kind == "byte_level" else text.replace("▁", " ")  # SentencePiece cannot tell its mark from a space
    put_in_front = kind == "sentence_piece" or (kind == "metaspace" and not plain.startswith(" "))
    assert spelled.decode() == (" " + plain if plain and put_in_front else plain)


def test_shows_tokens_as_openai_does(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    assert [tokenizer.token_text(id_) for id_ in tokenizer.encode(" the€")] == [" the", "\\xe2", "\\x82", "\\xac"]
    assert tokenizer.token_text(tokenizer.encode("<|im_end|>")[0]) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.encode("日本")[0]) == "日本".encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    llama = loaded["sentence_piece"]
    ids = llama.encode("th€", add_special_tokens=False)
    assert [llama.token_text(id_) for id_ in ids] == [" th", "\\xe2", "\\x82", "\\xac"]
    words = loaded["suffixed"]
    assert "".join(words.token_text(id_) for id_ in words.encode("the fox")) == "thefox"


def test_a_lone_surrogate_is_the_callers_fault(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        loaded["byte_level"].encode("a\ud800b")


def test_never_cuts_or_pads(folders: dict[str, Path], tmp_path: Path) -> None:
    backend = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    text = "one two three four five" * 3
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode(text)) == text


def test_tokens_that_only_the_config_knows(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    next_id = Tokenizer.load(tmp_path).vocab_size
    added = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config = {"eos_token": "<new>", "added_tokens_decoder": {str(next_id): added}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a<new>")[-1] == tokenizer.eos_token_id == next_id
    assert next_id in tokenizer.special_ids
    config["added_tokens_decoder"] = {str(next_id + 7): added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="<new>"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("decoder", [[1], {"x": {"content": "a"}}, {"7": "a"}, {"7": {}}], ids=["list", "name", "text", "nothing"])
def test_added_tokens_of_another_form_are_named(decoder: object, folders: dict[str, Path], tmp_path: Path) -> None:
    """So says who reads them for prompts, and who reads them for grammars."""
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    for read in (Tokenizer.load, read_tokenizer_json):
        with pytest.raises(ModelError, match=r"added_tokens_decoder must hold tokens"):
            read(tmp_path)


def test_a_special_token_that_the_vocabulary_lacks_gets_no_id(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers gives it the next one, for which the model has no embedding."""
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    before = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    assert Tokenizer.load(tmp_path).encode("[PAD]") == before.encode("[PAD]")


def test_reads_special_tokens_map_of_old_checkpoints(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    legacy = {"eos_token": "<|im_end|>", "pad_token": {"content": "<think>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
    ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.token_text(ours.eos_token_id or 0) == theirs.eos_token == "<|im_end|>"
    ids = ours.encode("<think>a")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a"


def test_says_what_is_wrong_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_without_tokenizer_json_transformers_converts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match=r"no tokenizer\.json, and transformers cannot"):
        Tokenizer.load(tmp_path)
    assert "transformers converts it" in caplog.text


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """Transformers makes a tokenizer of it, to which every word is unknown."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(ModelError, match=r"no file with a vocabulary; BertTokenizer knows vocab\.txt"):
        Tokenizer.load(tmp_path)


def test_conversion_by_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    backend = json.loads(KINDS["byte_level"]().to_str())
    vocab = backend["model"]["vocab"] | {"<|endoftext|>": len(backend["model"]["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in backend["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the quick Grüße")) == "the quick Grüße"


def test_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, starling_engine.frontend.assembler as _; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_model_embeds_every_token_that_is_no_added_one(tmp_path: Path) -> None:
    """The vocabulary may list added tokens or not, and have gaps between ids."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 5, "<listed>": 7}, unk_token="a"))
    backend.add_special_tokens(["<listed>", "<new>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 8 and tokenizer.special_ids == {7, 3}
    tokenizer.check_fits(6)
    with pytest.raises(ModelError, match="vocab_size: the tokenizer has token 5, the model has 5 embeddings"):
        tokenizer.check_fits(5)
