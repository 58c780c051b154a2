"""The format in which the served model writes calls of tools and reasoning, and the parsers of its outputs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.structured_output.special_tokens import ReasoningMarks

from starling_agent.parsers.families import AUTO, family_named, family_of_templates, reasoning_of_templates
from starling_agent.parsers.parser import OutputParser
from starling_agent.parsers.reading import Family


@dataclass(frozen=True, slots=True)
class OutputReading:
    """Says how the outputs of one request are read.

    tools      the schema of each offered tool's arguments, by the tool's name
    reasons    the prompt has opened reasoning
    parallel   an output may have several calls
    """

    family: Family
    token_texts: frozenset[str]
    tools: Mapping[str, Any]
    reasons: bool
    whole_calls: bool
    parallel: bool = True
    shows_reasoning: bool = True

    def parser(self) -> OutputParser:
        """Makes the parser of one output."""
        return OutputParser(self.family, self.tools, self.token_texts, reasons=self.reasons, whole_calls=self.whole_calls)


class OutputFormat:
    """The format of a model's calls, and that of its reasoning."""

    def __init__(self, tokenizer: Tokenizer, calls: str, reasoning: str, ends: Iterable[int], *, whole_calls: bool) -> None:
        """Finds the formats.

        Args:
            tokenizer: the model's, with its chat templates.
            calls: the name of the format of calls, one of PARSER_NAMES.
            reasoning: likewise of reasoning.
            ends: the tokens that end a turn.
            whole_calls: as `OutputParser` has it.
        """
        self._templates = tuple(tokenizer.renderer.templates.by_name.values())
        self.calls = family_of_templates(self._templates) if calls == AUTO else family_named(calls)
        self.reasoning = reasoning_of_templates(self._templates) if reasoning == AUTO else family_named(reasoning)
        self._tokens = tokenizer.added_tokens
        self.marks_reasoning = ReasoningMarks.find(self._tokens) is not None
        """Outputs that have to have a form may reason first."""
        self._ends = frozenset(ends)
        self._whole_calls = whole_calls

    def reading(
        self, tools: Mapping[str, Any] | None, prompt: Sequence[int], *, reasons: bool | None = None
    ) -> OutputReading | None:
        """Returns how to read the outputs of a prompt; None where they are content and nothing else.

        Without `tools` calls are content. `reasons` overrides whether the prompt has opened reasoning.
        """
        family = self._with_calls if tools is not None else self._without_calls
        if family is None:
            return None
        return OutputReading(
            family=family,
            token_texts=frozenset(self._tokens).intersection(family.markers),
            tools=tools or {},
            reasons=self._has_opened(prompt) if reasons is None else reasons,
            whole_calls=self._whole_calls,
        )

    def shown_ids(self, reading: OutputReading) -> list[int]:
        """Returns the tokens whose places in the text the parser has to know."""
        return sorted(self._tokens[text] for text in reading.token_texts)

    def reads_variable(self, name: str) -> bool:
        """Says if one of the templates has a variable of that name."""
        return any(name in template for template in self._templates)

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
        """Says if the last turn of the prompt has begun to reason."""
        pairs = () if self.reasoning is None else self.reasoning.reasoning
        opens = {self._tokens[start] for start, _ in pairs if start in self._tokens}
        closes = {self._tokens[end] for _, end in pairs if end in self._tokens}
        for token in reversed(prompt):
            if token in opens:
                return True
            if token in closes or token in self._ends:
                return False
        return False
