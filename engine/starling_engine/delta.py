"""Outputs of the scheduler: each request's gains, and the core's counters."""

from itertools import zip_longest

import msgspec

from starling_engine.step import LogprobRow


class TierStats(msgspec.Struct, omit_defaults=True):
    """Contents and counters of one tier of the KV cache. Those named total only grow while the core lives.

    Queries and hits count chunks; contents, evictions and corrupt ones count objects. An object is a chunk in the CPU tier. In a
    secondary tier it is a rank's part of a chunk, so there are several where TP or PP is above 1. Loaded came towards the device,
    stored left it. Seconds are those of the copies themselves, of all ranks and threads.

    refused_total    operations that were not tried because the tier is out of order
    full_total       objects that it did not take because it is full
    bypassed_total   requests that computed what they might have found: secondary tiers hang, or take longer than computing
    unwritten_total  chunks that left the CPU tier before they could be written to any secondary tier
    """

    bytes: int = 0
    capacity: int = 0
    """Bytes that it may hold; 0 if unknown."""
    objects: int = 0
    shared: bool = False
    """Several cores share the contents, and each of them reports all."""
    queries_total: int = 0
    hits_total: int = 0
    stored_bytes_total: int = 0
    loaded_bytes_total: int = 0
    store_seconds_total: float = 0.0
    load_seconds_total: float = 0.0
    evictions_total: int = 0
    errors_total: int = 0
    corrupt_total: int = 0
    refused_total: int = 0
    full_total: int = 0
    bypassed_total: int = 0
    unwritten_total: int = 0


class Stats(msgspec.Struct, omit_defaults=True):
    """The core's counters. Those named total only grow while the core lives.

    eplb      counts for all cores that share experts; only the first of them has it; 0 while nothing is known
    epoch     experts that the core's ranks loaded for a change of size, by source
    kv_token_blocks  blocks that hold tokens; of a state alone, which has none, those that all of its sequences may have
    prefix    tokens looked up on the device
    external  tokens missing there, looked up in the tiers
    spec      drafts, of which one is all that a request has in a step; their tokens; those that were accepted
    tiers     stats of the tiers that exist, by name: cpu, filesystem, store
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_token_blocks: int = 0
    steps_total: int = 0
    step_tokens: int = 0
    """Prompt tokens for which a step has room beside decodes, by the time that the latest steps took."""
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    kernels_compiled_total: int = 0
    """Kernels that were first met while serving: everybody waited for them."""
    steps_not_recorded: int = 0
    """Sizes of steps that a device could not record."""
    library_steps_total: int = 0
    """Steps of prompts whose attention a library computed."""
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    external_queries_total: int = 0
    external_hits_total: int = 0
    eplb_balance: float = 0.0
    eplb_balance_before: float = 0.0
    eplb_balance_after: float = 0.0
    eplb_rearrangements_total: int = 0
    eplb_experts_moved_total: int = 0
    eplb_seconds_total: float = 0.0
    epoch_peer_bytes_total: int = 0
    epoch_checkpoint_bytes_total: int = 0
    spec_drafts_total: int = 0
    spec_draft_tokens_total: int = 0
    spec_accepted_tokens_total: int = 0
    jump_forward_tokens_total: int = 0
    """Tokens that were drafted because a grammar allowed no other; they are no draft tokens of speculation."""
    spec_accepted_per_position: list[int] = []
    """Accepted tokens by their position in the draft; grow, too."""
    tiers: dict[str, TierStats] = {}


def add_stats(total: Stats, more: Stats) -> None:
    """Adds all counters of one more core that serves; `more` stays as it is."""
    _sum(total, more, [name for name in Stats.__struct_fields__ if name not in ("tiers", "spec_accepted_per_position")])
    _add_positions(total, more)
    for name, tier in more.tiers.items():
        _add_tier(total.tiers.setdefault(name, TierStats()), tier)


def add_totals(total: Stats, more: Stats) -> None:
    """Adds only the counters that grow, of a core that may come or go."""
    _sum(total, more, _totals(Stats))
    _add_positions(total, more)
    for name, tier in more.tiers.items():
        _sum(total.tiers.setdefault(name, TierStats()), tier, _totals(TierStats))


def _add_positions(total: Stats, more: Stats) -> None:
    both = zip_longest(total.spec_accepted_per_position, more.spec_accepted_per_position, fillvalue=0)
    total.spec_accepted_per_position = [one + other for one, other in both]


def _add_tier(total: TierStats, more: TierStats) -> None:
    _sum(total, more, _totals(TierStats))
    total.shared |= more.shared
    for name in ("bytes", "capacity", "objects"):
        before, added = getattr(total, name), getattr(more, name)
        setattr(total, name, max(before, added) if more.shared else before + added)


def _totals(kind: type[msgspec.Struct]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name.endswith("_total")]


def _sum(total: msgspec.Struct, more: msgspec.Struct, names: list[str]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(more, name))


MOVED = "moved"


class Delta(msgspec.Struct, omit_defaults=True):
    """A request's gains since its last Delta. `attempt` fences answers to an earlier try.

    `finish_reason` is stop, length, repetition, abort, error, or moved: another core is to continue the request from its record.
    `num_accepted_tokens` of `num_draft_tokens` were accepted by speculative decoding.
    `stop_token` is the token id that stopped it, None for the model's end-of-sequence token. `cached_tokens` is set once, with the
    first Delta, and so is `queue_seconds`, from the request's coming to its first step. `pooled` is that of RowExtras.
    """

    id: str
    attempt: int = 0
    tokens: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    pooled: bytes | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: str | None = None
    stop_token: int | None = None
    last_is_text: bool = False
    """True for an output that stopped without a token that says so: its constraint allowed no more."""
    error: str | None = None
    error_param: str | None = None
    refused: bool = False
    asleep: bool = False
    """The error is that the engine sleeps."""
