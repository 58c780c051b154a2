"""Trains starling-pydoc, the small model that `make demo` and the end-to-end tests serve, on CPU, in minutes.

    python models/train.py --out models/starling-pydoc --minutes 15 [--seed 0] [--threads 2]

The same seed and the same number of steps on the same Python give the same batches; only `--minutes` depends on
the machine, because it decides how many steps there are time for.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import card
import torch
import torch.nn.functional as F
from chat import Questions
from corpus import Corpus, load
from tokens import END_OF_TEXT, IGNORED, Windows, document, encode, file_documents, padded, rendered, train_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096
TOKENS_PER_STEP = 4096
SHORT, LONG = 256, 1024  # window lengths; attention over long windows costs more, so only the end of training has them
LONG_FROM = 0.8
WARM_UP, DECAY_FROM = 0.02, 0.4
MATRIX_RATE, OTHER_RATE = 6e-3, 4e-3
REPORT_SECONDS, SAVE_SECONDS = 4.0, 60.0


@dataclass
class Progress:
    """Where training stands; a checkpoint holds it. The curve is (step, tokens, train loss, held-out loss)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class HeldOut:
    """Token lists whose loss is reported: documents (all tokens) and, for answers, how many leading tokens are asked."""

    documents: list[list[int]]
    document_bytes: int
    answers: list[list[int]]
    asked: list[int]


def new_model(vocabulary: int, eos: int, pad: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return Qwen3ForCausalLM(config)


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which halves the steps needed; AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def rate_at(progress: float) -> float:
    """Warm up, hold, then fall linearly to zero: the factor on both learning rates for progress in [0, 1]."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def losses(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log likelihoods in nats, (rows, length - 1); zero where the label is ignored."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    flat = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED)
    return flat.view(inputs.shape[0], -1)


@torch.no_grad()
def total_loss(model: Qwen3ForCausalLM, texts: Sequence[list[int]], skipped: Sequence[int], pad: int) -> tuple[float, int]:
    """The summed loss and the count of predicted tokens, each text alone, without its first `skipped` tokens."""
    total, count = 0.0, 0
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        inputs, labels = padded([texts[i][:LONG] for i in rows], min(LONG, len(texts[rows[-1]])), pad)
        for row, i in enumerate(rows):
            labels[row, : skipped[i]] = IGNORED
        total += losses(model, inputs, labels).sum().item()
        count += int((labels[:, 1:] != IGNORED).sum())
    return total, count


def held_out_texts(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> HeldOut:
    """Documents start after an end-of-text token, so that their first token is predicted too."""
    texts = [document(entry) for entry in corpus.held_out]
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    # What lies beyond the window of evaluation is dropped here, so that bytes and tokens cover the same text.
    documents = [[end, *ids][:LONG] for ids in encode(tokenizer, texts)]
    size = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in documents)
    chats = [rendered(c) for c in Questions(corpus.held_out).one_each()]
    asked = [text.index("assistant\n") + len("assistant\n") for text in chats]
    prompts = encode(tokenizer, [text[:cut] for text, cut in zip(chats, asked, strict=True)])
    return HeldOut(documents, size, encode(tokenizer, chats), [len(ids) for ids in prompts])


class Run:
    """One training run: `steps()` yields after every step; the caller decides when to look, save and stop."""

    def __init__(self, windows: Windows, model: Qwen3ForCausalLM, seed: int, minutes: float, steps: int | None) -> None:
        self.model, self.progress = model, Progress()
        self._windows, self._seed, self._seconds, self._steps = windows, seed, minutes * 60, steps
        self._optimizers = optimizers(model)

    @property
    def done(self) -> float:
        """The share of training that is over, in steps where their number is given and in time where it is not."""
        share = self.progress.step / self._steps if self._steps else self.progress.seconds / self._seconds
        return min(1.0, share)

    def steps(self) -> Iterator[float]:
        """Trains until done; yields each step's mean loss in nats per token."""
        while self.done < 1.0:
            length = SHORT if self.done < LONG_FROM else LONG
            # The seed has the step in it so that a resumed run goes on with batches that it has not seen yet.
            for inputs, labels in self._windows.batches(self._seed + self.progress.step, length, TOKENS_PER_STEP):
                started = time.perf_counter()
                loss = self._step(inputs, labels)
                self.progress.seconds += time.perf_counter() - started
                self.progress.step += 1
                self.progress.tokens += int((labels != IGNORED).sum())
                yield loss
                if self.done >= 1.0 or (length == SHORT and self.done >= LONG_FROM):
                    break

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        values = losses(self.model, inputs, labels)
        loss = values.sum() / (labels[:, 1:] != IGNORED).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(self.done)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self._optimizers]}
        torch.save({**state, "progress": vars(self.progress)}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def train(run: Run, held_out: HeldOut, pad: int, checkpoint: Path) -> None:
    """Runs to the end, with a line every few seconds, a point of the curve every 5%, and a checkpoint every minute."""
    reported = saved = time.perf_counter()
    recent: list[float] = []
    for loss in run.steps():
        recent.append(loss)
        now, at = time.perf_counter(), run.progress
        if now - reported > REPORT_SECONDS:
            reported, left = now, at.seconds * (1 - run.done) / max(run.done, 1e-6)
            speed = at.tokens / at.seconds
            print(f"{run.done:6.1%} step {at.step} loss {sum(recent) / len(recent):.3f} {speed:.0f} tokens/s ETA {left:.0f} s", flush=True)
        if run.done >= len(at.curve) / 20 + 0.05 or run.done >= 1.0:
            total, count = total_loss(run.model, held_out.documents, [0] * len(held_out.documents), pad)
            at.curve.append((at.step, at.tokens, sum(recent) / len(recent), total / count))
            print(f"{run.done:6.1%} held-out loss {total / count:.3f}", flush=True)
            recent.clear()
        if now - saved > SAVE_SECONDS:
            saved = now
            run.save(checkpoint)
    run.save(checkpoint)


def measure(model: Qwen3ForCausalLM, held_out: HeldOut, pad: int) -> card.Measured:
    """The numbers of the card, from the weights as they are stored."""
    total, count = total_loss(model, held_out.documents, [0] * len(held_out.documents), pad)
    answers, answer_tokens = total_loss(model, held_out.answers, held_out.asked, pad)
    return card.Measured(total / count, total / math.log(2) / held_out.document_bytes, count, answers / answer_tokens, answer_tokens)


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.95, repetition_penalty=1.05, eos_token_id=ends, pad_token_id=ends[1]
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "starling-pydoc")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for training, without reading and measuring")
    parser.add_argument("--steps", type=int, help="train for this many steps instead, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/starling-pydoc.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    print("reading the documentation of this Python ...", flush=True)
    corpus = load()
    documents = file_documents(corpus.train)
    questions = Questions(corpus.train)
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters; questions about {len(questions)} names")
    tokenizer = train_tokenizer([*documents, *(rendered(c) for c in questions.one_each())], CONTEXT)
    pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    held_out = held_out_texts(tokenizer, corpus)
    model = new_model(len(tokenizer), tokenizer.eos_token_id, pad)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    run = Run(Windows(tokenizer, documents, questions), model, options.seed, options.minutes, options.steps)
    if options.resume:
        run.resume(options.checkpoint)
    train(run, held_out, pad, options.checkpoint)

    save_model(model, tokenizer, options.out)
    stored = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.bfloat16)
    measured = measure(stored, held_out, pad)
    samples = card.samples(stored, tokenizer, options.seed)
    facts = card.Facts(corpus, documents, len(questions), stored, len(tokenizer), options.seed)
    card.write(options.out / "README.md", facts, run.progress, measured, samples)
    print(f"held-out loss {measured.loss:.3f}, perplexity {math.exp(measured.loss):.1f}, {measured.bits_per_byte:.3f} bits per byte")
    for sample in samples:
        print(f"\n> {sample.question}\n{sample.text}")


if __name__ == "__main__":
    main()
