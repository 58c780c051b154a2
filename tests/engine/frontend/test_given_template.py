"""`chat_template`: a file in place of the model's own template."""

from pathlib import Path

import pytest
from starling_engine import AsyncEngine, EngineArgs
from starling_engine.errors import ConfigError

from tests.engine.real_engine import MODEL


async def _tokenizer_text(file: Path) -> str:
    engine = await AsyncEngine._without_cores(EngineArgs(model=MODEL, chat_template=str(file)))
    try:
        return engine.tokenizer.render_chat([{"role": "user", "content": "hi"}]).text
    finally:
        await engine.shutdown()


async def test_it_renders_chats(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    assert await _tokenizer_text(file) == "<hi>"


@pytest.mark.parametrize("content", [None, b"{% if %}", b"\xff"])
async def test_a_file_without_one_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"chat\.jinja has no chat template: ") as refused:
        await _tokenizer_text(file)
    assert refused.value.field == "chat_template"
