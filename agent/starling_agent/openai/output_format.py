"""The format in which the served model writes calls of tools and reasoning, and the parsers of its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from starling_engine.frontend.template import template_variables
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.structured_output.special_tokens import ReasoningMarks

from starling_agent.parsers.families import AUTO, family_named, family_of_templates, reasoning_of_templates
from starling_agent.parsers.parser import OutputParser
from starling_agent.parsers.reading import Family

SWITCHES = ("enable_thinking", "thinking")
"""Templates' variables that turn reasoning on and off."""
EFFORT_VARIABLES = ("reasoning_effort", *SWITCHES)
LONGEST_BEGINNING = 4096
"""Tokens of an answer that a prompt may have begun, as far as it is looked through."""


@dataclass(frozen=True, slots=True)
class OutputReading:
    """Says how the outputs of one request are read.

    tools      the schema of each offered tool's arguments, by the tool's name; None where calls are content
    reasons    the prompt has opened reasoning
    parallel   an output may have several calls
    """

    family: Family
    token_texts: frozenset[str]
    tools: Mapping[str, Any] | None
    reasons: bool
    whole_calls: bool
    parallel: bool = True
    shows_reasoning: bool = True

    def parser(self) -> OutputParser:
        """Makes the parser of one output."""
        return OutputParser(self.family, self.tools, self.token_texts, reasons=self.reasons, whole_calls=self.whole_calls)


class OutputFormat:
    """The format of a model's calls, and that of its reasoning."""

    def __init__(self, tokenizer: Tokenizer, calls: str, reasoning: str, *, whole_calls: bool) -> None:
        """Finds the formats.

        Args:
            tokenizer: the model's, with its chat templates.
            calls: the name of the format of calls, one of PARSER_NAMES.
            reasoning: likewise of reasoning.
            whole_calls: as `OutputParser` has it.
        """
        templates = tuple(tokenizer.renderer.templates.by_name.values())
        self._variables = frozenset[str]().union(*map(template_variables, templates))
        self.calls = family_of_templates(templates) if calls == AUTO else family_named(calls)
        self.reasoning = reasoning_of_templates(templates) if reasoning == AUTO else family_named(reasoning)
        self._tokens = tokenizer.added_tokens
        self.marks_reasoning = ReasoningMarks.find(self._tokens) is not None
        """Outputs that have to have a form may reason first."""
        self._token_ids = frozenset(self._tokens.values())
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._whole_calls = whole_calls

    def reading(
        self, tools: Mapping[str, Any] | None, prompt: Sequence[int], *, reasons: bool | None = None
    ) -> OutputReading | None:
        """Returns how to read the outputs of a prompt; None where they are content and nothing else.

        Without `tools` calls are content. `reasons` overrides whether the prompt has opened reasoning.
        """
        family = self._with_calls if tools is not None else self._without_calls
        # What has to have a form, or goes on with a message, has none of the headers that all parts have in such a format.
        if family is None or (family.whole is not None and reasons is False):
            return None
        return OutputReading(
            family=family,
            token_texts=frozenset(self._tokens).intersection(family.markers),
            tools=tools,
            reasons=self._has_opened(prompt) if reasons is None else reasons,
            whole_calls=self._whole_calls,
        )

    def without_hints(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Leaves out a level of reasoning where the template knows none: clients of some APIs send one to every model."""
        if fields.get("reasoning_effort") in (None, "none") or any(map(self.reads_variable, EFFORT_VARIABLES)):
            return fields
        return {name: value for name, value in fields.items() if name != "reasoning_effort"}

    @property
    def writes_headers(self) -> bool:
        """True for a format in which each part of an output has a header."""
        return self.calls is not None and self.calls.whole is not None

    def shown_ids(self, reading: OutputReading) -> list[int]:
        """Returns the tokens whose places in the text the parser has to know."""
        return sorted(self._tokens[text] for text in reading.token_texts)

    def reads_variable(self, name: str) -> bool:
        """Says if one of the templates has a variable of that name."""
        return name in self._variables

    @cached_property
    def _with_calls(self) -> Family | None:
        if self.calls is None or self.calls.whole is not None:
            return self.calls
        return replace(self.calls, reasoning=() if self.reasoning is None else self.reasoning.reasoning)

    @cached_property
    def _without_calls(self) -> Family | None:
        if self.reasoning is None or self.reasoning.whole is not None:
            return self.reasoning
        return replace(self.reasoning, calls={}, at_start=None)

    def _has_opened(self, prompt: Sequence[int]) -> bool:
        """Says if the prompt's last turn has begun to reason: its end is what is behind the last token that is no marker."""
        family = self.reasoning
        if family is None:
            return False
        others = self._token_ids - {self._tokens[text] for text in family.markers if text in self._tokens}
        begin = max(0, len(prompt) - LONGEST_BEGINNING)
        for at in range(len(prompt) - 1, begin - 1, -1):
            if prompt[at] in others:
                begin = at + 1
                break
        return has_opened_reasoning(family, self._decode(prompt[begin:]))


def has_opened_reasoning(family: Family, ending: str) -> bool:
    """Says if the ending of a prompt has opened reasoning, and not closed it."""
    return any(ending.rfind(opens.strip()) > ending.rfind(closes) for opens, closes in family.reasoning)
