"""Flags of `starling serve` come from the declarations of EngineArgs."""

import inspect

import pytest
from starling_cli.commands import serve
from starling_cli.commands.engine_flags import with_engine_flags
from starling_engine.args import ARGUMENTS, EngineArgs
from starling_engine.errors import ConfigError
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner


def options():
    app = Typer()
    app.command()(serve.serve)
    return {found.name: found for found in get_command(app).params}


def test_each_argument_with_a_panel_has_a_flag_with_its_texts():
    found = options()
    for name, declared in ARGUMENTS.items():
        assert (name in found) == (declared.panel is not None or name == "model")
        if declared.panel is not None:
            assert (found[name].help, found[name].rich_help_panel) == (declared.help, declared.panel)


@pytest.mark.parametrize(
    ("name", "names", "without"),
    [
        ("max_num_seqs", ["--max-num-seqs"], []),
        ("tensor_parallel_size", ["--tensor-parallel-size", "-tp"], []),
        ("enforce_eager", ["--enforce-eager"], []),
        ("enable_prefix_caching", ["--enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        ("async_scheduling", ["--async-scheduling"], ["--no-async-scheduling"]),
    ],
)
def test_names_of_flags(name, names, without):
    found = options()[name]
    assert (found.opts, found.secondary_opts) == (names, without)


def called_with(*flags):
    """EngineArgs of a command line."""
    made = []

    @with_engine_flags
    def command(model: str, **engine: object) -> None:
        made.append(EngineArgs(model=model, **engine))

    app = Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["m", *flags])
    if result.exception is not None:
        raise result.exception
    return made[0]


def test_without_flags_the_arguments_are_the_defaults():
    assert called_with() == EngineArgs(model="m")


def test_values_reach_the_arguments():
    given = ["--kv-cpu-bytes", "1GiB", "--no-enable-prefix-caching", "--no-async-scheduling", "-tp", "2", "--max-model-len", "8"]
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        called_with(*given)
    args = called_with(*given[:2], *given[3:])
    assert (args.kv_cpu_bytes, args.async_scheduling, args.tensor_parallel_size, args.max_model_len) == (1 << 30, False, 2, 8)


def test_flags_of_the_model_come_first_and_the_others_last():
    names = list(inspect.signature(serve.serve).parameters)
    panels = [ARGUMENTS[name].panel if name in ARGUMENTS else "Endpoint" for name in names]
    assert list(dict.fromkeys(panels)) == [
        None,
        "Model",
        "Endpoint",
        "Scheduling",
        "Memory",
        "KV tiers",
        "Parallelism",
        "Speculative decoding",
    ]
