"""The prompts of a model whose head scores a pair of texts, which the tokenizer puts together."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pairs import PairPrompt, PairScorer, Vector
from starling_engine.frontend.pooled_texts import Render
from starling_engine.frontend.prompt_encoder import PromptEncoder
from starling_engine.frontend.reranker import Reranker
from starling_engine.frontend.tokenizer import Truncation
from starling_engine.model_config.classifier import LabelActivation, activated
from starling_engine.model_config.config import ModelConfig
from starling_engine.params import PoolingParams


class CrossEncoder:
    """Makes prompts and scores as sentence-transformers' class of that name does."""

    def __init__(self, encoder: PromptEncoder, labels: int, activation: LabelActivation, *, has_segments: bool) -> None:
        self._encoder = encoder
        self._labels = labels
        self._activation = activation
        self._has_segments = has_segments and _knows_segments(encoder.tokenizer.info)

    async def prompt(
        self, query: str, document: str, instruction: str | None, truncation: Truncation | None, param: str
    ) -> PairPrompt:
        """See `PairScorer`."""
        if self._labels != 1:
            raise InvalidRequest(f"a score needs a model with one label, and this one has {self._labels}", "model")
        if instruction is not None:
            raise InvalidRequest("this model reads two texts and no instruction", "instruction")
        if truncation is None:
            self._encoder.check_length(query + document, param)
        else:
            query, document = self._encoder.possible(query), self._encoder.possible(document)
        encode = self._encoder.tokenizer.encode_pair
        ids, second = await asyncio.to_thread(encode, query, document, truncation, param)
        segment = second if self._has_segments else None
        return PairPrompt(self._encoder.fitting(ids, param, 0), PoolingParams(task="classify", second_from=segment))

    def scores(self, found: Sequence[Vector], use_activation: bool | None) -> list[float]:
        """See `PairScorer`: what the head gives, through the activation that the checkpoint names."""
        activation = "identity" if use_activation is False else self._activation
        return [activated(activation, logits)[0] for logits in found]


def _knows_segments(tokenizer_config: Mapping[str, Any]) -> bool:
    """Says if transformers' tokenizer gives models the segments of tokens, which it need not do for all that know segments."""
    named = tokenizer_config.get("model_input_names")
    if isinstance(named, list):
        return "token_type_ids" in named
    return str(tokenizer_config.get("tokenizer_class", "Bert")).startswith("Bert")


def pair_scorer(encoder: PromptEncoder, render: Render, model: ModelConfig) -> PairScorer | None:
    """Returns what scores pairs with the model; None for one whose scores are cosines of vectors."""
    head = model.classifier
    if head is not None and head.of_answers:
        return Reranker(encoder, render, model.pooler, PoolingParams(task="classify"))
    if head is not None and not head.of_tokens:
        activation = model.pooler.score_activation or head.score_activation
        return CrossEncoder(encoder, len(head.labels), activation, has_segments=model.traits.token_types > 1)
    tokens = list(model.pooler.classifier_tokens)
    return Reranker(encoder, render, model.pooler, PoolingParams(logit_token_ids=tokens)) if tokens else None
