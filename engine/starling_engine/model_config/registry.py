"""The architectures that this engine serves, by the names in a config.json's `architectures`.

A new one is a small file like `llama.py`, its line here, and a row of `tests/engine/checkpoints.py`; docs/models.md tells more.
"""

import difflib

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.cohere import COHERE, COHERE2
from starling_engine.model_config.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from starling_engine.model_config.exaone4 import EXAONE4
from starling_engine.model_config.gemma import GEMMA, GEMMA2, GEMMA3
from starling_engine.model_config.glm import GLM, GLM4
from starling_engine.model_config.glm4_moe import GLM4_MOE
from starling_engine.model_config.gpt_oss import GPT_OSS
from starling_engine.model_config.granite import GRANITE
from starling_engine.model_config.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from starling_engine.model_config.hunyuan import HUNYUAN, HUNYUAN_MOE
from starling_engine.model_config.llama import LLAMA
from starling_engine.model_config.minimax_m2 import MINIMAX_M2
from starling_engine.model_config.mistral import MINISTRAL, MISTRAL
from starling_engine.model_config.mixtral import MIXTRAL
from starling_engine.model_config.olmo import OLMO2, OLMO3
from starling_engine.model_config.phi3 import PHI3
from starling_engine.model_config.qwen2 import QWEN2
from starling_engine.model_config.qwen2_moe import QWEN2_MOE
from starling_engine.model_config.qwen3 import QWEN3
from starling_engine.model_config.qwen3_moe import QWEN3_MOE
from starling_engine.model_config.seed_oss import SEED_OSS
from starling_engine.model_config.smollm3 import SMOLLM3

_ALL = (
    *(COHERE, COHERE2, DEEPSEEK_V2, DEEPSEEK_V3, ERNIE4_5, ERNIE4_5_MOE, EXAONE4, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, GLM4_MOE),
    *(
        GPT_OSS,
        GRANITE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        HUNYUAN,
        HUNYUAN_MOE,
        LLAMA,
        MINIMAX_M2,
        MINISTRAL,
        MISTRAL,
        MIXTRAL,
        OLMO2,
        OLMO3,
        PHI3,
    ),
    *(QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SEED_OSS, SMOLLM3),
)
DEFINITIONS = {definition.architecture: definition for definition in _ALL}


def find_definition(architectures: list[str]) -> ModelDefinition:
    """Returns the first of `architectures` that is known. Raises UnsupportedModel naming these, the nearest, and all that are.

    A base model, such as Qwen3Model or Gemma3TextModel, is the decoder of Qwen3ForCausalLM or Gemma3ForCausalLM.
    """
    for name in architectures:
        base = name.removesuffix("Model")
        for known in (name, f"{base}ForCausalLM", f"{base.removesuffix('Text')}ForCausalLM"):
            if known in DEFINITIONS:
                return DEFINITIONS[known]
    asked = ", ".join(architectures) or "none named"
    near = [match for name in architectures for match in difflib.get_close_matches(name, DEFINITIONS, n=1)]
    hint = f"; the nearest is {near[0]}" if near else ""
    raise UnsupportedModel(
        f"config.json: architectures: {asked}: not supported{hint}; supported: {', '.join(sorted(DEFINITIONS))} "
        "(docs/models.md says how to add one)"
    )
