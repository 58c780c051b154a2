"""POST /score and /rerank, under all of their paths (vLLM's, Jina's and Cohere's)"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pairs import ComparedTask

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import Int
from starling_agent.openai.protocol.completion import PROMPT_SCHEMA
from starling_agent.openai.protocol.embedding import PooledRequest
from starling_agent.openai.protocol.refused import FieldRefusal

PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM has for the two sides of a pair."""


class DocumentObject(BaseModel):
    """A document as Jina's and Cohere's clients may send it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    text: str


class ScoringRequest(PooledRequest):
    """Fields of /score and /rerank. `instruction` is for rerankers whose template takes one.

    `task`: the vectors that are compared, where a model makes several kinds.
    """

    task: ComparedTask | None = None
    instruction: str | None = None
    max_tokens_per_query: Int | None = None
    max_tokens_per_doc: Int | None = None
    use_activation: bool | None = None


class ClassifyRequest(PooledRequest):
    """Texts or token ids that the model's head labels."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.CLASSIFY

    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    add_special_tokens: bool | None = None
    use_activation: bool | None = None


class ScoreRequest(ScoringRequest):
    """Pairs: as many texts on both sides, or one on the first side for all of the second."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.SCORE

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def sides(self) -> tuple[tuple[str, list[str], bool], tuple[str, list[str], bool]]:
        """Returns names and texts of both sides, and if the request has them in a list.

        Raises InvalidRequest for fields that are no pair of names.
        """
        given = {name for names in PAIR_NAMES for name in names if getattr(self, name) is not None}
        pair = next((names for names in PAIR_NAMES if set(names) == given), None)
        if pair is None:
            possible = " or ".join(" and ".join(names) for names in PAIR_NAMES)
            raise InvalidRequest(f"give {possible}", min(given, default="text_1"))
        first, second = ((name, *_listed(getattr(self, name))) for name in pair)
        return first, second


class RerankRequest(ScoringRequest):
    """One query and the documents that are ranked by it. Jina's and Cohere's API want the model named."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.RERANK

    model: str
    query: str
    documents: list[str | DocumentObject]
    top_n: Int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def _listed(texts: str | list[str]) -> tuple[list[str], bool]:
    return ([texts], False) if isinstance(texts, str) else (texts, True)
