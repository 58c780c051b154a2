"""A service's model is refused for what an agent would refuse, before one is started."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from starling_agent.node.engine_args import engine_args
from starling_agent.node.failures import NodeFailure
from starling_engine.errors import ConfigError, ModelError
from starling_engine.frontend.resolve import resolve
from starling_operator.plan.config import agent_config
from starling_operator.plan.observed import Service
from starling_operator.plan.refusals import in_spec

from starling_cli.local.machine import SETTINGS
from starling_cli.local.sources import PathMap, local_model


def model_refusal(service: Service, maps: Sequence[PathMap]) -> str | None:
    """Returns the refusal with the field's name, of a spec that can be planned; None without one.

    What comes from the hub, a model or a tokenizer, is not looked at: that would download it first.
    """
    spec = service.spec
    assert spec is not None
    path = local_model(spec.model.source, maps)
    if path is None:
        return None
    try:
        args = engine_args(agent_config(service, spec, SETTINGS, revision=""))
        if args.tokenizer is not None and not Path(args.tokenizer).exists():
            return None
        resolve(replace(args, model=str(path)))
    except NodeFailure as error:
        return str(error)
    except ConfigError as error:
        return f"spec.{in_spec(spec, error)}"
    except ModelError as error:
        return f"spec.model.source: {error}"
    return None
