"""Fields of the spec agree with the engine arguments that they set: type, default, choices, bounds and text."""

import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic_core import PydanticUndefined
from starling_crds.parse import parse
from starling_crds.v1alpha1.engine_arguments import TypedArgument, typed_arguments
from starling_engine.args import ARGUMENTS, EngineArgs
from starling_operator.plan.config import engine_arguments

from tests.crds.manifests import service

TYPED = typed_arguments()
OTHER_DEFAULT = {
    "device": "an operator has no device to look at",
    "data_parallel_size": "expert may be given in its place",
}
OTHER_TEXT = {
    "model": "the schemes are the operator's",
    "revision": "a part of model.source",
    "device": "a device is a resource of the cluster",
    "kv_fs_path": "a folder of the node, which the engine sees elsewhere",
}
each_typed = pytest.mark.parametrize("name", sorted(TYPED))


def test_every_marked_argument_is_one_of_the_engine():
    assert TYPED.keys() <= ARGUMENTS.keys()
    assert (OTHER_DEFAULT.keys() | OTHER_TEXT.keys()) <= TYPED.keys()


@each_typed
def test_the_type_is_the_arguments(name: str):
    assert TYPED[name].kind in _plain_types(get_type_hints(EngineArgs)[name])


@each_typed
def test_the_default_is_the_arguments(name: str):
    default = TYPED[name].info.default
    if default is not PydanticUndefined and name not in OTHER_DEFAULT:
        assert default == EngineArgs.__dataclass_fields__[name].default


@each_typed
def test_choices_and_bounds_are_the_arguments(name: str):
    typed, argument = TYPED[name], ARGUMENTS[name]
    if get_origin(typed.info.annotation) is Literal:
        assert get_args(typed.info.annotation) == argument.choices
    lows = [mark.ge for mark in typed.info.metadata if hasattr(mark, "ge")]
    assert argument.low is None or lows in ([], [argument.low])


@each_typed
def test_the_description_begins_like_the_arguments(name: str):
    if name not in OTHER_TEXT:
        assert _first_sentence(TYPED[name].info.description) in (
            _first_sentence(_in_words_of_the_api(text)) for text in (ARGUMENTS[name].help, ARGUMENTS[name].description)
        )


def test_the_operator_sets_no_other_arguments():
    engine = {"kvMemory": "1Gi", "memoryFraction": 0.5}
    spec = parse(service({"model": {"source": "file:///m", "maxLength": 8}, "engine": engine})).spec
    assert spec is not None
    assert set(engine_arguments(spec)) < set(TYPED)


def _plain_types(annotation: Any) -> set[type]:
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return {kind for part in get_args(annotation) for kind in _plain_types(part)} or {annotation}


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", text or "")[0]


def _in_words_of_the_api(text: str) -> str:
    """Names of arguments become those of their fields."""
    for name, typed in TYPED.items():
        text = re.sub(rf"\b{name}\b", _last(typed), text) if "_" in name else text
    return text


def _last(typed: TypedArgument) -> str:
    return typed.field.rpartition(".")[2]
