"""Steps of few tokens, recorded once a size: one native call in place of some 200, each of which costs Python 10 us and more.

At batch 1 that was 18 % of a step's time with the 0.6B shape in int4, and 8 % in bfloat16. It was 45 % with SmolLM2-135M in int4.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.ledger import RECORDED_TOKENS
from starling_engine.native.recording import NotRecordable, Recording, Scratch, record
from starling_engine.worker.host.batch import StepInputs
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.prompt_outputs import RunnableModel

logger = logging.getLogger("starling.worker")


class Around(Protocol):
    """Work before and after a step's model, by native kernels: it is recorded with the step."""

    def before(self, rows: int) -> None:
        """Makes the step's inputs."""
        ...

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples of the logits [R, vocabulary] -> [R]."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of some tokens and rows. What it has is of its last replay.

    hidden, logits  of all tokens
    sampled         what is sampled after the step; None where that is no part of it
    embeds          it looks embeddings up, too
    """

    recording: Recording
    hidden: torch.Tensor
    logits: torch.Tensor
    sampled: npt.NDArray[np.int64] | None
    embeds: bool


class RecordedSteps:
    """Runs steps in which all tokens are sampled from. A model that computes by more than native kernels is left alone."""

    def __init__(self, model: RunnableModel, pages: KVPages, table_widths: Sequence[int], scratch_bytes: int) -> None:
        self._model = model
        self._pages = pages
        self._embedded: torch.Tensor | None = None
        """Embeddings of steps that do not look them up."""
        self.inputs = _inputs(RECORDED_TOKENS, table_widths)
        """Inputs of replays, for as many rows as tokens. KV groups share all but tables and slots."""
        self._scratch = Scratch(scratch_bytes)
        self._steps: dict[tuple[int, int, bool], RecordedStep] = {}
        self.possible = True
        """False once the model has called what cannot be recorded."""

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns hidden states and logits of all tokens, valid until the next step; None where a step has to run as it comes.

        So have steps with drafts of a model with a recurrent state: what they compute from is kept.
        """
        given = inputs.metadata[0]
        tokens, rows = len(inputs.ids), len(given.context_lens)
        if tokens > RECORDED_TOKENS or not self.possible or inputs.metadata[-1].replay is not None:
            return None
        kept = self.inputs.metadata[0]
        self.inputs.ids[:tokens] = inputs.ids
        kept.positions[:tokens] = given.positions
        kept.query_start[: rows + 1] = given.query_start
        kept.context_lens[:rows] = given.context_lens
        for kept, given in zip(self.inputs.metadata, inputs.metadata, strict=True):
            kept.slot_mapping[:tokens] = given.slot_mapping
            kept.block_tables[:rows, : given.block_tables.shape[1]] = given.block_tables
        step = self.replay(tokens, rows)
        return None if step is None else (step.hidden, step.logits)

    def replay(self, tokens: int, rows: int, around: Around | None = None) -> RecordedStep | None:
        """Runs a step of `inputs`, which `around` makes, if given. Returns None where `run` does."""
        step = self._steps.get((tokens, rows, around is not None))
        if step is None:
            return self._record(tokens, rows, around)
        if not step.embeds:
            self._embed(tokens, rows, around)
        step.recording.replay()
        self._pages.tick()
        return step

    def _embed(self, tokens: int, rows: int, around: Around | None) -> torch.Tensor:
        """Makes the inputs of a step that does not look embeddings up, and looks them up: [tokens, hidden_size]."""
        if around is not None:
            around.before(rows)
        embedded = self._model.embed(self.inputs.ids[:tokens], self.inputs.metadata[0].positions[:tokens])
        if self._embedded is None:
            self._embedded = embedded.new_empty(RECORDED_TOKENS, embedded.shape[1])
        self._embedded[:tokens] = embedded
        return self._embedded[:tokens]

    def _record(self, tokens: int, rows: int, around: Around | None) -> RecordedStep | None:
        """Runs a step while it is recorded: all of it, or what comes after embeddings."""
        ids = self.inputs.ids[:tokens]
        metadata = [
            AttentionMetadata(
                kept.positions[:tokens],
                kept.slot_mapping[:tokens],
                kept.query_start[: rows + 1],
                kept.context_lens[:rows],
                kept.block_tables[:rows],
                kept.max_query_len,
            )
            for kept in self.inputs.metadata
        ]

        def behind(embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            hidden = self._model.forward(ids, self._pages.context(metadata, None), embedded)
            logits = self._model.logits(hidden)
            return hidden, logits, None if around is None else around.after(logits)

        def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            if around is not None:
                around.before(rows)
            return behind(self._model.embed(ids, metadata[0].positions))

        embeds = True
        try:
            recording, found = record(whole, self._scratch)
        except NotRecordable as reason:
            logger.debug("embeddings are looked up before recorded steps: the model calls %s", reason)
            embeds, embedded = False, self._embed(tokens, rows, around)
            try:
                recording, found = record(lambda: behind(embedded), self._scratch)
            except NotRecordable as reason:
                logger.info("steps of few tokens are not recorded: the model calls %s", reason)
                self.possible = False
                return None
        hidden, logits, sampled = found
        step = RecordedStep(recording, hidden, logits, None if sampled is None else sampled.numpy(), embeds)
        self._steps[tokens, rows, around is not None] = step
        return step


def _inputs(tokens: int, table_widths: Sequence[int]) -> StepInputs:
    """Makes the inputs of as many rows as tokens, whose block tables have `table_widths` blocks, those of one KV group each."""
    positions = torch.zeros(tokens, dtype=torch.int64)
    query_start = torch.zeros(tokens + 1, dtype=torch.int32)
    context_lens = torch.zeros(tokens, dtype=torch.int32)
    metadata = [
        AttentionMetadata(
            positions,
            torch.zeros(tokens, dtype=torch.int64),
            query_start,
            context_lens,
            torch.zeros(tokens, width, dtype=torch.int32),
            max_query_len=tokens,
        )
        for width in table_widths
    ]
    return StepInputs(torch.zeros(tokens, dtype=torch.int64), metadata)
