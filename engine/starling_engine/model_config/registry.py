"""The architectures that this engine serves, by the names in a config.json's `architectures`.

A new one is a small file like `llama.py`, its line here, and a row of `tests/engine/checkpoints.py`; docs/models.md tells more.
Other packages add theirs by entry points (`plugins.py`).
"""

import difflib
import re

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.arcee import ARCEE
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
from starling_engine.model_config.internlm3 import INTERNLM3
from starling_engine.model_config.llama import LLAMA
from starling_engine.model_config.minimax_m2 import MINIMAX_M2
from starling_engine.model_config.mistral import MINISTRAL, MISTRAL
from starling_engine.model_config.mixtral import MIXTRAL
from starling_engine.model_config.nemotron import NEMOTRON
from starling_engine.model_config.olmo import OLMO2, OLMO3
from starling_engine.model_config.phi import PHI
from starling_engine.model_config.phi3 import PHI3
from starling_engine.model_config.plugins import GROUP, load_plugin, plugins, refuse_plugin
from starling_engine.model_config.qwen2 import QWEN2
from starling_engine.model_config.qwen2_moe import QWEN2_MOE
from starling_engine.model_config.qwen3 import QWEN3
from starling_engine.model_config.qwen3_moe import QWEN3_MOE
from starling_engine.model_config.seed_oss import SEED_OSS
from starling_engine.model_config.smollm3 import SMOLLM3
from starling_engine.model_config.stablelm import STABLELM
from starling_engine.model_config.starcoder2 import STARCODER2

_ALL = (
    *(ARCEE, COHERE, COHERE2, DEEPSEEK_V2, DEEPSEEK_V3, ERNIE4_5, ERNIE4_5_MOE, EXAONE4, GEMMA, GEMMA2, GEMMA3, GLM, GLM4),
    *(GLM4_MOE, GPT_OSS, GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, HUNYUAN, HUNYUAN_MOE, INTERNLM3, LLAMA, MINIMAX_M2),
    *(MINISTRAL, MISTRAL, MIXTRAL, NEMOTRON, OLMO2, OLMO3, PHI, PHI3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SEED_OSS, SMOLLM3),
    *(STABLELM, STARCODER2),
)
DEFINITIONS = {definition.architecture: definition for definition in _ALL}
OLDER_NAMES = {"Ernie4_5_ForCausalLM": ERNIE4_5.architecture}


def find_definition(architectures: list[str]) -> ModelDefinition:
    """Returns the first of `architectures` that is known, here or to an installed package.

    A base model, such as Qwen3Model or Gemma3TextModel, is the decoder of Qwen3ForCausalLM or Gemma3ForCausalLM.

    Raises UnsupportedModel naming these, the nearest, and all that are known; ModelPackageError for a package that cannot be used.
    """
    for name in architectures:
        base = name.removesuffix("Model")
        for known in (OLDER_NAMES.get(name, name), f"{base}ForCausalLM", f"{base.removesuffix('Text')}ForCausalLM"):
            if known in DEFINITIONS:
                refuse_plugin(known)
            if known in DEFINITIONS or known in plugins():
                return definition_of(known)
    known_names = sorted({*DEFINITIONS, *plugins()})
    near = _nearest(architectures, known_names)
    hint = f"; the nearest is {near}" if near else ""
    raise UnsupportedModel(
        f"config.json: architectures: {', '.join(architectures) or 'none named'}: not supported{hint}; "
        f"supported: {', '.join(known_names)} (an installed package can add one by an entry point of {GROUP}: docs/models.md)"
    )


def _nearest(architectures: list[str], known_names: list[str]) -> str | None:
    """Returns the known name whose family is spelt most like one of those asked for; the rest of a name is alike in all."""
    families = {_family(name): name for name in known_names}
    found = [match for name in architectures for match in difflib.get_close_matches(_family(name), families, n=1)]
    return families[found[0]] if found else None


def _family(architecture: str) -> str:
    return re.sub(r"(for.+|lmheadmodel|model)$", "", architecture.lower())


def definition_of(architecture: str) -> ModelDefinition:
    """Returns the definition of an architecture that `find_definition` has found."""
    return DEFINITIONS.get(architecture) or load_plugin(architecture)
