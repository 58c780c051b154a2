"""The tokenizer, and the training text as windows of tokens."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from chat import Conversation, Questions
from corpus import Entry
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
IGNORED = -100  # the label that cross_entropy skips

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# Words with the space before them, single digits, punctuation with the breaks after it, and runs of space.
_WORDS = (
    r"(?:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE: every string can be encoded and comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, context: int) -> None:
    """With settings that version 4 of transformers and other engines read as well."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def rendered(conversation: Conversation) -> str:
    """As the chat template renders it; written out because a template engine would take far longer."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in conversation.messages())


def document(entry: Entry) -> str:
    return "\n\n".join((entry.signature or entry.name, *entry.paragraphs))


def file_documents(entries: Iterable[Entry]) -> list[list[str]]:
    """The texts of each file in their order; what was there before, in any file, is left out."""
    seen: set[tuple[str, ...]] = set()
    files: dict[str, list[str]] = {}
    for entry in entries:
        if entry.paragraphs not in seen:
            seen.add(entry.paragraphs)
            files.setdefault(entry.file, []).append(document(entry))
    return list(files.values())


class Windows:
    """Packs documents and conversations into windows, so that most windows start where a text starts."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[list[str]], questions: Questions) -> None:
        self._tokenizer = tokenizer
        self._end = token_id(tokenizer, END_OF_TEXT)
        self._files = [encode(tokenizer, [text + "\n\n" for text in file]) for file in files]
        self._questions = questions

    def epoch(self, seed: int, length: int) -> list[list[int]]:
        """One pass over all files and a question about each entry, shuffled; no window is over `length`."""
        rng = random.Random(seed)
        chats = encode(self._tokenizer, [rendered(c) for c in self._questions.epoch(rng)])
        pieces = list(_cut(self._documents(rng), length)) + list(_cut(chats, length))
        rng.shuffle(pieces)
        windows = _pack(pieces, length)
        rng.shuffle(windows)
        return windows

    def _documents(self, rng: random.Random) -> Iterator[list[int]]:
        """Files, broken at other places in every epoch, so that texts are seen alone and in context."""
        for file in self._files:
            current = [self._end]
            for text in file:
                current += text
                if rng.random() < 0.3:
                    yield [*current, self._end]
                    current = [self._end]
            yield [*current, self._end]

    def batches(self, seed: int, length: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless (inputs, labels), each (tokens // length, length) int64; padding has no label."""
        rows = tokens // length
        epoch = 0
        while True:
            windows = self.epoch(seed * 1_000_003 + epoch, length)
            for start in range(0, len(windows) - rows + 1, rows):
                yield padded(windows[start : start + rows], length, self._end)
            epoch += 1


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def padded(windows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.full((len(windows), length), pad)
    labels = torch.full((len(windows), length), IGNORED)
    for row, window in enumerate(windows):
        inputs[row, : len(window)] = labels[row, : len(window)] = torch.tensor(window)
    return inputs, labels


def _cut(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    for ids in documents:
        yield from (ids[start : start + length] for start in range(0, len(ids), length))


def _pack(pieces: Iterable[list[int]], length: int, open_windows: int = 32) -> list[list[int]]:
    """First fit into a few open windows: 97% full, and no text is cut that fits into a window."""
    done: list[list[int]] = []
    current: list[list[int]] = []
    for piece in pieces:
        home = next((w for w in current if len(w) + len(piece) <= length), None)
        if home is not None:
            home.extend(piece)
            continue
        if len(current) == open_windows:
            current.sort(key=len)
            done.append(current.pop())
        current.append(list(piece))
    return done + current
