"""The tokenizer, and the training text as windows of tokens."""

import random
from collections.abc import Iterable, Iterator, Sequence

import torch
from chat import Conversation, Questions
from corpus import Entry
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
IGNORED = -100  # the label that cross_entropy skips

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# Words with the space before them, single digits, punctuation with the line breaks after it, and runs of space.
_WORDS = r"(?:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every string can be encoded and comes back as it was."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def rendered(conversation: Conversation) -> str:
    """As the chat template renders it; written out because the template engine would take minutes per epoch."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in conversation.messages())


def document(entry: Entry) -> str:
    return "\n\n".join((entry.signature or entry.name, *entry.paragraphs))


def file_documents(entries: Iterable[Entry]) -> list[str]:
    """Everything in one file as one document, like a page of `pydoc`; text that was there before is left out."""
    seen: set[tuple[str, ...]] = set()
    pages: dict[str, list[str]] = {}
    for entry in entries:
        if entry.paragraphs not in seen:
            seen.add(entry.paragraphs)
            pages.setdefault(entry.file, []).append(document(entry))
    return ["\n\n".join(page) for page in pages.values()]


class Windows:
    """Packs whole documents and conversations into windows, so that most windows start where a text starts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], questions: Questions) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self._documents = [[*ids, self._end] for ids in encode(tokenizer, documents)]
        self._questions = questions

    def epoch(self, seed: int, length: int) -> list[list[int]]:
        """One pass over all documents and one question about each entry, shuffled; each window is `length` or less."""
        rng = random.Random(seed)
        chats = encode(self._tokenizer, [rendered(c) for c in self._questions.epoch(rng)])
        pieces = list(_cut(self._documents, length)) + list(_cut(chats, length))
        rng.shuffle(pieces)
        windows = _pack(pieces, length)
        rng.shuffle(windows)
        return windows

    def batches(self, seed: int, length: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless (inputs, labels), each (tokens // length, length) int64; labels are inputs, padding ignored."""
        rows = tokens // length
        epoch = 0
        while True:
            windows = self.epoch(seed * 1_000_003 + epoch, length)
            for start in range(0, len(windows) - rows + 1, rows):
                yield padded(windows[start : start + rows], length, self._end)
            epoch += 1


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


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
