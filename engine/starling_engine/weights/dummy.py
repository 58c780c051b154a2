"""Random weights for `load_format="dummy"`, to measure a model's speed and memory without its checkpoint."""

import math
import zlib
from collections.abc import Mapping

import torch

from starling_engine.weights.weight_slot import Loadable, WeightSlot

POOL = 1 << 22
"""Random numbers that are drawn in all. A matrix's rows are parts of the pool, so filling costs a copy, not a draw."""

HOST = torch.device("cpu")

QUERY_AND_KEY = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")
"""Matrices that decide how sharply attention chooses."""

EXPERT_TABLE = ".tid2eid"
"""Experts of each token, by its id: the first ones, since a slot does not tell how many there are."""

DECAYS = ".A_log"
SLOW_DECAY = -2.0
"""Logarithm of a recurrent state's rate of decay, with which it remembers some ten tokens."""


def load_dummy(model: Loadable, seed: int, device: torch.device = HOST) -> None:
    """Fills every slot, see `DummyWeights`."""
    DummyWeights(seed, device).fill(model.weight_slots())


class DummyWeights:
    """Fills slots with numbers that depend on `seed` and the slot's name alone, so that every rank makes the same.

    They are scaled so that greedy output varies and depends on the context. With the usual small numbers a model repeats one token,
    whatever its attention does. The pool lies on `device`: where that is the model's, a matrix is a copy within its memory.
    """

    def __init__(self, seed: int, device: torch.device = HOST) -> None:
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed)).to(device)
        self._scaled: dict[float, torch.Tensor] = {}

    def fill(self, slots: Mapping[str, WeightSlot]) -> None:
        for name, slot in slots.items():
            is_vector = len(slot.shape) == 1 or name.endswith((DECAYS, EXPERT_TABLE))
            whole = _vector(name, slot) if is_vector else _matrix(name, slot, self._pool, self._scaled)
            slot.load(whole[slot.part] if slot.part else whole)


def _vector(name: str, slot: WeightSlot) -> torch.Tensor:
    if name.endswith(EXPERT_TABLE):
        return torch.arange(slot.shape[-1]).expand(slot.shape)
    if name.endswith(DECAYS):
        return torch.full(slot.shape, SLOW_DECAY)
    return torch.zeros(slot.shape) if name.endswith(".bias") else torch.ones(slot.shape)


def _matrix(name: str, slot: WeightSlot, pool: torch.Tensor, scaled: dict[float, torch.Tensor]) -> torch.Tensor:
    """Returns a view with overlapping rows. Few scales occur, so the pool is scaled once for each, in `scaled`."""
    rows, columns = slot.shape[0], math.prod(slot.shape[1:])
    scale = _scale(name, columns)
    if scale not in scaled:
        scaled[scale] = (pool * scale).bfloat16()
    spare = POOL - columns
    start = zlib.crc32(name.encode()) % (spare // 2)
    stride = max(1, (spare - start) // rows)
    return scaled[scale].as_strided((rows, columns), (stride, 1), start).view(slot.shape)


def _scale(name: str, columns: int) -> float:
    if "embed" in name:
        return 1.0
    gain = 3.0 if any(part in name for part in QUERY_AND_KEY) else 1.5
    return gain / math.sqrt(columns)
