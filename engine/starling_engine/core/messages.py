"""Messages between frontends and engine cores: msgpack over ZeroMQ, never pickle."""

import msgspec

from starling_engine.request import EngineRequest
from starling_engine.step import LogprobRow


class Add(msgspec.Struct, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    """Ends requests of this frontend; their blocks are free by the next step. No answer is sent for them."""

    ids: list[str]


class Ping(msgspec.Struct, tag="ping"):
    """A frontend says that it is there; the core answers with Pong at once, also while a step runs."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The frontend that started the core asks it to end."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forgets every cached block that no request uses."""


FromFrontend = Add | Abort | Ping | Shutdown | ResetPrefixCache


class Stats(msgspec.Struct, omit_defaults=True):
    """The core's counters. Those named total only grow while the core lives."""

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


class Delta(msgspec.Struct, omit_defaults=True):
    """What a request gained since the last Delta for it. `attempt` fences answers to an earlier try.

    `finish_reason` is stop, length, abort or error; `stop_token` the token id that stopped it when it is not the model's
    end-of-sequence token; `cached_tokens` is set once, with the first Delta.
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


class Deltas(msgspec.Struct, tag="deltas"):
    deltas: list[Delta]
    stats: Stats


class Hello(msgspec.Struct, tag="hello"):
    """First answer to a frontend's first Ping: who the core is and what it can hold."""

    incarnation: str
    max_tokens_per_request: int
    ledger: str
    stats: Stats


class Pong(msgspec.Struct, tag="pong"):
    """`progress` grows with every layer that a worker finishes; `busy` says whether it should."""

    incarnation: str
    progress: int
    busy: bool
    stats: Stats


class Loading(msgspec.Struct, tag="loading"):
    """The core is not ready yet; `phase` and `detail` say what it does."""

    phase: str
    detail: str = ""


FromCore = Deltas | Hello | Pong | Loading
