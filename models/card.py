"""The model card and its samples: every number in it is measured or counted when the model is trained."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from chat import Conversation
from corpus import Corpus, Entry
from heldout import Measured
from tokenizers import Tokenizer
from tokens import END, rendered, token_id
from transformers import Qwen3ForCausalLM

if TYPE_CHECKING:
    from run import Progress

_QUESTIONS = (
    "What does os.path.join do?",
    "How do I use textwrap.wrap?",
    "Explain the `with` statement.",
    "What is collections.Counter?",
    "What is the json module?",
    "What does shutil.copy2 do?",  # held out: the model can only guess from the name
    "Who are you?",
)


@dataclass(frozen=True)
class Sample:
    question: str
    text: str
    ended: bool


@dataclass(frozen=True)
class Facts:
    """What the model was made from."""

    corpus: Corpus
    characters: int
    names: int
    model: Qwen3ForCausalLM
    seed: int
    temperature: float


def samples(model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int) -> list[Sample]:
    """Answers drawn with the model's own generation settings, one each, unselected."""
    torch.manual_seed(seed)
    generator: Any = model  # `generate` is typed for other classes than this one
    drawn = []
    for question in _QUESTIONS:
        prompt = rendered(Conversation(((question, ""),))).removesuffix(f"{END}\n")
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        whole = generator.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=250)
        output = whole[0, ids.shape[1] :]
        text = tokenizer.decode(output.tolist(), skip_special_tokens=True)
        drawn.append(Sample(question, text, ended=int(output[-1]) == token_id(tokenizer, END)))
    return drawn


def write(path: Path, facts: Facts, progress: Progress, measured: Measured, drawn: list[Sample]) -> None:
    config = facts.model.config
    generation = facts.model.generation_config
    template = Path(__file__).with_name("card-template.md").read_text(encoding="utf-8")
    path.write_text(
        template.format(
            python=platform.python_version(),
            parameters=facts.model.num_parameters() / 1e6,
            config=config,
            sources=_sources(facts.corpus.train),
            characters=facts.characters / 1e6,
            names=facts.names,
            held_out=len(facts.corpus.held_out),
            progress=progress,
            seen=progress.tokens / 1e6,
            minutes=progress.seconds / 60,
            speed=progress.tokens / progress.seconds,
            seed=facts.seed,
            measured=measured,
            resumed=_resumed(progress.resumed_at),
            uncalibrated=progress.curve[-1][-1],
            temperature=facts.temperature,
            curve="\n".join(_curve_row(*point) for point in progress.curve),
            generation=generation,
            samples="\n\n".join(_quoted(sample) for sample in drawn),
        ),
        encoding="utf-8",
    )


def _sources(entries: tuple[Entry, ...]) -> str:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in entries:
        counts[_source(entry)] += 1
        sizes[_source(entry)] += sum(map(len, entry.paragraphs))
    return "\n".join(f"| {name} | {counts[name]:,} | {sizes[name]:,} |" for name in sorted(counts))


def _source(entry: Entry) -> str:
    if entry.file.startswith("topics/"):
        return "Language reference (`pydoc_data/topics.py`), pages"
    if entry.file.startswith("listed/"):
        return "Docstrings of what is written in C or made at run time"
    if "#" in entry.file:
        return "Comments of two lines or more in the standard library"
    if entry.file.endswith(".py"):
        return "Docstrings in the source of the standard library"
    return "Licence and notes that ship with the library, files"


def _curve_row(step: int, tokens: int, train: float, held_out: float) -> str:
    bar = "█" * round(held_out * 5)
    return f"| {step} | {tokens / 1e6:.2f} | {train:.3f} | {held_out:.3f} | `{bar}` |"


def _resumed(steps: list[int]) -> str:
    if not steps:
        return "repeats it with the same batches"
    places = " and ".join(f"step {step:,}" for step in steps)
    return f"gives a similar model, not the same: this run was interrupted and resumed at {places}"


def _quoted(sample: Sample) -> str:
    text = sample.text.replace("\n", "\n> ").replace("\n> \n", "\n>\n")
    return f"**{sample.question}**\n\n> {text}{'' if sample.ended else ' … (cut off)'}"
