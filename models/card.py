"""The model card and its samples: everything in it is measured or counted when the model is trained."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from corpus import Corpus
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

if TYPE_CHECKING:
    from train import Progress

_QUESTIONS = (
    "What does os.path.join do?",
    "How do I use textwrap.wrap?",
    "Explain the `with` statement.",
    "What is collections.Counter?",
    "What is the json module?",
    "Who are you?",
)


@dataclass(frozen=True)
class Measured:
    """Held-out numbers: losses in nats per token; `answer_*` over the answers to questions about held-out names."""

    loss: float
    bits_per_byte: float
    tokens: int
    answer_loss: float
    answer_tokens: int


@dataclass(frozen=True)
class Sample:
    question: str
    text: str
    ended: bool


@dataclass(frozen=True)
class Facts:
    corpus: Corpus
    documents: list[str]
    names: int
    model: Qwen3ForCausalLM
    vocabulary: int
    seed: int


def samples(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Sample]:
    """Answers drawn with the model's own generation settings, unselected."""
    torch.manual_seed(seed)
    drawn = []
    for question in _QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=200)[0, prompt["input_ids"].shape[1] :]
        ended = int(output[-1]) == tokenizer.eos_token_id
        drawn.append(Sample(question, tokenizer.decode(output, skip_special_tokens=True), ended))
    return drawn


def write(path: Path, facts: Facts, progress: Progress, measured: Measured, drawn: list[Sample]) -> None:
    path.write_text(f"loss {measured}\n{progress}\n", encoding="utf-8")
