"""The architectures that this engine serves, by the names in a config.json's `architectures`.

A new one is a small file like `llama.py` and its line here.
"""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.llama import LLAMA
from starling_engine.model_config.mistral import MINISTRAL, MISTRAL
from starling_engine.model_config.mixtral import MIXTRAL
from starling_engine.model_config.qwen2 import QWEN2
from starling_engine.model_config.qwen3 import QWEN3
from starling_engine.model_config.qwen3_moe import QWEN3_MOE

DEFINITIONS = {
    definition.architecture: definition
    for definition in (DEEPSEEK_V2, DEEPSEEK_V3, LLAMA, MISTRAL, MINISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}


def find_definition(architectures: list[str]) -> ModelDefinition:
    """Returns the first of `architectures` that is known. Raises UnsupportedModel naming these and the supported ones."""
    for name in architectures:
        if name in DEFINITIONS:
            return DEFINITIONS[name]
    asked = ", ".join(architectures) or "none named"
    raise UnsupportedModel(f"config.json: architectures: {asked}: not supported; supported: {', '.join(sorted(DEFINITIONS))}")
