"""The prompts of a reranker that is a language model: its template of a query, a document and an instruction."""

import asyncio
import re
from collections.abc import Sequence

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.pairs import PairPrompt, Vector, answer_scores
from starling_engine.frontend.pooled_texts import Render
from starling_engine.frontend.prompt_encoder import PromptEncoder, PromptForm
from starling_engine.frontend.tokenizer import Truncation
from starling_engine.model_config.pooler import PoolerConfig
from starling_engine.params import PoolingParams

QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be \
"yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | \
default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""Template of Qwen3-Reranker, whose first checkpoints have that of Qwen3's chats instead."""
_ROLES = ("query", "document")


class Reranker:
    """Makes prompts with the checkpoint's template if it knows pairs, as sentence-transformers does, else with Qwen3-Reranker's."""

    def __init__(self, encoder: PromptEncoder, render: Render, pooler: PoolerConfig, params: PoolingParams) -> None:
        """`params` are those of a prompt whose numbers are the logits of "yes" and, in most models, of "no"."""
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._render_chat = render
        self._default = None if pooler.default_prompt_name is None else pooler.prompts[pooler.default_prompt_name]
        self._rendering = pooler.rendering
        self._params = params
        self._has_own = knows_pairs(self._tokenizer.renderer.templates.by_name.get("default", ""))

    async def prompt(
        self, query: str, document: str, instruction: str | None, truncation: Truncation | None, param: str
    ) -> PairPrompt:
        """See `PairScorer`. A template may take no instruction."""
        return PairPrompt(await self._ids(query, document, instruction, truncation, param), self._params)

    def scores(self, found: Sequence[Vector], use_activation: bool | None) -> list[float]:
        """See `PairScorer`: the probability of "yes" against "no", or the difference of their logits."""
        return answer_scores(found, use_activation)

    async def _ids(
        self, query: str, document: str, instruction: str | None, truncation: Truncation | None, param: str
    ) -> list[int]:
        if truncation is None:
            return await self._encoder.chat(await self._render(query, document, instruction), param, PromptForm(False, room=0))
        document = self._encoder.possible(document)
        while True:
            rendered = await self._render(query, document, instruction)
            excess = len(rendered.text) - self._encoder.max_characters
            if 0 < excess < len(document):  # what is beside the document has its characters too
                document = document[:-excess]
                continue
            ids = await self._encoder.encode(rendered, param, False)
            if len(ids) <= truncation.tokens:
                return ids
            document = await asyncio.to_thread(self._without, document, len(ids) - truncation.tokens, param)

    def _without(self, document: str, excess: int, param: str) -> str:
        """Returns the document without its last tokens."""
        kept = len(self._tokenizer.encode(document, add_special_tokens=False)) - excess
        if kept < 1:
            raise InvalidRequest(f"leaves no room for {param} behind the query and the template", "truncate_prompt_tokens")
        return self._tokenizer.first_tokens(document, kept)

    async def _render(self, query: str, document: str, instruction: str | None) -> ChatPrompt:
        messages = [{"role": role, "content": text} for role, text in zip(_ROLES, (query, document), strict=True)]
        system = self._default if instruction is None else instruction
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        if self._has_own:
            prompt = await self._render_chat(messages=messages, **self._rendering)
        else:  # a template of our own needs no process
            prompt = self._tokenizer.renderer.render(messages, template=QWEN3_RERANKER, variables={})
        if instruction is not None and instruction.strip() not in prompt.text:
            raise InvalidRequest("this model's template takes no instruction", "instruction")
        return prompt


def knows_pairs(template: str) -> bool:
    """Says if a template names the roles that sentence-transformers gives the two sides of a pair."""
    return all(re.search(rf"""["']{role}["']""", template) for role in _ROLES)
