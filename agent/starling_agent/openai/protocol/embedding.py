"""POST /v1/embeddings, /v2/embed and /pooling"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starling_engine import PoolingParams
from starling_engine.errors import InvalidRequest
from starling_engine.params import PoolingTask

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import Int, RequestModel
from starling_agent.openai.protocol.chat import PARTS, ChatTemplateFields, Messages
from starling_agent.openai.protocol.completion import PROMPT_SCHEMA
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import RequestId


class PooledRequest(RequestModel):
    """Fields of all requests whose prompts become vectors or scores; `user` is accepted and changes nothing.

    `model` may be left out as in vLLM; APIs of others want it.
    """

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: RequestId | None = None
    user: Annotated[str | None, Field(description="accepted, changes nothing")] = None


class EmbeddingFields(PooledRequest, ChatTemplateFields):
    """Fields of a request with either `input` or `messages`, whose prompt ends behind the last message if nothing else is said.

    `pooling` and `prompt_name` are Starling's; without them, and without `normalize`, the checkpoint decides.
    """

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.EMBEDDING

    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool | None = None

    @property
    def opens_answer(self) -> bool:
        return self.add_generation_prompt is True

    adapter_field: ClassVar[str] = "adapter"

    @property
    def adapter_name(self) -> str | None:
        """The checkpoint's adapter that is asked for, by its name; the field is `adapter_field`."""
        return None

    @property
    def params(self) -> PoolingParams:
        """Returns what the engine is asked to make of the prompts."""
        return PoolingParams(pooling=self.pooling, normalize=self.normalize, dimensions=self.dimensions, adapter=self.adapter_name)

    def check_source(self) -> None:
        """Raises InvalidRequest unless there is one of `input` and `messages`, with fields that it has a use for."""
        if self.input is None and self.messages is None:
            raise InvalidRequest("input or messages is required", "input")
        if self.input is not None and self.messages is not None:
            raise InvalidRequest("give one of input and messages", "messages")
        if self.messages is None:
            self.refuse_template_fields()
        elif self.prompt_name is not None:
            raise InvalidRequest("is for input alone", "prompt_name")


class EmbeddingRequest(EmbeddingFields):
    """OpenAI's request; `task` is Jina's: the checkpoint's adapter of that name."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = {**refused.EMBEDDING, **refused.JINA}

    model: str
    task: str | None = None

    adapter_field: ClassVar[str] = "task"

    @property
    def adapter_name(self) -> str | None:
        return self.task


class PoolingRequest(EmbeddingFields):
    """The same under vLLM's name, and its other tasks. `use_activation` is for those with labels.

    `adapter` is the checkpoint's adapter that /v1/embeddings has as `task`.
    """

    task: PoolingTask | None = None
    adapter: str | None = None
    use_activation: bool | None = None

    @property
    def adapter_name(self) -> str | None:
        return self.adapter

    @property
    def params(self) -> PoolingParams:
        """See `EmbeddingFields.params`. Raises InvalidRequest for a field that the task has no use for."""
        if self.task not in ("classify", "token_classify"):
            if self.use_activation is not None:
                raise InvalidRequest("is for the tasks classify and token_classify", "use_activation")
            return super().params if self.task is None else msgspec.structs.replace(super().params, task=self.task)
        for name in ("prompt_name", "pooling", "normalize", "dimensions", "adapter"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"is for vectors, and not for the task {self.task}", name)
        return PoolingParams(task=self.task)


VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
INPUTS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "required": ["content"], "properties": {"content": {**PARTS, "maxItems": 1}}},
}


class EmbedRequest(RequestModel):
    """Cohere's request, with either `texts` or `inputs`. `input_type` has no effect on checkpoints without prompts.

    https://docs.cohere.com/reference/embed
    """

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.EMBED

    model: str
    texts: list[str] | None = None
    inputs: Annotated[list[Any], WithJsonSchema(INPUTS_SCHEMA)] | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[VectorType], Field(min_length=1)] | None = None
    output_dimension: Int | None = None
    max_tokens: Int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None

    def source(self) -> str:
        """Returns the name of the field that has the inputs. Raises InvalidRequest unless there is one."""
        given = [name for name in ("texts", "inputs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("give one of texts and inputs", "inputs" if given else "texts")
        return given[0]
