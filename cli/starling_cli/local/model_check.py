"""A service's model is refused for what an agent would refuse, before one is started."""

from collections.abc import Sequence
from dataclasses import replace

from starling_agent.node.engine_args import engine_args
from starling_engine.errors import ConfigError, ModelError
from starling_engine.frontend.resolve import resolve
from starling_operator.plan.config import agent_config
from starling_operator.plan.observed import Service
from starling_operator.plan.refusals import in_spec

from starling_cli.local.machine import SETTINGS
from starling_cli.local.sources import PathMap, local_model


def model_refusal(service: Service, maps: Sequence[PathMap]) -> str | None:
    """Returns the refusal with the field's name, of a spec that can be planned. A model of the hub is not looked at: None."""
    spec = service.spec
    assert spec is not None
    path = local_model(spec.model.source, maps)
    if path is None:
        return None
    args = engine_args(agent_config(service, spec, SETTINGS, revision=""))
    try:
        resolve(replace(args, model=str(path)))
    except ConfigError as error:
        return f"spec.{in_spec(spec, error)}"
    except ModelError as error:
        return f"spec.model.source: {error}"
    return None
