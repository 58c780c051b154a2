"""Tokens that no text spells, and those of them between which a model reasons."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starling_engine.structured_output.grammar import Grammar
from starling_engine.structured_output.lark import literal, text_without


class _Pair(NamedTuple):
    """Marks of reasoning, in pieces: tokens that no text spells, and words.

    opens, ends   what is before reasoning and behind it
    turn          what follows that in any case
    then          what has to follow where a limit ended it
    one_of        words of which the first token of one has to follow that
    header        what is before an answer behind reasoning; not before calls
    has_header    an answer without reasoning has one, too
    """

    opens: tuple[str, ...]
    ends: tuple[str, ...]
    turn: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    one_of: tuple[tuple[str, ...], ...] = ()
    header: tuple[str, ...] = ()
    has_header: bool = False

    def is_of(self, added: Mapping[str, int]) -> bool:
        """Says if a tokenizer's added tokens have the marks."""
        return all(piece in added for piece in (*self.opens, *self.ends, *self.turn) if not piece[0].isalpha())


REASONING = (
    _Pair(("<think>",), ("</think>",)),
    _Pair(("[THINK]",), ("[/THINK]",)),
    _Pair(("<seed:think>",), ("</seed:think>",)),
    _Pair(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    _Pair(("<longcat_think>",), ("</longcat_think>",)),
    _Pair(("<mm:think>",), ("</mm:think>",)),
    _Pair(("<|channel>", "thought\n"), ("<channel|>",)),
    _Pair(
        ("<|channel|>", "analysis", "<|message|>"),
        ("<|end|>",),
        turn=("<|start|>", "assistant"),
        then=("<|channel|>",),
        one_of=(("final", "commentary"),),
        header=("<|channel|>", "final", "<|message|>"),
        has_header=True,
    ),
    _Pair(("<|open|>", "think", "<|sep|>"), ("<|close|>", "think", "<|sep|>"), header=("<|open|>", "response", "<|sep|>")),
)
"""Marks of DeepSeek, Qwen, GLM and most others; Mistral; Seed; Cohere; LongCat; MiniMax M3; Gemma 4; gpt-oss; Kimi K3."""
_KNOWN = ", ".join(f"{''.join(pair.opens).strip()} {''.join(pair.ends)}" for pair in REASONING)
NO_MARKS = f"the model's tokenizer has no tokens that mark reasoning; known are {_KNOWN}"
MAX_SPACE = 8
"""Characters of white space between the end of reasoning and the output."""


class SpecialTokens(NamedTuple):
    """Tokens by what they are shown as. A grammar allows those that it names, by their numbers, and no other.

    `ends` are the tokens that end an output.
    """

    ids: Mapping[str, int]
    ends: frozenset[int]


class ReasoningMarks(NamedTuple):
    """The tokens before reasoning and behind it, and those that follow where a limit has ended it: one of each step.

    opening, ending  for a grammar, what is before reasoning and behind it
    header           likewise, what is before an answer that is no call; it may be empty
    has_header       an answer without reasoning has it, too
    text             shows the end
    """

    opens: Sequence[int]
    ends: Sequence[int]
    then: Sequence[Sequence[int]]
    opening: str
    ending: str
    header: str
    has_header: bool
    text: str

    @classmethod
    def find(cls, added: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> "ReasoningMarks | None":
        """Returns the marks among a tokenizer's added tokens, if it has a known pair. `encode` makes tokens of words."""
        pair = next((pair for pair in REASONING if pair.is_of(added)), None)
        if pair is None:
            return None

        def tokens(pieces: Sequence[str]) -> list[int]:
            return [token for piece in pieces for token in ((added[piece],) if piece in added else encode(piece))]

        def form(pieces: Sequence[str]) -> str:
            # Words by number would be spelled in no other tokens, but the library takes back too few bytes of these behind drafts.
            return " ".join(f"<[{added[piece]}]>" if piece in added else literal(piece) for piece in pieces)

        firsts = [[encode(word)[0] for word in words] for words in pair.one_of]
        return cls(
            opens=tokens(pair.opens),
            ends=tokens(pair.ends),
            then=[*([token] for token in tokens((*pair.turn, *pair.then))), *firsts],
            opening=form(pair.opens),
            ending=form((*pair.ends, *pair.turn)),
            header=form(pair.header),
            has_header=pair.has_header,
            text="".join(pair.ends),
        )

    def have_opened(self, prompt: Sequence[int], ends: frozenset[int]) -> bool:
        """Returns whether the last turn of a prompt has begun to reason. `ends` are the tokens that end a turn."""
        stops = {self.opens[-1], self.ends[-1], *ends}  # a prompt may have a million tokens
        for at, token in zip(range(len(prompt), 0, -1), reversed(prompt), strict=True):
            if token not in stops:
                continue
            if _are_before(prompt, at, self.opens):
                return True
            if token in ends or _are_before(prompt, at, self.ends):
                return False
        return False

    def before(self, form: Sequence[Grammar], *, is_open: bool, calls: bool = False) -> list[Grammar]:
        """Returns grammars of an output that may begin with reasoning, and has to end it if the prompt `is_open`.

        `form` is the grammar of what follows, and those that it calls. It has its own headers if it is that of `calls`.
        """
        header = "" if calls else self.header
        behind, before = ("", header) if self.has_header else (header, "")
        thought = f"THOUGHT {self.ending} {behind or ('' if before else 'SPACE?')}"
        rules = [
            f"start: {thought if is_open else f'({self.opening} {thought})?'} {before} @form",
            f"THOUGHT: {text_without([self.text])}",
            f"SPACE: /[ \\n\\r\\t]{{1,{MAX_SPACE}}}/",
        ]
        return [{"lark_grammar": "\n".join(rules)}, {"name": "form", **form[0]}, *form[1:]]


def _are_before(tokens: Sequence[int], at: int, mark: Sequence[int]) -> bool:
    return list(tokens[max(0, at - len(mark)) : at]) == list(mark)
