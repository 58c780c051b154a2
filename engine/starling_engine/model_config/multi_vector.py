"""Models with a vector for each token, by which texts are compared (ColBERT, arXiv 2004.12832). Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields

TextRole = Literal["query", "document"]
ROLES: tuple[TextRole, ...] = ("query", "document")
KEY = "token_embeddings"
"""Name of the tokens' vectors in modules of sentence-transformers."""
_SIMILARITIES = ("maxsim", "meanmaxsim")


@dataclass(frozen=True, kw_only=True)
class QueryExpansion:
    """Tokens behind a query that is shorter than `length`.

    token    the token's text; None: the tokenizer's mask, or else its end
    seen     tokens see these; otherwise they see the query's, and none sees them
    cuts     a longer query loses its end
    """

    length: int
    token: str | None = None
    seen: bool = False
    cuts: bool = True


@dataclass(frozen=True, kw_only=True)
class MultiVectorConfig:
    """Says how queries and documents become vectors of their tokens.

    lengths         the most tokens of a text of that role; none: as many as the model takes
    skipped_words   tokens without a vector, in texts of `skipped_of`
    kept_tokens     the tokens of documents that have one; None: all
    skips_first     the first token has no vector
    normalize       scores are of vectors of length 1; None: as all vectors of the checkpoint
    mean            a score is divided by the number of the query's vectors
    """

    lengths: Mapping[TextRole, int] = field(default_factory=dict)
    expansion: QueryExpansion | None = None
    skipped_words: tuple[str, ...] = ()
    skipped_of: tuple[str, ...] = ("document",)
    kept_tokens: tuple[int, ...] | None = None
    skips_first: bool = False
    normalize: bool | None = None
    mean: bool = False


def read_multi_vector(texts: Fields, mask: Fields, saved: Fields) -> MultiVectorConfig:
    """Reads the configs of the modules Transformer and MultiVectorMask, and config_sentence_transformers.json."""
    similarity = saved.text("similarity_fn_name", _SIMILARITIES[0])
    if similarity not in _SIMILARITIES:
        raise UnsupportedModel(f"{saved.source}: similarity_fn_name {similarity!r} is not supported; supported: {_SIMILARITIES}")
    lengths = {role: texts.integer(f"{role}_length") for role in ROLES if texts.has(f"{role}_length")}
    return MultiVectorConfig(
        lengths=lengths,
        expansion=_expansion(texts.child("query_expansion")) if texts.has("query_expansion") else None,
        skipped_words=tuple(mask.texts("skiplist_words")),
        skipped_of=tuple(mask.texts("skiplist_tasks")) if mask.has("skiplist_tasks") else ("document",),
        kept_tokens=mask.integers("keep_only_token_ids") if mask.has("keep_only_token_ids") else None,
        mean=similarity == "meanmaxsim",
    )


def _expansion(config: Fields) -> QueryExpansion:
    return QueryExpansion(
        length=config.integer("length"),
        token=config.text("token") if config.has("token") else None,
        seen=config.boolean("attend", False),
        cuts=config.one_of("strategy", "fixed", "min") == "fixed",
    )
