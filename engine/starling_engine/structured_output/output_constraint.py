"""Joins what restricts a request's output: a grammar, a limit of its reasoning, or both."""

from collections.abc import Sequence
from typing import cast

from starling_engine.constraint import MaskRow
from starling_engine.structured_output.matcher import GrammarMatcher, allow_of
from starling_engine.structured_output.reasoning_budget import ReasoningBudget


class OutputConstraint:
    """A `Constraint` of a grammar and a budget, of which one may be None."""

    def __init__(self, words: int, grammar: GrammarMatcher | None, budget: ReasoningBudget | None) -> None:
        self.words = words
        self._grammar = grammar
        self._budget = budget

    @property
    def error(self) -> str | None:
        return None if self._grammar is None else self._grammar.error

    @staticmethod
    def fill(rows: Sequence[MaskRow], bits: bytearray) -> None:
        constraints = [cast("OutputConstraint", row.constraint) for row in rows]
        pairs = list(zip(constraints, rows, strict=True))
        if grammars := [(one._grammar, row.drafts, row.first) for one, row in pairs if one._grammar is not None]:
            GrammarMatcher.fill(grammars, bits)
        for one, row in pairs:
            possible = () if one._budget is None else one._budget.possible_behind(row.drafts)
            for at, tokens in enumerate(possible, row.first):
                if tokens:
                    allow_of(tokens, bits, at, 4 * one.words)

    def restricts(self, tokens: int) -> bool:
        return self._grammar is not None or (self._budget is not None and self._budget.restricts(tokens))

    @property
    def is_finished(self) -> bool:
        return self._grammar is not None and self._grammar.is_finished

    def advance(self, token: int) -> None:
        if self._grammar is not None:
            self._grammar.advance(token)
        if self._budget is not None:
            self._budget.advance(token)

    def forced(self, most: int) -> Sequence[int]:
        if self._grammar is not None:
            return self._grammar.forced(most)
        return () if self._budget is None else self._budget.forced(most)

    def allowed(self, drafts: Sequence[int]) -> int:
        count = len(drafts) if self._grammar is None else self._grammar.allowed(drafts)
        return count if self._budget is None else len(self._budget.possible_behind(drafts[:count])) - 1
