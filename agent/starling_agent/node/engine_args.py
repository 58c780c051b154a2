"""From the configuration's `engine` to EngineArgs, strictly: a name or a value that the engine does not know is refused."""

import dataclasses

import msgspec
from starling_engine import EngineArgs
from starling_engine.args import SIZES, size_of
from starling_engine.errors import ConfigError

from starling_agent.contract.config import AgentConfig
from starling_agent.group.node_layout import most_places
from starling_agent.node.failures import fatal

SET_ELSEWHERE = {
    "model": "model.source",
    "revision": "model.source, as hf://org/name@revision",
    "progress_timeout": "recovery.progress_timeout_seconds",
    "tensor_parallel_size": "layout.tensor",
    "pipeline_parallel_size": "layout.pipeline",
    "data_parallel_size": "layout.data",
    "enable_elastic_ep": "layout.elastic",
    "min_data_parallel_size": "layout.elastic",
}
UNUSED = ("show_progress",)
"""Draws bars for a person at a terminal."""


def possible_names() -> list[str]:
    return [f.name for f in dataclasses.fields(EngineArgs) if f.name not in SET_ELSEWHERE and f.name not in UNUSED]


def _elastic(config: AgentConfig) -> dict[str, object]:
    """Only experts move between ranks: the number of cores without any may change, and the engine need not know."""
    bounds = config.layout.elastic
    if bounds is None or not config.engine.get("enable_expert_parallel"):
        return {}
    return {"enable_elastic_ep": True, "min_data_parallel_size": bounds.min}


def _with_sizes(engine: dict[str, object]) -> dict[str, object]:
    """What is written like "4GiB" in bytes; the conversion that follows takes no text for a number."""
    try:
        return {name: size_of(name, value) if name in SIZES and isinstance(value, str) else value for name, value in engine.items()}
    except ConfigError as error:
        raise fatal(f"engine.{error}") from None


def engine_args(config: AgentConfig) -> EngineArgs:
    """All but the model's folder, which is known later. Raises NodeFailure naming the argument."""
    possible = possible_names()
    for name in config.engine:
        if name in SET_ELSEWHERE:
            raise fatal(f"engine.{name}: this is set by {SET_ELSEWHERE[name]}")
        if name not in possible:
            raise fatal(f"engine.{name}: the engine has no such argument; possible are {', '.join(sorted(possible))}")
    settings = {
        **_with_sizes(config.engine),
        "model": config.model.source,
        "progress_timeout": config.recovery.progress_timeout_seconds,
        "tensor_parallel_size": config.layout.tensor,
        "pipeline_parallel_size": config.layout.pipeline,
        "data_parallel_size": most_places(config.layout).data,
        **_elastic(config),
        "show_progress": False,
    }
    try:
        return msgspec.convert(settings, EngineArgs)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise fatal(f"engine.{path.rstrip('`')}: {message[:1].lower()}{message[1:]}") from None
    except ConfigError as error:
        raise fatal(f"engine.{error}") from None
