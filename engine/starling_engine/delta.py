"""What comes out of the scheduler: each request's gains, and the core's counters."""

import msgspec

from starling_engine.step import LogprobRow


class Stats(msgspec.Struct, omit_defaults=True):
    """The core's counters. Those named total only grow while the core lives.

    What is named epoch is of the experts that the core's ranks loaded for a change of size, by where they came from. What is named
    eplb is of all cores that share experts, and only the first of them has it; 0 where nothing is known yet.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    eplb_balance: float = 0.0
    eplb_balance_before: float = 0.0
    eplb_balance_after: float = 0.0
    eplb_rearrangements_total: int = 0
    eplb_experts_moved_total: int = 0
    eplb_seconds_total: float = 0.0
    epoch_peer_bytes_total: int = 0
    epoch_checkpoint_bytes_total: int = 0


def add_totals(total: Stats, more: Stats) -> None:
    """What only grows, of cores that come and go."""
    for name in Stats.__struct_fields__:
        if name.endswith("_total"):
            setattr(total, name, getattr(total, name) + getattr(more, name))


MOVED = "moved"


class Delta(msgspec.Struct, omit_defaults=True):
    """What a request gained since the last Delta for it. `attempt` fences answers to an earlier try.

    `finish_reason` is stop, length, abort, error, or moved: the core hands the request over, and another is to continue it from its
    resume record. `stop_token` is the token id that stopped it when it is not the model's end-of-sequence token; `cached_tokens` is
    set once, with the first Delta.
    """

    id: str
    attempt: int = 0
    tokens: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    pooled: list[float] | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    error_param: str | None = None
    refused: bool = False
