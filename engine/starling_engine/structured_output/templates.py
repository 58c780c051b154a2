"""Matchers of grammars that were built once, to be copied for each request."""

from array import array
from collections import OrderedDict
from collections.abc import Collection

import llguidance

from starling_engine.config import VocabularyConfig
from starling_engine.structured_output.matcher import LIMITS, GrammarMatcher
from starling_engine.structured_output.vocabulary import read_vocabulary

MAX_TEMPLATES = 256
MAX_GRAMMAR_BYTES = 4 << 20
"""Text of the grammars whose templates are kept. A matcher takes some ten times as much."""


class MatcherTemplates:
    """Builds matchers; those of the grammars that were used last are copied. For one thread."""

    def __init__(self, config: VocabularyConfig) -> None:
        self._config = config
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._templates: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._bytes = 0

    def matcher(self, grammar: str, output: "array[int]", ends: Collection[int], *, drafts: bool) -> GrammarMatcher:
        """Returns a matcher behind `output`; see `GrammarMatcher` for the rest. Its `error` says what the library finds wrong.

        The first call reads the tokenizer. Raises ModelError where that is not possible.
        """
        matcher = GrammarMatcher(self._template(grammar).deep_copy(), -(-self._config.size // 32), ends, drafts=drafts)
        if output:
            matcher.replay(output)
        return matcher

    def _template(self, grammar: str) -> llguidance.LLMatcher:
        template = self._templates.pop(grammar, None)
        if template is None:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._config)
            template = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
            self._bytes += len(grammar)
        self._templates[grammar] = template
        while len(self._templates) > MAX_TEMPLATES or self._bytes > MAX_GRAMMAR_BYTES:
            oldest, _ = self._templates.popitem(last=False)
            self._bytes -= len(oldest)
        return template
