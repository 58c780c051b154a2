"""Matchers of grammars that were built once, to be copied for each request."""

from collections import OrderedDict
from collections.abc import Collection

import llguidance

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.structured_output.matcher import LIMITS, GrammarMatcher
from starling_engine.structured_output.vocabulary import NO_VOCABULARY, read_vocabulary

MAX_TEMPLATES = 256
MAX_GRAMMAR_BYTES = 4 << 20
"""Text of the grammars whose templates are kept. A matcher takes some ten times as much."""


class MatcherTemplates:
    """Matchers of the grammars that were used last. One thread builds them, another one has the rest."""

    def __init__(self, config: VocabularyConfig | None) -> None:
        self._config = config
        self.eos_ids = frozenset(() if config is None else config.eos_token_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._templates: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._bytes = 0

    def build(self, grammar: str) -> llguidance.LLMatcher:
        """Returns the template of a grammar, which has an error where the library finds one. The first call reads the tokenizer.

        Raises ModelError where there is none that the library can read.
        """
        if self._config is None:
            raise ModelError(NO_VOCABULARY)
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._config)
        return llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)

    def find(self, grammar: str) -> llguidance.LLMatcher | None:
        template = self._templates.get(grammar)
        if template is not None:
            self._templates.move_to_end(grammar)
        return template

    def add(self, grammar: str, template: llguidance.LLMatcher) -> None:
        """Keeps a template; the ones that were not used for longest go."""
        if grammar not in self._templates:
            self._templates[grammar] = template
            self._bytes += len(grammar)
        while len(self._templates) > MAX_TEMPLATES or self._bytes > MAX_GRAMMAR_BYTES:
            oldest, _ = self._templates.popitem(last=False)
            self._bytes -= len(oldest)

    def copy(self, template: llguidance.LLMatcher, ends: Collection[int], *, drafts: bool) -> GrammarMatcher:
        """Returns a matcher of an output that begins; see `GrammarMatcher` for the rest."""
        assert self._config is not None, "or there would be no template"
        return GrammarMatcher(template.deep_copy(), -(-self._config.size // 32), ends, drafts=drafts)
