"""Declarations of arguments: checks, choices of Literal types, documentation."""

from dataclasses import dataclass
from typing import Literal

import pytest
from starling_engine import EngineArgs
from starling_engine.args import ARGUMENTS, SIZES
from starling_engine.argument import argument, arguments_of, check_value, documentation, size_of
from starling_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Args:
    kind: Literal["a", "b"] = argument("a", "Model", "a or b.")
    count: int | None = argument(None, None, "A count.", "A count of things.", low=1)


FOUND = arguments_of(Args)


def test_a_declaration_gives_the_default_and_choices():
    assert Args() == Args(kind="a", count=None)
    assert FOUND["kind"].choices == ("a", "b")
    assert (FOUND["kind"].text, FOUND["count"].text) == ("a or b.", "A count of things.")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", "c", "kind: must be one of a, b, got 'c'"),
        ("count", 0, "count: must be at least 1, got 0"),
        ("count", "2k", "count: must be a number, got '2k'"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: object, message: str):
    with pytest.raises(ConfigError) as raised:
        check_value(name, FOUND[name], value)
    assert (str(raised.value), raised.value.field) == (message, name)


def test_none_is_decided_later():
    check_value("count", FOUND["count"], None)
    assert size_of("count", None) is None


def test_documentation_is_a_table():
    assert documentation(FOUND) == "kind   a or b.\ncount  A count of things."


def test_engine_args_are_documented():
    assert all(f"\n{name} " in str(EngineArgs.__doc__) for name in ARGUMENTS)
    assert SIZES == ("kv_cache_memory_bytes", "kv_cpu_bytes", "kv_fs_bytes")


def test_types_and_lengths_may_be_written_as_for_vllm():
    args = EngineArgs(model="m", dtype="half", max_model_len="4k")
    assert (args.dtype, args.max_model_len) == ("float16", 4000)
    with pytest.raises(ConfigError, match="max_model_len: 'long' is no length"):
        EngineArgs(model="m", max_model_len="long")
