"""The vocabulary that grammars choose from."""

from pathlib import Path

import llguidance

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.tokenizer_files import read_tokenizer

NO_VOCABULARY = "this engine has no vocabulary for grammars"


def read_vocabulary(config: VocabularyConfig) -> llguidance.LLTokenizer:
    """Returns the library's form of a checkpoint's tokenizer, in up to a second. Raises ModelError where it cannot be read."""
    backend = read_tokenizer(Path(config.tokenizer_path)).backend
    try:
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=config.size, eos_token=list(config.eos_token_ids) or None)
    except ValueError as error:
        raise ModelError(f"the grammar library cannot read the tokenizer of {config.tokenizer_path}: {error}") from None
