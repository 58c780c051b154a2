"""Chooses the library for prompts' attention by running it beside Triton's kernels, on the device and in the cache that serve."""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.prompt_libraries import installed_libraries
from starling_engine.attention.prompts import (
    LEAST_TOKENS,
    HeadShape,
    PromptLibrary,
    TakesLibraries,
    head_shape,
    is_plain,
)
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import QueryBlocks

MOST_TOKENS = 8192
"""Tokens of the longest prompt that is tried: what is true of it is true of longer ones."""
ROUNDED = 2e-2
"""Sums in another order differ in bf16 by so much of the largest number."""
FASTER = 0.95
"""A library has to take less than this share of Triton's time."""
PLANNED_SECONDS = 10e-3
"""A prompt of a length that was not met may take so much longer at first; more, and it plans anew for every length."""
CALLS = 5

logger = logging.getLogger("starling.attention")

Offer = Callable[[HeadShape, int], Mapping[str, PromptLibrary | str]]
"""Returns the libraries for such heads and blocks of so many tokens, or why each cannot serve."""


def offer_of(device: torch.device, dtype: torch.dtype) -> Offer:
    """Returns what is installed for a device. On others than NVIDIA's GPUs that is nothing."""
    if device.type != "cuda":
        return lambda _shape, _block_size: {}
    major = torch.cuda.get_device_capability(device)[0]
    return lambda shape, block_size: installed_libraries(shape, dtype, block_size, major)


@dataclass(frozen=True, slots=True)
class Tried:
    """Layers that are alike to a library: weights and cache of one of them."""

    layer: AttentionWeights
    kv: torch.Tensor


def gathered_elements(layers: Iterable[AttentionWeights], block_size: int, context: int, offer: Offer) -> int:
    """Returns the most elements that a library which may serve one of the layers gathers of a sequence of `context` tokens."""
    shapes = {head_shape(layer) for layer in layers}
    gathering = [
        shape
        for shape in shapes
        if any(not isinstance(library, str) and library.gathers for library in offer(shape, block_size).values())
    ]
    return max((2 * kv_heads * dim * context for _, kv_heads, dim in gathering), default=0)


def tried_layers(layers: Iterable[tuple[AttentionWeights, torch.Tensor]], dtype: torch.dtype) -> list[Tried]:
    """Returns one layer of each shape of heads that libraries can serve."""
    shapes: dict[HeadShape, Tried] = {}
    for layer, kv in layers:
        if is_plain(layer, dtype, kv):
            shapes.setdefault(head_shape(layer), Tried(layer, kv))
    return list(shapes.values())


class PromptTrial:
    """Tries libraries in an empty cache, whose tables are `width` blocks wide, for steps of up to `tokens` tokens.

    The cache is zero again behind it. Triton gets its query blocks as in any step.
    """

    def __init__(
        self,
        attention: TakesLibraries,
        dtype: torch.dtype,
        tick: Callable[[], None],
        *,
        width: int,
        tokens: int,
        query_blocks: QueryBlocks | None,
    ) -> None:
        self._attention = attention
        self._dtype = dtype
        self._tick = tick
        self._width = width
        self._tokens = tokens
        self._query_blocks = query_blocks

    def choose(self, tried: Tried, offer: Offer) -> None:
        """Leaves the fastest library that gives what Triton gives to the backend, and logs it; or why there is none."""
        shape, block_size = head_shape(tried.layer), tried.kv.shape[3]
        reasons: dict[str, str] = {}
        times: dict[str, tuple[tuple[float, float], PromptLibrary]] = {}
        most = min(self._tokens, MOST_TOKENS, self._width * block_size, (len(tried.kv) - 1) * block_size)
        offered = offer(shape, block_size)
        if not offered:
            return
        for name, library in offered.items():
            if isinstance(library, str):
                reasons[name] = library
            elif most < LEAST_TOKENS:
                reasons[name] = f"no prompt here has {LEAST_TOKENS} tokens in a step"
            else:
                found = self._try(tried, library, most)
                if isinstance(found, str):
                    reasons[name] = found
                else:
                    times[name] = found, library
        if times:
            (ours, theirs), library = min(times.values(), key=lambda each: each[0][1])
            self._attention.libraries[shape] = library
            reasons |= {name: f"{found[1] * 1e3:.2f} ms" for name, (found, _) in times.items() if name != library.name}
            chosen = f"{library.name}, {theirs * 1e3:.2f} ms for {most} tokens where triton takes {ours * 1e3:.2f} ms"
        else:
            chosen = "triton"
        why = "".join(f"; not {name}: {reason}" for name, reason in reasons.items())
        logger.info("attention of prompts with %d query and %d key-value heads of %d: %s%s", *shape, chosen, why)

    def _try(self, tried: Tried, library: PromptLibrary, most: int) -> tuple[float, float] | str:
        """Returns the seconds of Triton and of the library; or why that is not taken."""
        try:
            with torch.inference_mode():
                return self._compare(tried, library, most)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            return f"it failed: {error}"
        finally:
            self._attention.libraries.pop(head_shape(tried.layer), None)
            tried.kv.zero_()

    def _compare(self, tried: Tried, library: PromptLibrary, most: int) -> tuple[float, float] | str:
        kv, device = tried.kv, tried.kv.device
        blocks = -(-most // kv.shape[3])
        table = torch.zeros(1, self._width, dtype=torch.int32, device=device)
        table[0, :blocks] = 1 + torch.randperm(blocks, device=device).int()
        kv[1 : blocks + 1].normal_()
        q = torch.randn(most, tried.layer.num_heads, tried.layer.head_dim, dtype=self._dtype, device=device)

        def step(queries: int, context: int, *, by_library: bool) -> torch.Tensor:
            lens = ([0, queries], [context])
            starts, contexts = (torch.tensor(each, dtype=torch.int32, device=device) for each in lens)
            positions = torch.arange(context - queries, context, device=device)
            meta = AttentionMetadata(positions, positions, starts, contexts, table, queries, host_lens=lens, exact_lens=lens)
            if self._query_blocks is not None:
                meta.query_blocks = torch.from_numpy(self._query_blocks.listed(np.array([queries], np.int32))).to(device)
            if by_library:
                self._attention.libraries[head_shape(tried.layer)] = library
            else:
                self._attention.libraries.pop(head_shape(tried.layer), None)
            self._tick()
            return self._attention.attend(q[:queries], tried.layer, kv, meta)

        for queries in (max(LEAST_TOKENS, most // 2 - 3), most):
            expected, found = (step(queries, most, by_library=which).float() for which in (False, True))
            off = float((expected - found).abs().max() / expected.abs().max())
            if not off <= ROUNDED:  # so that NaN never passes
                return f"{queries} of {most} tokens are off by {off:.0e} of the largest"
        size = LEAST_TOKENS
        while size <= most:
            step(size, size, by_library=True)  # what is planned for a size is planned here
            size *= 2
        new = self._seconds(lambda: step(most - 1, most, by_library=True), 1, device)
        theirs = self._seconds(lambda: step(most, most, by_library=True), CALLS, device)
        ours = self._seconds(lambda: step(most, most, by_library=False), CALLS, device)
        if new > 2 * theirs + PLANNED_SECONDS:
            return f"a length that it has not met takes {new * 1e3:.0f} ms more"
        if theirs > FASTER * ours:
            return f"it takes {theirs * 1e3:.2f} ms for {most} tokens, and triton {ours * 1e3:.2f} ms"
        return ours, theirs

    def _seconds(self, work: Callable[[], object], calls: int, device: torch.device) -> float:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times)
