"""The format in which the served model writes calls of tools and reasoning, and the parsers of its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import structlog
from starling_engine.errors import ConfigError
from starling_engine.frontend.shown_tools import ShownCalls
from starling_engine.frontend.template import shows_tools, template_constants, template_variables
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.structured_output.special_tokens import ReasoningMarks

from starling_agent.openai.effort import EffortVariables
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.parsers.families import AUTO, family_named, family_of_templates, reasoning_of_templates
from starling_agent.parsers.parser import OutputParser
from starling_agent.parsers.reading import Family
from starling_agent.parsers.response_template import DESCRIBED, described_family
from starling_agent.parsers.shown_calls import shown_calls

log = structlog.get_logger("starling.http")
LONGEST_BEGINNING = 4096
"""Tokens of an answer that a prompt may have begun, as far as it is looked through."""


@dataclass(frozen=True, slots=True)
class OutputReading:
    """Says how the outputs of one request are read.

    tools      the schema of each offered tool's arguments, by the tool's name; None where calls are content
    reasons    the prompt has opened reasoning
    prefix     what the prompt has written of an output
    count_tokens  returns how many tokens a text has
    parallel   an output may have several calls
    custom     the names of tools whose calls are texts
    """

    family: Family
    token_texts: frozenset[str]
    tools: Mapping[str, Any] | None
    reasons: bool
    whole_calls: bool
    count_tokens: Callable[[str], int]
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    shows_reasoning: bool = True
    prefix: str = ""

    def parser(self) -> OutputParser:
        """Makes the parser of one output."""
        return OutputParser(
            self.family,
            self.tools,
            self.token_texts,
            reasons=self.reasons,
            prefix=self.prefix,
            whole_calls=self.whole_calls,
        )


class OutputFormat:
    """The format of a model's calls, and that of its reasoning."""

    def __init__(self, tokenizer: Tokenizer, calls: str, reasoning: str, *, whole_calls: bool) -> None:
        """Finds the formats.

        Args:
            tokenizer: the model's, with its chat templates.
            calls: the name of the format of calls, one of PARSER_NAMES.
            reasoning: likewise of reasoning.
            whole_calls: as `OutputParser` has it.

        Raises ConfigError where the checkpoint's own description is asked for, and cannot be used.
        """
        templates = tuple(tokenizer.renderer.templates.by_name.values())
        self.variables = frozenset[str]().union(*map(template_variables, templates))
        self.effort = EffortVariables(self.variables, frozenset[str]().union(*map(template_constants, templates)))
        self._tokens = tokenizer.added_tokens
        own = tokenizer.info.get(DESCRIBED)
        self.calls = self._family(calls, "tool_call_parser", family_of_templates(templates), own)
        self.reasoning = self._family(reasoning, "reasoning_parser", reasoning_of_templates(templates), own)
        if self.calls is not None and templates and not any(map(shows_tools, templates)):
            log.warning("the chat template shows the model no tools, so that it does not know those of requests")
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self._marks = None if self.reasoning is None else ReasoningMarks.find(self._tokens, encode)
        self._token_ids = frozenset(self._tokens.values())
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._count_tokens = lambda text: len(encode(text))
        self._whole_calls = whole_calls

    def reading(
        self, tools: Mapping[str, Any] | None, prompt: Sequence[int], *, reasons: bool | None = None
    ) -> OutputReading | None:
        """Returns how to read the outputs of a prompt; None where they are content and nothing else.

        Without `tools` calls are content. `reasons` overrides whether the prompt has opened reasoning.
        """
        family = self._with_calls if tools is not None else self._without_calls
        # What has to have a form, or goes on with a message, has none of the headers that all parts have in such a format.
        if family is None or (_has_headers(family) and reasons is False):
            return None
        return OutputReading(
            family=family,
            token_texts=frozenset(self._tokens).intersection(family.markers),
            tools=tools,
            reasons=self._has_opened(prompt) if reasons is None else reasons,
            whole_calls=self._whole_calls,
            prefix=self._written(family, prompt),
            count_tokens=self._count_tokens,
        )

    def without_hints(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Leaves out a level of reasoning where the template knows none, and a budget where no tokens mark reasoning.

        Clients of some APIs send them to every model.
        """
        hints = set[str]()
        if fields.get("reasoning_effort") != "none" and not (self.effort.has_levels or self.effort.has_switch):
            hints.add("reasoning_effort")
        if self._marks is None:
            hints.add("thinking_token_budget")
        return {name: value for name, value in fields.items() if name not in hints}

    def reasons_before(self, form: Form) -> bool:
        """Says if an output that has to have this form may reason first. A tag of a request's own has no header of the format."""
        marks = self._marks
        return marks is not None and (not marks.header or form.kind != "structural_tag" or form.field == "tools")

    @cached_property
    def shown_calls(self) -> ShownCalls | None:
        """The texts around calls in templates that show none by themselves; None where that is not known."""
        return None if self.calls is None else shown_calls(self.calls)

    @property
    def writes_headers(self) -> bool:
        """True for a format in which each part of an output has a header."""
        return self.calls is not None and _has_headers(self.calls)

    def shown_ids(self, reading: OutputReading) -> list[int]:
        """Returns the tokens whose places in the text the parser has to know."""
        return sorted(self._tokens[text] for text in reading.token_texts)

    def _family(self, name: str, setting: str, found: Family | None, template: Any) -> Family | None:
        """Returns the format of that name. One that is `found` in chat templates comes before the checkpoint's own `template`."""
        if name == AUTO and (found is not None or template is None):
            return found
        if name not in (AUTO, DESCRIBED):
            return family_named(name)
        try:
            return described_family(template, tuple(self._tokens))
        except ValueError as error:
            message = f"the checkpoint's {DESCRIBED} cannot be used: {error}"
            if name == DESCRIBED:
                raise ConfigError(message, setting) from None
            log.warning(message)
            return None

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

    def _written(self, family: Family, prompt: Sequence[int]) -> str:
        """Returns what the prompt has written of an output, for formats that say where that begins."""
        if family.begins is None:
            return ""
        text = self._decode(prompt[-LONGEST_BEGINNING:])
        last = max((found.end() for found in family.begins.finditer(text)), default=len(text))
        return text[last:]

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


def _has_headers(family: Family) -> bool:
    """Says if each part of an output has a header: a format that says where outputs begin reads what the prompt has of them."""
    return family.whole is not None and family.begins is None


def has_opened_reasoning(family: Family, ending: str) -> bool:
    """Says if the ending of a prompt has opened reasoning, and not closed it."""
    return any(ending.rfind(opens.strip()) > ending.rfind(closes) for opens, closes in family.reasoning)
