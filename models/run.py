"""The training loop: a budget, a schedule, two optimizers, and checkpoints that lose nothing but a minute."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from heldout import losses
from tokenizers import Tokenizer
from tokens import IGNORED, Windows
from transformers import Qwen3ForCausalLM

TOKENS_PER_STEP = 4096
# Window lengths in tokens. Attention costs more in long windows, so only the last part of training has them.
SHORT, LONG = 256, 1024
LONG_FROM = 0.8
WARM_UP, DECAY_FROM = 0.02, 0.4
MATRIX_RATE, OTHER_RATE = 6e-3, 4e-3


@dataclass(frozen=True)
class Budget:
    """How long to train: for `steps` where given, else for `seconds` of training steps."""

    seconds: float
    steps: int | None = None


@dataclass
class Progress:
    """Where training stands. The curve's points are (step, tokens, training loss, held-out loss).

    `resumed_at` has the steps at which an interrupted run went on, with other batches than it would have had.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, int, float, float]] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)


def rate_at(done: float) -> float:
    """The factor on the learning rates when a share `done` of training is over: up, level, linearly to 0."""
    if done < WARM_UP:
        return done / WARM_UP
    return min(1.0, (1.0 - done) / (1.0 - DECAY_FROM))


def optimizers(masters: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which saves many steps; AdamW for embeddings and norms."""
    matrices = [p for name, p in masters.items() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in masters.items() if p.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def mean_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return losses(model, inputs, labels).sum() / (labels[:, 1:] != IGNORED).sum()


class Run:
    """One training run: `steps()` yields after every step; the caller decides when to look and when to save.

    The model computes in bf16, twice as fast as fp32 where CPUs have it; the optimizers work on fp32 masters.
    """

    def __init__(self, windows: Windows, model: Qwen3ForCausalLM, budget: Budget, seed: int, compiled: bool) -> None:
        self.model, self.progress = model, Progress()
        self._windows, self._budget, self._seed = windows, budget, seed
        self._masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        self._optimizers = optimizers(self._masters)
        self._mean_loss = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss

    @property
    def done(self) -> float:
        """The share of training that is over."""
        at, budget = self.progress, self._budget
        return min(1.0, at.step / budget.steps if budget.steps else at.seconds / budget.seconds)

    def steps(self) -> Iterator[float]:
        """Trains until done; yields each step's mean loss in nats per token."""
        while self.done < 1.0:
            length = SHORT if self.done < LONG_FROM else LONG
            # The seed has the step in it so that a resumed run goes on with batches that it has not seen yet.
            seed = self._seed + self.progress.step
            for inputs, labels in self._windows.batches(seed, length, TOKENS_PER_STEP):
                started = perf_counter()
                loss = self._step(inputs, labels)
                self.progress.seconds += perf_counter() - started
                self.progress.step += 1
                self.progress.tokens += int((labels != IGNORED).sum())
                yield loss
                if self.done >= 1.0 or (length == SHORT and self.done >= LONG_FROM):
                    break

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        loss = self._mean_loss(self.model, inputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self._masters[name].grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        for optimizer, rate in zip(self._optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(self.done)
            optimizer.step()
        self._publish()
        return loss.item()

    @torch.no_grad()
    def _publish(self) -> None:
        """Rounds the masters into the model."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._masters[name])

    def save(self, path: Path, tokenizer: Tokenizer) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "masters": self._masters,
            "optimizers": [o.state_dict() for o in self._optimizers],
        }
        state |= {"progress": vars(self.progress), "tokenizer": tokenizer.to_str()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # never half a checkpoint

    def resume(self, state: dict[str, Any]) -> None:
        for name, saved in state["masters"].items():
            self._masters[name].copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        if self.done < 1.0:
            self.progress.resumed_at.append(self.progress.step)
        self._publish()
