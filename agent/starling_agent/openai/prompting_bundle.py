"""Tells routers how this endpoint makes tokens of prompts: one document, which is made when somebody asks for it."""

import asyncio
import gzip
import hashlib
from typing import NamedTuple

import structlog

from starling_agent.contract.backend import ServedPrompting
from starling_agent.openai.prompting import Prompting

log = structlog.get_logger("starling.agent")


class PromptingBundle(NamedTuple):
    """A ServedPrompting as JSON by gzip, and its digest."""

    digest: str
    data: bytes


class PromptingBundles:
    """The bundle of one endpoint. Whatever files the checkpoint has its tokenizer in, the bundle has the same form."""

    def __init__(self, prompting: Prompting) -> None:
        self._prompting = prompting
        self._making: asyncio.Task[PromptingBundle] | None = None

    @property
    def digest(self) -> str:
        """Digest of the bundle; empty where it cannot be made, and until it is, which begins when it is first asked for."""
        making = self._begun()
        return making.result().digest if making.done() and making.exception() is None else ""

    async def made(self) -> PromptingBundle:
        return await asyncio.shield(self._begun())

    def _begun(self) -> "asyncio.Task[PromptingBundle]":
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
            self._making.add_done_callback(_log_failure)
        return self._making

    def _make(self) -> PromptingBundle:
        made, settings = self._prompting, self._prompting.settings
        renderer = made.tokenizer.renderer
        served = ServedPrompting(
            tokenizer=made.tokenizer.backend.to_str(),
            named_tokens=dict(renderer.named_tokens),
            templates=dict(renderer.templates.by_name),
            info=made.tokenizer.info,
            vocab_size=made.vocab_size,
            max_model_len=made.max_model_len,
            max_prompts=settings.max_prompts,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        data = gzip.compress(served.model_dump_json().encode(), compresslevel=1, mtime=0)
        return PromptingBundle(hashlib.sha256(data).hexdigest(), data)


def _log_failure(making: "asyncio.Task[PromptingBundle]") -> None:
    if not making.cancelled() and (error := making.exception()) is not None:
        log.error("routers cannot be told how tokens are made of prompts", exc_info=error)
