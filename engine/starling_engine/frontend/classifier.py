"""The tokens of a reranker that is a language model, as an argument names them."""

from collections.abc import Sequence
from dataclasses import replace

from starling_engine.errors import ConfigError
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.model_config.config import ModelConfig


def with_classifier(model: ModelConfig, texts: Sequence[str], tokenizer: Tokenizer) -> ModelConfig:
    """Returns the model with these tokens as its classifier's; without any it stays as it is. Raises ConfigError."""
    if not texts:
        return model
    tokens = tuple(_token_of(text, tokenizer) for text in texts)
    return replace(model, pooler=replace(model.pooler, classifier_tokens=tokens))


def _token_of(text: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(f"{text!r} is {len(ids)} tokens of this model, and has to be one", "classifier_from_token")
    return ids[0]
