"""EngineArgs of a configuration. A name or a value that the engine does not know is refused."""

import dataclasses

import msgspec
from starling_engine import EngineArgs
from starling_engine.args import SIZES
from starling_engine.argument import size_of
from starling_engine.errors import ConfigError

from starling_agent.contract.config import AgentConfig
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
"""Arguments that another section of the configuration sets, and which."""
UNUSED = ("show_progress",)
"""Progress bars are for a person at a terminal."""


def possible_names() -> list[str]:
    return [f.name for f in dataclasses.fields(EngineArgs) if f.name not in SET_ELSEWHERE and f.name not in UNUSED]


def _elastic(config: AgentConfig) -> dict[str, object]:
    """Returns the arguments of an elastic engine. Without experts it has none: nothing moves between cores that come and go."""
    bounds = config.layout.elastic
    if bounds is None or not config.engine.get("enable_expert_parallel"):
        return {}
    return {"enable_elastic_ep": True, "min_data_parallel_size": bounds.min}


def _with_sizes(engine: dict[str, object]) -> dict[str, object]:
    """Returns the arguments with sizes like "4GiB" in bytes; the conversion that follows accepts no text for a number."""
    try:
        return {name: size_of(name, value) if name in SIZES and isinstance(value, str) else value for name, value in engine.items()}
    except ConfigError as error:
        raise fatal(f"engine.{error}") from None


def engine_args(config: AgentConfig) -> EngineArgs:
    """Returns the arguments, but for the model's folder, which is known later. Raises NodeFailure naming the argument."""
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
        "data_parallel_size": config.layout.largest.data,
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
