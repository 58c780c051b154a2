"""Configs with one damaged field each, of all families: what cannot be is refused by a clear error, and nothing else is raised."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from starling_engine.errors import ConfigError, ModelError
from starling_engine.kv.layer_specs import state_group, whole_groups
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.split import check_split
from starling_engine.topology.layout import ParallelLayout
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.checkpoints import BASE, FAMILIES, VARIANTS
from tests.engine.encoder_checkpoints import CLASSIFIERS, ENCODERS, SHAPE
from tests.engine.workers import plain_worker

VALUES: tuple[Any, ...] = (0, -1, 3, 10**9, 10**30, 10**400, 1e308, 5e-324, 1.5, "x", True, [], {}, float("nan"), None)
NAMES = [*VARIANTS, *FAMILIES, *(f"{name} encoder" for name in ENCODERS), *(f"{name} classifier" for name in CLASSIFIERS)]


def config_of(name: str) -> dict[str, Any]:
    """Returns all fields of the config of a checkpoint of the tests."""
    base, _, kind = name.rpartition(" ")
    if base:
        encoder = (ENCODERS if kind == "encoder" else CLASSIFIERS)[base]
        config, architecture = getattr(transformers, encoder.config)(**{**SHAPE, **encoder.changes}), encoder.model
        edits: dict[str, Any] = {}
    else:
        variant = VARIANTS.get(name) or FAMILIES[name]
        config = CONFIG_MAPPING[variant.model_type](**{**BASE, **variant.changes})
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(variant.model_type, "")  # none of Mistral 4, which its edits name
        architecture, edits = known if isinstance(known, str) else known[0], variant.edits
    fields = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture], **edits}
    return {field: value for field, value in fields.items() if value is not None}


def damaged(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each field's name, in an object its path, with the fields in which it has another value."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", {**fields, name: other}) for inner, other in damaged(value))
        lists = [value[:-1], [*value, *value[-1:]], ["x"] * len(value), [-1] * len(value)] if isinstance(value, list) else []
        yield from ((name, {**fields, name: other}) for other in (*lists, *VALUES))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.whole
def test_a_damaged_field_is_refused_by_a_clear_error(name: str) -> None:
    for field, config in damaged(config_of(name)):
        try:
            model = parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))
            for layout in (ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(pipeline=2)):
                check_split(model, layout)
                worker = plain_worker(layout=layout, max_model_len=min(model.usual_length, 4096), block_size=16)
                whole_groups(model, worker)
                state_group(model, worker)
        except (ModelError, ConfigError):
            continue
        except Exception as error:
            raise AssertionError(f"{field}: {error!r}") from error


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("bert encoder", "type_vocab_size"),
        ("gte encoder", "type_vocab_size"),
        ("gemma4-inputs", "hidden_size_per_layer_input"),
    ],
)
def test_a_size_of_what_is_made_before_tensors_are_compared_has_a_bound(name: str, field: str) -> None:
    config = Fields({**config_of(name), field: 10**9}, "config.json")
    with pytest.raises(ModelError, match=f"{field} must be at most 65536"):
        parse_model_config(config, Fields({}, "generation_config.json"))
