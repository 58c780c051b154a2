"""Renders chats in other processes, so that no template can block the server's event loop, fill its memory or crash it.

A single filter (`'x' | center(10000000000)`, a power of large integers) never returns to code that could count its steps.
"""

from collections.abc import Callable
from typing import Any

from starling_engine.errors import JobTooLarge, PromptTooLong
from starling_engine.frontend.chat import ChatRenderer
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.shown_tools import Message
from starling_engine.frontend.template import LARGEST_PROMPT
from starling_engine.ipc.limited_child import ProcessLimits
from starling_engine.ipc.limited_process import JobWords, LimitedProcess

RENDER_LIMITS = ProcessLimits(seconds=2.0, answer_seconds=10.0, memory_bytes=256 << 20)
"""Limits of compiling a template, its loops and its filters; long ones take milliseconds."""
_WORDS = JobWords("chat with its template", "chats", "rendered")


class RenderProcess(LimitedProcess):
    """A process that renders one chat at a time."""

    def __init__(self, renderer: ChatRenderer, limits: ProcessLimits = RENDER_LIMITS, *, max_waiting: Callable[[], int]) -> None:
        module = "starling_engine.frontend.render_child"
        super().__init__(module, renderer.to_json(), limits, _WORDS, max_waiting=max_waiting)

    async def render(self, **job: Any) -> ChatPrompt:
        """Renders a chat as `ChatRenderer.render` does. Raises as `answer` does, and PromptTooLong."""
        characters = sum(map(_characters, job["messages"]))
        if characters > LARGEST_PROMPT:  # they would not fit in the memory of the process either
            why = f"the prompt is too long: {characters} characters in messages, of which at most {LARGEST_PROMPT} are possible"
            raise PromptTooLong(why, "messages")
        rendered = await self.answer(job, "messages")
        control = rendered["control"]
        return ChatPrompt(rendered["text"], None if control is None else tuple((start, end) for start, end in control))


def _characters(message: Message) -> int:
    """Returns the length of a message's text."""
    content = message.get("content")
    if isinstance(content, list):
        return sum(len(part.get("text", "")) for part in content)
    return len(content) if isinstance(content, str) else 0


class ChatRendering:
    """A process for the checkpoint's templates, and one for templates of requests, which can hold up only each other."""

    def __init__(self, renderer: ChatRenderer, limits: ProcessLimits = RENDER_LIMITS, *, max_waiting: Callable[[], int]) -> None:
        self._templates = renderer.templates
        processes = (RenderProcess(renderer, limits, max_waiting=max_waiting) for _ in range(2))
        self._checkpoint_process, self._request_process = processes

    def open(self) -> None:
        """Starts the process now, so that the first chat need not wait for it."""
        if self._templates.by_name:
            self._checkpoint_process.warm_up()

    async def render(self, *, template: str | None, **job: Any) -> ChatPrompt:
        """Renders a chat, as `RenderProcess.render`. One that is too large for the checkpoint's template is too long."""
        if template is not None and template not in self._templates.by_name:
            return await self._request_process.render(template=template, **job)
        try:
            return await self._checkpoint_process.render(template=template, **job)
        except JobTooLarge as error:
            raise PromptTooLong(error.message, error.param) from None

    def close(self) -> None:
        self._checkpoint_process.close()
        self._request_process.close()
