"""What the model has not seen, and how well it predicts it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from chat import Questions
from corpus import Entry
from tokenizers import Tokenizer
from tokens import END_OF_TEXT, IGNORED, document, encode, padded, rendered, token_id
from transformers import Qwen3ForCausalLM

WINDOW = 1024  # tokens of a document that count
_ROWS = 32


@dataclass(frozen=True)
class HeldOut:
    """Token lists whose loss is reported.

    `documents` begin with an end-of-text token, so that their first own token is predicted too;
    `document_bytes` is the size of the text that they stand for. Of `answers`, the first `asked`
    tokens (the question) do not count.
    """

    documents: list[list[int]]
    document_bytes: int
    answers: list[list[int]]
    asked: list[int]
    pad: int


@dataclass(frozen=True)
class Measured:
    """Losses in nats per token over held-out documents, and over answers about held-out names."""

    loss: float
    bits_per_byte: float
    tokens: int
    answer_loss: float
    answer_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def answer_perplexity(self) -> float:
        return math.exp(self.answer_loss)


def held_out_texts(tokenizer: Tokenizer, entries: Sequence[Entry]) -> HeldOut:
    end = token_id(tokenizer, END_OF_TEXT)
    # What lies beyond the window is dropped here already, so that bytes and tokens cover the same text.
    documents = [[end, *ids][:WINDOW] for ids in encode(tokenizer, [document(entry) for entry in entries])]
    size = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in documents)
    chats = [rendered(c) for c in Questions(entries).one_each()]
    opening = "assistant\n"
    questions = [text[: text.index(opening) + len(opening)] for text in chats]
    asked = [len(ids) for ids in encode(tokenizer, questions)]
    return HeldOut(documents, size, encode(tokenizer, chats), asked, end)


def losses(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log likelihoods in nats, (rows, length - 1); zero where the label is ignored."""
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
    flat = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED)
    return flat.view(inputs.shape[0], -1)


def document_loss(model: Qwen3ForCausalLM, held_out: HeldOut) -> tuple[float, int]:
    """The summed loss in nats over held-out documents, each alone, and the count of their tokens."""
    return _total(model, held_out.documents, [0] * len(held_out.documents), held_out.pad)


def measure(model: Qwen3ForCausalLM, held_out: HeldOut) -> Measured:
    total, count = document_loss(model, held_out)
    bits_per_byte = total / math.log(2) / held_out.document_bytes
    answers, answer_count = _total(model, held_out.answers, held_out.asked, held_out.pad)
    return Measured(total / count, bits_per_byte, count, answers / answer_count, answer_count)


@torch.no_grad()
def calibrate(model: Qwen3ForCausalLM, held_out: HeldOut) -> float:
    """Divides the model's logits by the temperature, to a tenth, that predicts the held-out documents best.

    A model that saw its text several times is surer of itself than it should be. The logits are linear in the
    weight of the last norm, so the division is by scaling that: nothing that loads the model needs to know.
    Returns the temperature. See Guo et al., On Calibration of Modern Neural Networks (2017).
    """
    norm = model.model.norm.weight
    sharp = norm.detach().clone()
    tried: dict[float, float] = {}
    for temperature in (1 + step / 10 for step in range(11)):
        norm.copy_(sharp / temperature)
        tried[temperature] = document_loss(model, held_out)[0]
        if tried[temperature] > min(tried.values()):  # past the minimum, of which there is one
            break
    best = min(tried, key=lambda temperature: tried[temperature])
    norm.copy_(sharp / best)
    return best


@torch.no_grad()
def _total(model: Qwen3ForCausalLM, texts: Sequence[list[int]], skipped: Sequence[int], pad: int) -> tuple[float, int]:
    total, count = 0.0, 0
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # rows of one batch need little padding
    for start in range(0, len(by_length), _ROWS):
        rows = by_length[start : start + _ROWS]
        inputs, labels = padded([texts[i][:WINDOW] for i in rows], min(WINDOW, len(texts[rows[-1]])), pad)
        for row, i in enumerate(rows):
            labels[row, : skipped[i]] = IGNORED
        total += losses(model, inputs, labels).sum().item()
        count += int((labels[:, 1:] != IGNORED).sum())
    return total, count
