"""Makes grammars for a frontend, in a process of its own: `python -m starling_engine.frontend.grammar_child`."""

import json
from typing import Any

import msgspec

from starling_engine.config import VocabularyConfig
from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.ipc.limited_child import InCopies, Work, serve
from starling_engine.ipc.priority import lower_priority_of_session
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output.forms import field_of, grammar_of
from starling_engine.structured_output.special_tokens import ReasoningMarks, SpecialTokens
from starling_engine.structured_output.trial import UnusableGrammar, try_grammar
from starling_engine.structured_output.vocabulary import read_vocabulary


def _prepare(settings: Any) -> Work:
    config = msgspec.convert(settings["vocabulary"], VocabularyConfig)
    added: dict[str, int] = settings["added_tokens"]
    vocabulary = read_vocabulary(config)
    if not all(map(vocabulary.is_special_token, config.eos_token_ids)):
        raise ModelError("grammars are not possible: a token that ends the model's outputs is text, which a grammar may ask for")
    special = {text: token for text, token in added.items() if token < config.size and vocabulary.is_special_token(token)}
    tokens = SpecialTokens(special, frozenset(config.eos_token_ids))
    marks = None if settings["marks"] is None else ReasoningMarks(*settings["marks"])

    def make(job: Any) -> str:
        wanted = msgspec.convert(json.loads(job["wanted"]), StructuredOutputsParams)
        grammar = grammar_of(wanted, tokens, marks, reasoning_open=job["reasoning_open"])
        try:
            try_grammar(grammar, vocabulary)
        except UnusableGrammar as error:
            raise InvalidRequest(str(error), field_of(wanted)) from None
        return grammar

    lower_priority_of_session()  # not before: the first form waits for what is read above, and no caller can make that longer
    return make


if __name__ == "__main__":
    # A copy has the vocabulary already, which takes up to seconds to read.
    serve(_prepare, InCopies)
