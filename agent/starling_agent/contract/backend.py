"""An agent's endpoint describes itself to a router, which brings a key where keys are set.

`GET /backend/proof` shows whether it is of the router's service. `GET /backend` tells its state, and `GET /backend/prompting` how
it makes tokens of prompts. To who shows the routers' token `GET /backend/cache` tells what is cached, without an end: a line of
JSON for each `CoreChanges` of `starling_engine.kv.changes`.
"""

from typing import Any

from pydantic import Field

from starling_agent.contract.config import ContractModel


class BackendLoad(ContractModel):
    """Work of one endpoint. Those named total only grow while its engine lives, and begin at 0 again with the next one.

    running, waiting          requests
    kv_blocks, kv_blocks_used of its KV cache
    prompt_tokens_total       taken in, those found in caches included
    prefix_queries_total      tokens of prompts that were looked for in its caches
    prefix_hits_total         those that were found, on the device or in a tier
    """

    running: int = Field(ge=0)
    waiting: int = Field(ge=0)
    kv_blocks: int = Field(ge=0)
    kv_blocks_used: int = Field(ge=0)
    prompt_tokens_total: int = Field(ge=0)
    generated_tokens_total: int = Field(ge=0)
    prefix_queries_total: int = Field(ge=0)
    prefix_hits_total: int = Field(ge=0)


class BackendState(ContractModel):
    """State of one endpoint.

    pod           name of its pod; empty: it is none
    group         name of the group that the pod is of; empty: it is of none
    revision      of the service that the pod is of; empty: there is none
    ready         it accepts requests, as /ready says
    open          requests that run or wait in its engine
    models        names that requests may give as `model`
    block_size    tokens of a block of its KV cache
    salted        a cached prefix is found only with the API key of the request that cached it
    shows_cache   it has a routers' token, and tells what is cached to who brings it
    prompting     digest of what /backend/prompting has; empty: it has nothing yet, or does not tell what is cached
    tenants       it believes routers, and a cached prefix is found only by the tenant that its router names
    room          requests that it would run at once; below 0: so many wait already; None: it does not say
    step_tokens   prompt tokens that its engine cores compute in one step beside decodes; 0: it does not say
    kv_free       tokens of a sequence for which its cores have free KV blocks, in the mean; None: it does not say
    load          its work; None: it does not say
    """

    pod: str = ""
    group: str = ""
    revision: str = ""
    ready: bool
    open: int = Field(ge=0)
    models: list[str]
    block_size: int = Field(ge=1)
    salted: bool = False
    shows_cache: bool = False
    prompting: str = ""
    tenants: bool = False
    room: int | None = None
    step_tokens: int = Field(default=0, ge=0)
    kv_free: int | None = Field(default=None, ge=0)
    load: BackendLoad | None = None


class BackendProof(ContractModel):
    """Answers `GET /backend/proof?nonce=...`; see `router.token_proof`. Empty: it has no routers' token."""

    proof: str


class ServedPrompting(ContractModel):
    """Tells how an endpoint makes tokens of prompts.

    tokenizer          as `tokenizers` writes it: a tokenizer.json
    named_tokens       bos_token, eos_token, ...
    templates          its chat templates by name
    info               tokenizer_config.json
    max_model_len      tokens of a prompt and its answer
    tool_call_parser   by its name, or auto, or none; it may change what templates are given
    """

    tokenizer: str
    named_tokens: dict[str, str]
    templates: dict[str, str]
    info: dict[str, Any]
    vocab_size: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    max_prompts: int = Field(ge=1)
    tool_call_parser: str
    reasoning_parser: str
