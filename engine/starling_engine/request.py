"""The resume record: all that any engine core needs to start or to continue a request."""

from collections.abc import Sequence

import msgspec

from starling_engine.params import PoolingParams, SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to compute; the frontend has it, and any core can continue it.

    A request with `n` outputs is n of these; the later ones name the first in `fork_of` and share its prompt's blocks.
    `output_ids` are the tokens so far, from an earlier attempt or another core. `seed` is always set: random numbers depend on
    (seed, position) alone. `arrival` is seconds since the Unix epoch. Lower `priority` runs earlier. `scored` counts the prompt's
    positions whose log probabilities were sent already. `cache_salt` decides with the tokens which cached blocks are valid.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    pooling: PoolingParams | None = None
    output_ids: list[int] = []
    seed: int = 0
    cache_salt: str | None = None
    priority: int = 0
    arrival: float = 0.0
    attempt: int = 0
    scored: int = 0
    fork_of: str | None = None
