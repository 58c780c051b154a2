"""Chooses how a prompt is looked for: by the engine's own blocks, or by its text."""

from collections.abc import Callable, Iterable

from starlette.types import Scope
from starling_agent.contract.backend import BackendState

from starling_router.exact import owner_of
from starling_router.learned import LearnedPrompts
from starling_router.prompt import RoutedBody, RoutedPrompt, text_prompt


class PromptSource:
    """Reads prompts, exactly where it is known what some backends have cached, and their tokenizer.

    `followed` gives these backends' states.
    """

    def __init__(self, learned: LearnedPrompts, followed: Callable[[], Iterable[BackendState]]) -> None:
        self._learned, self._followed = learned, followed

    async def read(self, scope: Scope, body: bytes, fields: RoutedBody) -> RoutedPrompt:
        for state in self._followed():
            exact = self._learned.get(state.prompting)
            if exact is not None:
                prompt = await exact.read(scope, body, fields, state)
                if prompt is not None:
                    return prompt
                break
        return text_prompt(fields, owner_of(scope) or b"")
