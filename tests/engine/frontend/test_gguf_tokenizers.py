"""Tokenizers of GGUF files that transformers made, and whose special tokens the package `gguf` wrote: the same tokens."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.tokenizer import read_gguf_tokenizer
from transformers import BertTokenizer, GemmaTokenizer, PreTrainedTokenizerBase, XLMRobertaTokenizer

TEXTS = (
    "Hello, World!  It's 1998; naïve café\n\n\tcode()  ",
    "你好，世界。 e\u0301clair ﬁne",
    "line\nline\n\n\nend\U0001f600 <|turn>user\nhi<turn|>",
    " leading  and trailing ",
    "",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _bert(*, lower: bool) -> PreTrainedTokenizerBase:
    letters = LETTERS + "0123456789!',.;()" + "" if lower else LETTERS + LETTERS.upper() + "0123456789!',.;()é"
    words = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, "你", "好", "hello", "it"]
    words += [f"##{letter}" for letter in letters] + ["##orld", "##fe", "##ing"]
    return BertTokenizer(vocab={word: id_ for id_, word in enumerate(words)}, do_lower_case=lower)


def _gemma() -> PreTrainedTokenizerBase:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "\n", "\t", *LETTERS, *LETTERS.upper(), *"0123456789!',.;()é你好"]
    merges: Any = [
        ("\n", "\n"),
        ("\n\n", "\n"),
        ("▁", "▁"),
        ("l", "l"),
        ("e", "ll"),
        ("H", "ell"),
        ("Hell", "o"),
        ("▁", "a"),
        ("▁a", "n"),
    ]
    words += ["".join(merge) for merge in merges]
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, extra_special_tokens=["<|turn>", "<turn|>"])


def _map_of_ligatures() -> bytes:
    """Returns a map of characters, as SentencePiece compiles them, that makes "ﬁ" of three bytes into "fi" by a double array."""
    units = [0] * 1024
    at = 0
    units[0] = 256 << 10
    base = 256
    for depth, byte in enumerate("ﬁ".encode()):
        at = base ^ byte
        following = 512 + 256 * (depth - 1) if depth else 512
        units[at] = byte | ((at ^ following) << 10)
        base = following
    units[at] |= 1 << 8
    units[base] = 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + b"fi\0"


def _xlm_roberta() -> PreTrainedTokenizerBase:
    words = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words += [(letter, -8.0 - at / 100) for at, letter in enumerate(["▁", *LETTERS, *LETTERS.upper(), *"0123456789!',.;()é"])]
    words += [
        ("▁hel", -6.0),
        ("lo", -5.5),
        ("▁Hello", -7.5),
        ("▁trail", -7.0),
        ("ing", -4.0),
        ("▁a", -5.0),
        ("and", -5.2),
        ("<mask>", 0.0),
    ]
    characters: Any = _map_of_ligatures()
    return XLMRobertaTokenizer(vocab=words, _spm_precompiled_charsmap=characters)


def _phantom(token: str) -> str:
    return token.removeprefix("##") if token.startswith("##") else f"▁{token}"


def written(tokenizer: PreTrainedTokenizerBase, folder: Path, kind: str, rows: int = 0) -> GgufFile:
    """Writes what llama.cpp's converter does of the tokenizer: tokens and their types by its rules, special ones by `gguf`.

    `rows` that no token has get names, as older ones gave them.
    """
    tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "bert")
    writer.add_tokenizer_model(kind)
    if kind == "gemma4":
        texts, scores, types = zip(*gguf.LlamaHfVocab(folder).all_tokens(), strict=True)
        tokens: list[Any] = list(texts)
        writer.add_token_scores(list(scores))
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
    else:
        tokens = list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
        special = set(tokenizer.all_special_tokens)
        types = tuple(3 if token in special else 1 for token in tokens)
        if kind == "bert":
            tokens = [token if token in special else _phantom(token) for token in tokens]
            tokens += [f"[PAD{len(tokens) + row}]" for row in range(rows)]
            types += (4, 5) * rows
        else:
            types = tuple(2 if token == tokenizer.unk_token else type_ for token, type_ in zip(tokens, types, strict=True))
            writer.add_token_scores([score for _, score in stored["model"]["vocab"]])
            writer.add_add_space_prefix(True)
            writer.add_precompiled_charsmap(base64.b64decode(stored["normalizer"]["precompiled_charsmap"]))
    writer.add_token_list(tokens)
    writer.add_token_types(list(types[: len(tokens)]))
    gguf.SpecialVocab(folder, load_merges=kind == "gemma4", n_vocab=len(tokens)).add_to_gguf(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(folder / "model.gguf")


TOKENIZERS = {
    "bert": lambda: _bert(lower=True),
    "bert-cased": lambda: _bert(lower=False),
    "gemma4": _gemma,
    "t5": _xlm_roberta,
}


def test_names_of_rows_without_tokens_say_nothing_of_letters(tmp_path: Path) -> None:
    theirs = _bert(lower=True)
    ours, _, _ = read_gguf_tokenizer(written(theirs, tmp_path, "bert", rows=2))
    assert ours.get_vocab_size() == len(theirs) + 2
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, kind = TOKENIZERS[name](), name.partition("-")[0]
    ours, named, _ = read_gguf_tokenizer(written(theirs, tmp_path, kind))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]
    ids = theirs(TEXTS[3], add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=False)
    if kind != "gemma4":
        pair = ours.encode("hello", "it's")
        expected = theirs("hello", "it's")
        assert pair.ids == expected["input_ids"]
        assert pair.type_ids == theirs.backend_tokenizer.encode("hello", "it's").type_ids
    assert named["pad_token"] == theirs.pad_token
