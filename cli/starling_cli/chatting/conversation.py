"""A conversation: its messages so far, and what a question adds to them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starling_agent.parsers.events import Content, Reasoning

from starling_cli.chatting.answer import Message, StreamedAnswer
from starling_cli.chatting.client import AnswerError, ChatClient

MOST_ROUNDS = 20
"""Answers with calls to one question; a model that calls on and on would never end."""

Show = Callable[[Content | Reasoning], None]
AnswerCalls = Callable[[list[Message]], list[Message] | None]
"""Returns the messages with the results of calls; None where nobody is there to give them."""


def _no_results(_: list[Message]) -> None:
    return None


class Conversation:
    """Messages, and the model that they go to. `options` are further fields of each request, those that are not None."""

    def __init__(
        self,
        client: ChatClient,
        options: dict[str, Any],
        *,
        model: str | None = None,
        system: str | None = None,
        answer_calls: AnswerCalls = _no_results,
    ) -> None:
        self.messages: list[Message] = []
        self._client = client
        self._options = {name: value for name, value in options.items() if value is not None}
        self._model = model
        self._answer_calls = answer_calls
        self.set_system(system)

    @property
    def model(self) -> str | None:
        """The model that answers: the server's first where none was named. None: the server has no list."""
        if self._model is None:
            self._model = next(iter(self.models()), None)
        return self._model

    @model.setter
    def model(self, name: str) -> None:
        self._model = name

    def models(self) -> list[str]:
        return self._client.models()

    def set_system(self, text: str | None) -> None:
        """Puts a system message in front in place of any there was; None: without one."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, question: str, show: Show) -> bool:
        """Adds the question and all that answers it; `show` gets the answer piece by piece. False: its calls have no results.

        What ends it early, an error or Ctrl-C, leaves the messages as they were. Raises as ChatClient does.
        """
        with self._unchanged_on_failure():
            self.messages.append({"role": "user", "content": question})
            return self._answer(show)

    def retry(self, show: Show) -> bool:
        """Asks the last question once more, as `ask`. There is one."""
        with self._unchanged_on_failure():
            last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
            self.messages = self.messages[: last + 1]
            return self._answer(show)

    @property
    def has_question(self) -> bool:
        return any(message["role"] == "user" for message in self.messages)

    @contextmanager
    def _unchanged_on_failure(self) -> Iterator[None]:
        before = list(self.messages)
        try:
            yield
        except BaseException:
            self.messages = before
            raise

    def _answer(self, show: Show) -> bool:
        for _ in range(MOST_ROUNDS):
            message = self._stream(show)
            self.messages.append(message)
            if "tool_calls" not in message:
                return True
            results = self._answer_calls(message["tool_calls"])
            if results is None:
                return False
            self.messages += results
        raise AnswerError(f"the model called tools in {MOST_ROUNDS} answers in a row")

    def _stream(self, show: Show) -> Message:
        model = {"model": name} if (name := self.model) else {}
        answer = StreamedAnswer()
        for chunk in self._client.chunks({**model, "messages": self.messages, **self._options}):
            for piece in answer.add(chunk):
                show(piece)
        return answer.message()
