"""Prompts of lists and of rerankers; without a server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starling_agent.openai.prompts import PromptReader
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.chat import ChatTemplates
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.cross_encoder import CrossEncoder, pair_scorer
from starling_engine.frontend.prompt_encoder import THREAD_CHARACTERS, PromptForm
from starling_engine.frontend.render_process import ChatRendering
from starling_engine.frontend.reranker import Reranker
from starling_engine.frontend.tokenizer import Tokenizer, Truncation
from starling_engine.model_config.config import load_model_config
from starling_engine.model_config.pooler import PoolerConfig
from starling_engine.params import PoolingParams

from tests.engine.checkpoints import VARIANTS, edit_json, write_checkpoint

PLAIN = Tokenizer.load(Path(__file__).parents[2] / "models/starling-pydoc")
LONGEST = 512
PAIR = "Q {{ messages[-2].content }} D {{ messages[-1].content }}{% set roles = ['query', 'document'] %}"
TEXTS = ["Lists are mutable."] * 20


def reader(tokenizer: Tokenizer = PLAIN) -> PromptReader:
    return PromptReader(tokenizer, tokenizer.vocab_size, LONGEST, max_prompts=len(TEXTS))


@contextlib.asynccontextmanager
async def reranker(template: str | None = None) -> AsyncIterator[Reranker]:
    tokenizer = PLAIN if template is None else Tokenizer(PLAIN.backend, {}, ChatTemplates({"default": template}))
    with contextlib.closing(ChatRendering(tokenizer.renderer, max_waiting=lambda: 8)) as rendering:
        yield Reranker(reader(tokenizer), rendering.render, PoolerConfig(), PoolingParams())


async def test_others_run_between_the_prompts_of_a_list():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await reader().read(TEXTS, "input", PromptForm(add_special_tokens=False))
    assert turns >= len(TEXTS)
    async with reranker() as ranks:
        for text in TEXTS:
            await ranks.prompt("a", text, None, None, "documents")
    running.cancel()
    assert turns >= 2 * len(TEXTS)


@pytest.mark.parametrize("beyond", [-1000, 0, 12])
async def test_a_document_of_any_length_is_cut_to_the_truncation(beyond):
    document = "Lists. " * ((reader().max_characters + beyond) // 7)
    assert len(document) > THREAD_CHARACTERS
    async with reranker() as ranks:
        pair = await ranks.prompt("What is a list?", document, None, Truncation(LONGEST), "documents[0]")
    text = PLAIN.decode(pair.ids, skip_special_tokens=False)
    assert LONGEST - 2 <= len(pair.ids) <= LONGEST
    assert "<Query>: What is a list?\n<Document>: Lists. Lists." in text and "</think>" in text


async def test_a_query_that_leaves_a_document_no_room_is_refused():
    async with reranker() as ranks:
        for query in ("a " * LONGEST, "a " * reader().max_characters):
            with pytest.raises(InvalidRequest):
                await ranks.prompt(query, "Lists.", None, Truncation(LONGEST), "documents[0]")


@pytest.mark.parametrize(
    ("template", "takes"),
    [("{{ messages[0].content | trim }} " + PAIR, True), ("{{ messages[0].content }} " + PAIR, True), (PAIR, False)],
)
async def test_a_template_may_trim_an_instruction(template, takes):
    refusal = contextlib.nullcontext() if takes else pytest.raises(InvalidRequest, match="takes no instruction")
    async with reranker(template) as ranks:
        with refusal:
            pair = await ranks.prompt("a", "b", "Find it\n", None, "documents[0]")
            assert PLAIN.decode(pair.ids).split() == ["Find", "it", "Q", "a", "D", "b"]


async def no_template(**_: Any) -> ChatPrompt:
    raise AssertionError("nothing is asked of it")


def test_labels_of_yes_and_no_are_no_reranker(tmp_path: Path):
    """Only the head that a GGUF file has of Qwen3-Reranker reads a pair through its template; labels alone do not tell."""
    write_checkpoint(tmp_path, VARIANTS["qwen3"])
    labels = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "yes", "1": "no"}}
    edit_json(tmp_path / "config.json", labels)
    assert isinstance(pair_scorer(reader(), no_template, load_model_config(tmp_path)), CrossEncoder)
    edit_json(tmp_path / "config.json", {"answer_head": True})
    assert isinstance(pair_scorer(reader(), no_template, load_model_config(tmp_path)), Reranker)
