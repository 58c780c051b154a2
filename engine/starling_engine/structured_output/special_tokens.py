"""Tokens that no text spells, and those of them between which a model reasons."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starling_engine.structured_output.grammar import Grammar
from starling_engine.structured_output.lark import text_without

REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<mm:think>", "</mm:think>"),
)
"""Marks of reasoning: DeepSeek, Qwen, GLM and most others; Mistral; Seed; Cohere; LongCat; MiniMax M3."""
NO_MARKS = f"the model's tokenizer has no tokens that mark reasoning; known are {', '.join(' '.join(pair) for pair in REASONING)}"
MAX_SPACE = 8
"""Characters of white space between the end of reasoning and the output."""


class SpecialTokens(NamedTuple):
    """Tokens by what they are shown as. A grammar allows those that it names, by their numbers, and no other.

    `ends` are the tokens that end an output.
    """

    ids: Mapping[str, int]
    ends: frozenset[int]


class ReasoningMarks(NamedTuple):
    """The tokens that begin and end reasoning. `text` shows the second one."""

    start: int
    end: int
    text: str

    @classmethod
    def find(cls, added: Mapping[str, int]) -> "ReasoningMarks | None":
        """Returns the marks among a tokenizer's added tokens, if it has a known pair."""
        for start, end in REASONING:
            if start in added and end in added:
                return cls(added[start], added[end], end)
        return None

    def have_opened(self, prompt: Sequence[int], ends: frozenset[int]) -> bool:
        """Returns whether the last turn of a prompt has begun to reason. `ends` are the tokens that end a turn."""
        for token in reversed(prompt):
            if token == self.start:
                return True
            if token == self.end or token in ends:
                return False
        return False

    def before(self, form: Sequence[Grammar], *, is_open: bool) -> list[Grammar]:
        """Returns grammars of an output that may begin with reasoning, and has to end it if the prompt `is_open`.

        `form` is the grammar of what follows, and those that it calls.
        """
        thought = f"THOUGHT <[{self.end}]> SPACE?"
        rules = [
            f"start: {thought if is_open else f'(<[{self.start}]> {thought})?'} @form",
            f"THOUGHT: {text_without([self.text])}",
            f"SPACE: /[ \\n\\r\\t]{{1,{MAX_SPACE}}}/",
        ]
        return [{"lark_grammar": "\n".join(rules)}, {"name": "form", **form[0]}, *form[1:]]
