"""Reads prompts as the engine will: with the model's own tokenizer and templates, as the hashes of its cached blocks."""

from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import tokenizers
from starlette.types import Scope
from starling_agent.api_keys import cache_salt_of
from starling_agent.client.bounded import BadAnswer, parse
from starling_agent.contract.backend import BackendState, ServedPrompting
from starling_agent.http.auth import given_key
from starling_agent.http.errors import ApiError
from starling_agent.openai.body_prompt import body_prompt
from starling_agent.openai.endpoint import Caller
from starling_agent.openai.prompting import Prompting
from starling_agent.settings import ServerSettings
from starling_engine.errors import StarlingError
from starling_engine.frontend.chat import ChatTemplates
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.kv.events import event_hash
from starling_engine.kv.hashing import HashChain, chain_root
from starling_engine.model_config.config import load_model_config

from starling_router.prompt import RoutedBody, RoutedPrompt

log = structlog.get_logger("starling.router")
OWNER = "cache_owner"
"""Part of a request's state: what stands for the tenant that the servers are told."""
MOST_WAITING = 1024
"""Chats that may wait to be rendered here; more go by their text."""


class ExactPrompts:
    """Prompts of one model as blocks. `open` and `close` are called in the event loop."""

    def __init__(self, prompting: Prompting) -> None:
        self._prompting = prompting

    @classmethod
    def load(cls, model: Path, settings: ServerSettings) -> "ExactPrompts":
        """Reads a model's folder. Raises ModelError for one without a configuration or a tokenizer."""
        config = load_model_config(model)
        tokenizer = Tokenizer.load(model)
        return cls(Prompting(tokenizer, settings, config.vocab_size, config.max_position, max_waiting=lambda: MOST_WAITING))

    @classmethod
    def served(cls, data: bytes, settings: ServerSettings) -> "ExactPrompts":
        """Reads what a backend's /backend/prompting has. Raises BadAnswer or a StarlingError for what cannot be used."""
        served = parse(ServedPrompting, data, "prompting")
        try:
            backend = tokenizers.Tokenizer.from_str(served.tokenizer)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise BadAnswer(f"its tokenizer cannot be read: {error}"[:300]) from None
        tokenizer = Tokenizer(backend, served.named_tokens, ChatTemplates(served.templates), served.info)
        own = replace(
            settings,
            tool_call_parser=served.tool_call_parser,
            reasoning_parser=served.reasoning_parser,
            max_prompts=served.max_prompts,
        )
        return cls(Prompting(tokenizer, own, served.vocab_size, served.max_model_len, max_waiting=lambda: MOST_WAITING))

    def open(self) -> None:
        self._prompting.open()

    def close(self) -> None:
        self._prompting.close()

    async def read(self, scope: Scope, body: bytes, fields: RoutedBody, state: BackendState) -> RoutedPrompt | None:
        """Returns the prompt as blocks of a backend of that state; None where it has none, or is one to be refused there.

        Of several prompts all tokens count, and the first one is looked for in caches.
        """
        self._prompting.names = tuple(state.models)
        try:
            prompts = await body_prompt(self._prompting, scope["path"], body, scope["state"]["request_id"])
            salt = _cache_salt(scope, fields, state)
        except (ApiError, StarlingError):
            return None
        except Exception:  # the prompt decides alone where a request goes; a backend refuses what is wrong with it
            log.exception("a prompt could not be read; it goes by its text", path=scope["path"])
            return None
        if not prompts:
            return None
        chain, first = HashChain(chain_root(None, salt), state.block_size), prompts[0]
        chain.extend(first, max(0, len(first) - 1))  # the last token is part of no prefix
        return RoutedPrompt(sum(map(len, prompts)), [*map(event_hash, chain.hashes)], state.block_size, exact=True)


def _cache_salt(scope: Scope, fields: RoutedBody, state: BackendState) -> str | None:
    is_salted = state.tenants if OWNER in scope["state"] else state.salted
    owner = owner_of(scope) if is_salted else None
    given = msgspec.json.decode(fields.cache_salt) if fields.cache_salt else None
    return Caller("", None if owner is None else cache_salt_of(owner)).cache_salt(given)


def owner_of(scope: Scope) -> bytes | None:
    """Returns whose request it is: the tenant's that the servers are told, or the key's."""
    owner: bytes | None = scope["state"].get(OWNER)
    return given_key(scope) if owner is None else owner
