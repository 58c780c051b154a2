"""Steps that are recorded once a size and replayed: the host launches one graph in place of hundreds of kernels."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch

from starling_engine.ipc.collection import no_collection
from starling_engine.kernels.attention_plan import MAX_DECODE_TOKENS
from starling_engine.model_config.config import ModelConfig
from starling_engine.platforms.device_queue import DeviceQueue, Replay
from starling_engine.worker.device.step_buffer import StepShape

logger = logging.getLogger("starling.worker")

LARGEST = 512
"""Tokens, and so rows, of the largest recorded step of decodes. In larger ones the launches take less time than the work."""
PROMPT_SIZES = (32, 64, 128, 256, LARGEST, 768, 1024, 1536, 2048)
LAUNCHES_OF_LAYER = 10
LAUNCH_SECONDS = 15e-6
"""Time of the host for a launch from Python. Like the next one an estimate: nothing was timed."""
PROCESSOR_RATE = 4.5e12
"""FLOP/s of a processor (SM) of Hopper, or a later GPU, in bf16."""
RATED_CAPABILITY = 90


def decode_sizes(max_rows: int) -> list[int]:
    """Returns numbers of rows, one token each. Steps are padded to the next one: a few more rows cost hardly more."""
    top = min(max_rows, LARGEST)
    steps = ((8, 64, 8), (64, 256, 16), (256, top, 32))
    sizes = {1, 2, 4, top, *(size for first, last, by in steps for size in range(first, last, by))}
    return sorted(size for size in sizes if size <= top)


def draft_sizes(max_samples: int) -> list[int]:
    """Returns numbers of tokens of steps of decodes with drafts, in any number of rows: few, since such steps are fewer."""
    top = min(max_samples, LARGEST)
    return sorted({size for size in (2, 4, 8, 16, 32, *range(64, top, 64), top) if 2 <= size <= top})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Returns numbers of tokens of steps with prompts."""
    return [size for size in PROMPT_SIZES if size <= max_tokens]


def launched_tokens(model: ModelConfig, ranks: int, capability: int, processors: int) -> int:
    """Returns up to how many tokens a step with prompts is launched in more time than it runs, at least LARGEST.

    So larger ones are recorded of small models. Not of those with experts, whose weights take as long to be read; nor of those with
    latents, whose long prompts take a form that depends on their lengths; nor of those with a recurrent state, which may have no
    products but its own. `ranks` share each layer.
    """
    if model.moe is not None or model.mla is not None or model.has_state or capability < RATED_CAPABILITY:
        return LARGEST
    heads = max((2 * model.num_heads + 2 * own.count) * own.dim for own in model.kv_heads)
    flops = 2 * model.hidden_size * (heads + 3 * model.widest_mlp) / ranks
    return max(LARGEST, int(LAUNCHES_OF_LAYER * LAUNCH_SECONDS * processors * PROCESSOR_RATE / flops))


class Graphs:
    """Recordings of steps by size. A step of another size runs eagerly, and is recorded then."""

    def __init__(self, queue: DeviceQueue, max_rows: int, max_tokens: int, max_samples: int, max_drafts: int) -> None:
        self._queue = queue
        self._decodes = [StepShape(size, size, size, width=1) for size in decode_sizes(max_rows)]
        # As many rows as tokens: rows may share the drafts in any way, and each token of padding has a row of its own.
        width = min(1 + max_drafts, MAX_DECODE_TOKENS)
        self._drafts = [StepShape(size, size, size, width) for size in draft_sizes(max_samples) if max_drafts]
        # One more row holds the padding tokens.
        self._mixed = [StepShape(size, max_rows + 1, min(size, max_samples)) for size in mixed_sizes(max_tokens)]
        self._replays: dict[StepShape, Replay] = {}
        self._eager: set[StepShape] = set()
        """Shapes that could not be recorded."""

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes to record, the largest first: the others then fit in its memory."""
        return sorted((*self._decodes, *self._drafts, *self._mixed), reverse=True)

    def decode(self, tokens: int, longest: int) -> StepShape | None:
        """Returns the smallest shape with room for decodes of `tokens` tokens in all, and of `longest` in a row."""
        shapes = self._decodes if longest == 1 else self._drafts
        at = bisect_left(shapes, tokens, key=lambda shape: shape.tokens)
        return shapes[at] if at < len(shapes) and longest <= shapes[at].width else None

    def mixed(self, tokens: int, rows: int) -> StepShape | None:
        """Returns the smallest shape with room for `tokens` tokens in `rows` rows, whatever is sampled."""
        at = bisect_left(self._mixed, tokens, key=lambda shape: shape.tokens)
        return self._mixed[at] if at < len(self._mixed) and rows < self._mixed[at].rows else None

    def run(self, shape: StepShape, work: Callable[[], None]) -> None:
        replay = self._replays.get(shape)
        if replay is not None:
            replay()
            return
        work()
        if shape in self._eager:
            return
        began = time.perf_counter()
        for last in (False, True):
            try:
                with no_collection():
                    self._replays[shape] = self._queue.capture(work)
                logger.debug("recorded a step of %s in %.3f s", shape, time.perf_counter() - began)
                return
            except RuntimeError as error:
                if not last and not isinstance(error, torch.OutOfMemoryError):
                    continue  # another thread's call may have ended it
                logger.warning("a step of %s could not be recorded, and runs as it comes: %s", shape, error)
                self._eager.add(shape)
                return

    @property
    def not_recorded(self) -> int:
        """Sizes that could not be recorded: their steps take longer."""
        return len(self._eager)

    def forget(self) -> None:
        """Drops the recordings, because memory has moved."""
        self._replays.clear()
        self._eager.clear()
        self._queue.release_captures()
