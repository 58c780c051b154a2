"""Small tokenizers of every kind that language models come with, trained here, as checkpoint folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from starling_engine.frontend.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "The quick brown fox jumps over the lazy dog.", "  def f(x):\n      return x + 1\n", "one two three four five",
    "stop here and go on there", "Grüße aus Köln, s'il vous plaît", "aaa aaaa aaaaa ab abc abcd", "the end of the story",
] * 3  # fmt: skip

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "日本", AddedToken("{tool call}", lstrip=True)])
    return backend


def sentence_piece() -> Backend:
    """Llama 2, Mistral: BPE with bytes for what has no token; the decoder drops the space in front."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = _with_byte_fallback(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))
    backend.decoder = decoders.Sequence(steps)
    return backend


def gemma() -> Backend:
    """As Llama 2's, without the space in front."""
    backend = _with_byte_fallback(normalizers.Replace(" ", "▁"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def metaspace() -> Backend:
    """The Metaspace decoder, which drops every space mark of the first token."""
    backend = _with_byte_fallback(normalizers.Sequence([]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def unigram() -> Backend:
    """T5: no bytes; unknown characters are lost."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def suffixed() -> Backend:
    """CLIP, GPT-1: the end of a word is part of its token, so a token alone does not tell its text."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _with_byte_fallback(normalizer: normalizers.Normalizer) -> Backend:
    """Trains on ASCII alone and puts a token for each byte in front."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {token: id_ for id_, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    maker.__name__: maker for maker in (byte_level, sentence_piece, gemma, metaspace, unigram, suffixed)
}
BYTE_KINDS = ["byte_level", "sentence_piece", "gemma", "metaspace"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint's tokenizer files for each kind."""
    made = {}
    for name, maker in KINDS.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        maker().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "__type": "AddedToken"},
            "chat_template": CHATML,
        }
        if name == "byte_level":
            config["image_token"] = "<think>"
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="session")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}
