"""Pairs of texts, and what the score of a pair is."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from starling_engine.errors import InvalidRequest
from starling_engine.frontend.tokenizer import Truncation
from starling_engine.model_config.classifier import sigmoid
from starling_engine.outputs import PooledNumbers, SparseVector
from starling_engine.params import PoolingParams

Vector = Sequence[float]
ComparedTask = Literal["embed", "token_embed", "sparse_embed"]
"""Tasks of vectors by which texts are compared."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of pairs: the argument or field of a request, and its texts. `is_list`: the request has them in a list."""

    field: str
    texts: list[str]
    is_list: bool = True

    @property
    def sent(self) -> list[str] | str:
        """The texts as the request has them, by which errors name them."""
        return self.texts if self.is_list else self.texts[0]

    def name(self, at: int) -> str:
        """Returns the request's name of a text."""
        return f"{self.field}[{at}]" if self.is_list else self.field

    def of(self, count: int) -> list[str]:
        """Returns a text for each of so many pairs."""
        return self.texts if len(self.texts) == count else self.texts * count


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Token ids of a pair, and what the engine is asked to make of them."""

    ids: list[int]
    params: PoolingParams


class PairScorer(Protocol):
    """A model that was trained to score pairs."""

    async def prompt(
        self, query: str, document: str, instruction: str | None, truncation: Truncation | None, param: str
    ) -> PairPrompt:
        """Returns a pair's prompt. What is too long for the truncation is cut from the document's end, `param` in the request.

        Raises InvalidRequest for an instruction where none is possible, or where nothing of the document would stay;
        PromptTooLong where nothing cuts it.
        """
        ...

    def scores(self, found: Sequence[Vector], use_activation: bool | None) -> list[float]:
        """Returns the score of each pair, of what the engine made of its prompt."""
        ...


def check_sides(first: Side, second: Side) -> None:
    """Raises InvalidRequest unless each text of the second side has one of the first, or one that is for all of them."""
    for side in (first, second):
        if not side.texts:
            raise InvalidRequest("at least one text is needed", side.field)
    if len(first.texts) not in (1, len(second.texts)):
        counts = f"{first.field} has {len(first.texts)}, {second.field} has {len(second.texts)}"
        raise InvalidRequest(f"{first.field} must have one text, or as many as {second.field}; {counts}", second.field)


def check_compared(instruction: str | None, use_activation: bool | None) -> None:
    """Raises InvalidRequest for what a reranker alone has a use for."""
    if instruction is not None:
        raise InvalidRequest("this model is no reranker that takes one; its scores are products of vectors", "instruction")
    if use_activation is False:
        raise InvalidRequest("this model's scores are cosines, sums of them or products, which have none", "use_activation")


def check_judged(task: ComparedTask | None, field: str) -> None:
    """Raises InvalidRequest for a task of vectors where a model judges pairs itself."""
    if task is not None:
        raise InvalidRequest("this model was trained to score pairs, and compares no vectors", field)


def answer_scores(logits: Sequence[Vector], use_activation: bool | None) -> list[float]:
    """Returns the scores of a reranker, whose logits are of "yes" and, in most models, of "no".

    A score is the probability of "yes" against "no", or with `use_activation` False the difference of the logits.
    """
    differences = [yes - sum(no) for yes, *no in logits]
    return differences if use_activation is False else list(map(sigmoid, differences))


def similarities(first: Sequence[PooledNumbers], second: Sequence[PooledNumbers]) -> list[float]:
    """Returns the cosine of each pair of vectors, which have length 1, or the inner product of sparse ones.

    One of the first side may be for all of the second.
    """
    known = [dict(zip(one.indices, one.values, strict=True)) if isinstance(one, SparseVector) else one for one in first]
    each = known if len(known) == len(second) else known * len(second)
    return [_similarity(one, other) for one, other in zip(each, second, strict=True)]


def _similarity(one: "PooledNumbers | dict[int, float]", other: PooledNumbers) -> float:
    """`one` has the weight of each token, where vectors are sparse."""
    if isinstance(one, dict) and isinstance(other, SparseVector):
        return sum(one.get(token, 0.0) * weight for token, weight in zip(other.indices, other.values, strict=True))
    assert isinstance(one, list) and isinstance(other, list), "a task gives vectors of one kind"
    # Rounding may bring a cosine past 1.
    product: float = sum(map(operator.mul, one, other))
    return max(-1.0, min(1.0, product))
