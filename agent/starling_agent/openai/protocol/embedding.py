"""POST /v1/embeddings"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import RequestModel
from starling_agent.openai.protocol.completion import PROMPT_SCHEMA
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import RequestId


class EmbeddingRequest(RequestModel):
    """`pooling` and `normalize` are Starling's; `user` is accepted and changes nothing."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.EMBEDDING

    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool | None = None
    request_id: RequestId | None = None
    user: Annotated[str | None, Field(description="accepted, changes nothing")] = None
