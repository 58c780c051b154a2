"""Answers the calls of a model: a program does, or the person at the terminal."""

import json
import shlex
from dataclasses import dataclass

from starling_cli.chatting.answer import Message
from starling_cli.chatting.programs import run_tool
from starling_cli.chatting.terminal import Display, harmless
from starling_cli.chatting.tools import Tools

DECLINED = "error: the user did not allow this call"
MOST_SHOWN = 2000
"""Characters of a program's result; the model gets all of it."""


@dataclass(frozen=True)
class CallAnswerer:
    """Answers calls one after the other. `yes`: programs run without a question."""

    tools: Tools
    display: Display
    yes: bool

    def __call__(self, calls: list[Message]) -> list[Message] | None:
        """Returns messages with the results. None where no person is there for them: then the calls are printed, one a line."""
        self.display.end_line()
        if not self.display.is_person and not self._all_have_programs(calls):
            for call in calls:
                self.display.line(json.dumps(call, ensure_ascii=False))
            return None
        return [{"role": "tool", "tool_call_id": call["id"], "content": self._result(call["function"])} for call in calls]

    def _all_have_programs(self, calls: list[Message]) -> bool:
        return self.yes and all(call["function"]["name"] in self.tools.commands for call in calls)

    def _result(self, function: Message) -> str:
        command = self.tools.commands.get(function["name"])
        if self.display.is_person:
            self.display.note(f"{function['name']} {function['arguments']}")
        if command is None:
            return input("result> ")
        if not self.yes and input(f"run {harmless(shlex.join(command))}? [y/N] ").strip().lower() not in ("y", "yes"):
            return DECLINED
        result = run_tool(command, function["arguments"])
        if self.display.is_person:
            self.display.note(result if len(result) <= MOST_SHOWN else f"{result[:MOST_SHOWN]}... ({len(result):,} characters)")
        return result
