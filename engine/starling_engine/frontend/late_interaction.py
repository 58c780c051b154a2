"""Queries and documents of a model with a vector for each token, and their scores (MaxSim, arXiv 2004.12832)."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.prompt_encoder import PromptForm
from starling_engine.frontend.tokenizer import Tokenizer, Truncation
from starling_engine.model_config.multi_vector import MultiVectorConfig, TextRole
from starling_engine.outputs import TokenRows
from starling_engine.params import PoolingParams


class LateInteraction:
    """Does as sentence-transformers' MultiVectorEncoder."""

    def __init__(self, tokenizer: Tokenizer, config: MultiVectorConfig) -> None:
        self._config = config
        found = (tokenizer.backend.token_to_id(word) for word in config.skipped_words)
        self._skipped = [token for token in found if token is not None]
        self._expansion_id: int | None = None
        if (expansion := config.expansion) is not None:
            mask = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
            self._expansion_id = mask if expansion.token is None else tokenizer.backend.token_to_id(expansion.token)

    @property
    def params(self) -> PoolingParams:
        """Parameters of a text that is scored. The authors say if vectors have length 1; else they have it."""
        return PoolingParams(task="token_embed", normalize=self._config.normalize)

    def form(self, form: PromptForm, role: TextRole) -> PromptForm:
        """Returns the form of texts of a role, which the model may cut."""
        most = self._config.lengths.get(role)
        if role == "query" and (expansion := self._config.expansion) is not None:
            most = expansion.length if expansion.cuts else most and max(most, expansion.length)
        if most is None or (form.truncation is not None and form.truncation.tokens <= most):
            return form
        side = form.truncation.side if form.truncation is not None else "right"
        return replace(form, truncation=Truncation(most, side))

    def prompt(self, ids: list[int], params: PoolingParams, role: TextRole) -> tuple[list[int], PoolingParams]:
        """Returns what the engine is asked of a text. Behind a short query come the tokens of its expansion."""
        expansion = self._config.expansion
        if role != "query" or expansion is None or len(ids) >= expansion.length:
            return ids, params
        if self._expansion_id is None:
            raise InvalidRequest("the tokenizer has no token that expands queries", "model")
        unseen_from = None if expansion.seen else len(ids)
        expanded = [*ids, *[self._expansion_id] * (expansion.length - len(ids))]
        return expanded, msgspec.structs.replace(params, unseen_from=unseen_from)

    def vectors(self, ids: Sequence[int], rows: TokenRows, role: TextRole) -> TokenRows:
        """Returns the rows of tokens that have a vector, of all rows [T, size] of a text."""
        import numpy as np  # routers import this module, and have none

        tokens = np.asarray(ids)
        kept = np.ones(len(tokens), np.bool_)
        kept[:1] &= not self._config.skips_first
        if role in self._config.skipped_of:
            kept &= ~np.isin(tokens, self._skipped)
        if role == "document" and self._config.kept_tokens:
            kept &= np.isin(tokens, self._config.kept_tokens)
        return rows if kept.all() else rows[kept]

    def scores(self, queries: Sequence[TokenRows], documents: Sequence[TokenRows]) -> list[float]:
        """Returns the score of each pair; one query may be for all documents."""
        each = queries if len(queries) == len(documents) else [*queries] * len(documents)
        return [self._score(query, document) for query, document in zip(each, documents, strict=True)]

    def _score(self, query: TokenRows, document: TokenRows) -> float:
        """Returns the sum, or the mean, of what the best vector of the document gives for each one of the query."""
        if not len(query) or not len(document):
            return 0.0
        best = (query @ document.T).max(axis=1)
        return float(best.mean() if self._config.mean else best.sum())
