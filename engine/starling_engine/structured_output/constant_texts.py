"""Constant texts of outputs, in which special tokens are tokens: a model writes them so, and never spells them."""

import re

from starling_engine.structured_output.lark import Part, RulePart, TextPart, literal
from starling_engine.structured_output.special_tokens import SpecialTokens


class ConstantTexts:
    """Writes constant texts of tags and choices. Texts of the library's grammars have no special tokens: these are rules."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        shown = sorted(tokens.ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, shown))})") if shown else None

    def parts(self, text: str) -> list[Part]:
        """Returns the parts of a text. Raises ValueError for one with a token that ends the output."""
        parts: list[Part] = []
        for piece in self._special.split(text) if self._special else [text]:
            token = self._tokens.ids.get(piece)
            if token in self._tokens.ends:
                raise ValueError(f"{piece} ends the output, and can stand nowhere in it")
            if piece:
                parts.append(TextPart(literal(piece)) if token is None else RulePart(f"<[{token}]>"))
        return parts
