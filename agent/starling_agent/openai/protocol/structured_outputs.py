"""Fields for the form of the output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from starling_engine.errors import InvalidRequest
from starling_engine.params import StructuredOutputsParams

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import RequestModel
from starling_agent.openai.protocol.refused import FieldRefusal, without_refused

FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of StructuredOutputsParams of which a request has one."""


def _schema(value: Any) -> Any:
    if isinstance(value, dict | bool):
        return value
    raise PydanticCustomError("json_schema", "must be a JSON schema: an object, true or false")


def _schema_or_text(value: Any) -> Any:
    return value if isinstance(value, str) else _schema(value)


def _tag(value: Any) -> Any:
    if isinstance(value, str | dict):
        return value
    raise PydanticCustomError("structural_tag", "must be an object, or its JSON as text")


# Of a plain union, errors would tell what its first branch is.
Schema = Annotated[Any, AfterValidator(_schema), WithJsonSchema({"type": ["object", "boolean"]})]
SchemaOrText = Annotated[Any, AfterValidator(_schema_or_text), WithJsonSchema({"type": ["object", "boolean", "string"]})]
Tag = Annotated[Any, AfterValidator(_tag), WithJsonSchema({"type": ["object", "string"]})]


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the output.

    field  the request's field that asks for it
    kind   one of FORMS
    """

    field: str
    kind: str
    value: Any
    may_reason: bool | None = None
    """The output may begin with reasoning, which has no form; None: the request does not say."""
    no_white_space: bool = False
    """JSON has none between its tokens."""

    @property
    def renamed(self) -> dict[str, str]:
        """The request's name for the engine's name of the field."""
        return {f"structured_outputs.{self.kind}": self.field}

    def params(self) -> StructuredOutputsParams:
        """Returns the engine's parameters."""
        return StructuredOutputsParams(
            **{self.kind: self.value}, disable_any_whitespace=self.no_white_space, reasoning=bool(self.may_reason)
        )


class JsonSchemaFormat(RequestModel):
    """A schema is enforced with and without `strict`. `name` and `description` do not reach the model."""

    schema_: Annotated[Schema, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(RequestModel):
    """A part of the output between two texts, with a form of its own."""

    begin: str
    schema_: Annotated[Schema, Field(alias="schema")]
    end: str


class ResponseFormat(RequestModel):
    """OpenAI's formats, and vLLM's "structural_tag", which has either `format` or `structures` with `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None

    def form(self) -> Form | None:
        """Returns the form that the output has to have; None for text. Raises InvalidRequest naming the field at fault."""
        self._check_fields()
        match self.type:
            case "text":
                return None
            case "json_object":
                return Form("response_format", "json_object", True)
            case "json_schema":
                assert self.json_schema is not None
                return Form("response_format.json_schema.schema", "json", self.json_schema.schema_)
            case "structural_tag":
                return Form("response_format", "structural_tag", self._tag())

    def _check_fields(self) -> None:
        """Raises InvalidRequest for a field that the type has to have and has not, or has not and was given."""
        wanted: tuple[str, ...] = ()
        if self.type == "json_schema":
            wanted = ("json_schema",)
        elif self.type == "structural_tag":
            wanted = ("format",) if self.structures is None and self.triggers is None else ("structures", "triggers")
        for name in ("json_schema", "format", "structures", "triggers"):
            given, path = getattr(self, name) is not None, f"response_format.{name}"
            if given and name not in wanted:
                raise InvalidRequest(f"{path} has no meaning here (type {self.type!r})", path)
            if name in wanted and not given:
                raise InvalidRequest(f"{path} is required (type {self.type!r})", path)

    def _tag(self) -> dict[str, Any]:
        if self.format is not None:
            return {"type": self.type, "format": self.format}
        structures = [structure.model_dump(by_alias=True) for structure in self.structures or ()]
        return {"type": self.type, "structures": structures, "triggers": self.triggers}


class StructuredOutputs(RequestModel):
    """vLLM's object: one of its forms, and options, which hold for a `response_format` beside it too."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.STRUCTURED_OUTPUTS

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Tag | None = None
    disable_any_whitespace: bool | None = None
    reasoning: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, cls.refusals, "structured_outputs.") if isinstance(value, dict) else value

    def forms(self) -> Iterator[Form]:
        for kind in FORMS:
            value = getattr(self, "json_" if kind == "json" else kind)
            if value is not None and (kind, value) != ("json_object", False):
                yield Form(f"structured_outputs.{kind}", kind, value)


class FormFields(RequestModel):
    """vLLM's fields of which one may say which form the output has, on every route that samples."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def form_fields(self) -> dict[str, Any]:
        """Returns those of these fields that are there, as a chat has them."""
        return self.model_dump(include=set(FormFields.model_fields), by_alias=True, exclude_none=True)


class StructuredOutputFields(FormFields):
    """The same, beside OpenAI's."""

    response_format: ResponseFormat | None = None

    def form(self) -> Form | None:
        """Returns the form that is asked for. Raises InvalidRequest for several, and for options without one."""
        forms = list(self._forms())
        if len(forms) > 1:
            first, second = forms[0].field, forms[1].field
            raise InvalidRequest(f"{first} and {second} each say which form the output has; give one of them", second)
        if self.structured_outputs is not None and not forms:
            raise InvalidRequest(f"structured_outputs needs one of {', '.join(FORMS)}", "structured_outputs")
        if not forms:
            return None
        options = self.structured_outputs or StructuredOutputs()
        return replace(forms[0], may_reason=options.reasoning, no_white_space=bool(options.disable_any_whitespace))

    def _forms(self) -> Iterator[Form]:
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            yield form
        if self.structured_outputs is not None:
            yield from self.structured_outputs.forms()
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield Form(f"guided_{kind}", kind, value)
