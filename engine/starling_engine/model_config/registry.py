"""The architectures that this engine serves, by the names in a config.json's `architectures`.

A new one is a small file like `llama.py`, its line here, and a row of `tests/engine/checkpoints.py`; docs/models.md tells more.
Other packages add theirs by entry points (`plugins.py`).
"""

import difflib
import re

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.afmoe import AFMOE
from starling_engine.model_config.apertus import APERTUS
from starling_engine.model_config.arcee import ARCEE
from starling_engine.model_config.bamba import BAMBA
from starling_engine.model_config.bert import BERT, CAMEMBERT, ROBERTA, XLM_ROBERTA
from starling_engine.model_config.biogpt import BIOGPT
from starling_engine.model_config.chatglm import CHATGLM
from starling_engine.model_config.classifier import ENDING, MASKED_ENDING, REWARDS, TOKEN_ENDING
from starling_engine.model_config.cohere import COHERE, COHERE2
from starling_engine.model_config.colbert import STANFORD
from starling_engine.model_config.cwm import CWM
from starling_engine.model_config.deberta import DEBERTA_V2
from starling_engine.model_config.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V3_2
from starling_engine.model_config.deepseek_v4 import DEEPSEEK_V4
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.distilbert import DISTILBERT
from starling_engine.model_config.dots1 import DOTS1
from starling_engine.model_config.electra import ELECTRA
from starling_engine.model_config.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from starling_engine.model_config.eurobert import EUROBERT
from starling_engine.model_config.exaone import EXAONE
from starling_engine.model_config.exaone4 import EXAONE4, EXAONE_MOE
from starling_engine.model_config.falcon import FALCON
from starling_engine.model_config.falcon_h1 import FALCON_H1
from starling_engine.model_config.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from starling_engine.model_config.gemma4 import GEMMA4, GEMMA4_UNIFIED
from starling_engine.model_config.glm import GLM, GLM4
from starling_engine.model_config.glm4_moe import GLM4_MOE
from starling_engine.model_config.glm4_moe_lite import GLM4_MOE_LITE
from starling_engine.model_config.glm_moe_dsa import GLM_MOE_DSA
from starling_engine.model_config.gpt2 import GPT2
from starling_engine.model_config.gpt_bigcode import GPT_BIGCODE
from starling_engine.model_config.gpt_neo import GPT_NEO
from starling_engine.model_config.gpt_neox import GPT_NEOX
from starling_engine.model_config.gpt_oss import GPT_OSS
from starling_engine.model_config.gptj import GPTJ
from starling_engine.model_config.granite import GRANITE
from starling_engine.model_config.granite_hybrid import GRANITE_MOE_HYBRID
from starling_engine.model_config.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from starling_engine.model_config.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from starling_engine.model_config.hunyuan import HUNYUAN, HUNYUAN_MOE
from starling_engine.model_config.hunyuan_v3 import HUNYUAN_V3
from starling_engine.model_config.hyperclovax import HYPERCLOVAX
from starling_engine.model_config.internlm2 import INTERNLM2
from starling_engine.model_config.internlm3 import INTERNLM3
from starling_engine.model_config.jais2 import JAIS2
from starling_engine.model_config.jamba import JAMBA
from starling_engine.model_config.kimi_linear import KIMI_LINEAR
from starling_engine.model_config.lfm2 import LFM2, LFM2_MOE
from starling_engine.model_config.lfm3 import LFM3
from starling_engine.model_config.llama import LLAMA
from starling_engine.model_config.llama4 import LLAMA4
from starling_engine.model_config.mellum import MELLUM
from starling_engine.model_config.mimo import MIMO
from starling_engine.model_config.minicpm import MINICPM, MINICPM3
from starling_engine.model_config.minimax_m2 import MINIMAX_M2
from starling_engine.model_config.mistral import MINISTRAL, MISTRAL, MISTRAL3
from starling_engine.model_config.mistral4 import MISTRAL4
from starling_engine.model_config.mixtral import MIXTRAL
from starling_engine.model_config.modernbert import MODERNBERT
from starling_engine.model_config.mpnet import MPNET
from starling_engine.model_config.nemotron import NEMOTRON
from starling_engine.model_config.nemotron_h import NEMOTRON_H
from starling_engine.model_config.olmo import FLEX_OLMO, OLMO2, OLMO3, OLMO_HYBRID, OLMOE
from starling_engine.model_config.opt import OPT
from starling_engine.model_config.phi import PHI
from starling_engine.model_config.phi3 import PHI3
from starling_engine.model_config.plugins import GROUP, load_plugin, plugins, refuse_plugin
from starling_engine.model_config.qwen2 import QWEN2
from starling_engine.model_config.qwen2_moe import QWEN2_MOE
from starling_engine.model_config.qwen3 import QWEN3
from starling_engine.model_config.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from starling_engine.model_config.qwen3_moe import QWEN3_MOE
from starling_engine.model_config.qwen3_next import QWEN3_NEXT
from starling_engine.model_config.rotated_bert import GTE, JINA_V3, JINA_V3_ADAPTED, NOMIC_BERT
from starling_engine.model_config.seed_oss import SEED_OSS
from starling_engine.model_config.smollm3 import SMOLLM3
from starling_engine.model_config.solar_open import SOLAR_OPEN
from starling_engine.model_config.stablelm import STABLELM
from starling_engine.model_config.starcoder2 import STARCODER2
from starling_engine.model_config.state_space import FALCON_MAMBA, MAMBA, MAMBA2
from starling_engine.model_config.text_parts import (
    GEMMA3_NESTED,
    KIMI_K2_5,
    LLAMA4_NESTED,
    MISTRAL3_NESTED,
    MISTRAL4_NESTED,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from starling_engine.model_config.youtu import YOUTU

_ALL = (
    *(
        APERTUS,
        ARCEE,
        COHERE,
        COHERE2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEEPSEEK_V3_2,
        DEEPSEEK_V4,
        ERNIE4_5,
        ERNIE4_5_MOE,
        EXAONE4,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        GEMMA4_UNIFIED,
        GLM,
    ),
    *(
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM_MOE_DSA,
        GPT2,
        GPT_NEOX,
        GPT_OSS,
        GRANITE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        HUNYUAN,
        HUNYUAN_MOE,
        HUNYUAN_V3,
        INTERNLM3,
        LLAMA,
    ),
    *(LLAMA4, MINIMAX_M2, MINISTRAL, MISTRAL, MIXTRAL, NEMOTRON, OLMO2, OLMO3, OLMO_HYBRID, OLMOE, OPT, PHI, PHI3, QWEN2),
    *(QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, SEED_OSS, SMOLLM3, STABLELM, STARCODER2),
    *(BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, JAMBA, KIMI_LINEAR, LFM2, LFM2_MOE, LFM3, NEMOTRON_H),
    *(FALCON_MAMBA, MAMBA, MAMBA2),
    *(AFMOE, BIOGPT, CHATGLM, CWM, DOTS1, EXAONE, EXAONE_MOE, FALCON, FLEX_OLMO, GPTJ, GPT_BIGCODE, GPT_NEO, GRANITE_MOE_SWA),
    *(GRANITE_SWA, HYPERCLOVAX, INTERNLM2, JAIS2, MELLUM, MIMO, MINICPM, MINICPM3, SOLAR_OPEN, VAULT_GEMMA, YOUTU),
    *(
        GEMMA3_NESTED,
        KIMI_K2_5,
        LLAMA4_NESTED,
        MISTRAL3,
        MISTRAL3_NESTED,
        MISTRAL4,
        MISTRAL4_NESTED,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
    ),
    *(
        BERT,
        CAMEMBERT,
        DEBERTA_V2,
        DISTILBERT,
        ELECTRA,
        EUROBERT,
        GTE,
        JINA_V3,
        JINA_V3_ADAPTED,
        MODERNBERT,
        MPNET,
        NOMIC_BERT,
        ROBERTA,
        XLM_ROBERTA,
    ),
)
DEFINITIONS = {definition.architecture: definition for definition in _ALL}
OTHER_NAMES = {
    "Ernie4_5_ForCausalLM": ERNIE4_5.architecture,
    "BertForPreTraining": BERT.architecture,
    STANFORD: BERT.architecture,
    **dict.fromkeys(REWARDS, QWEN2.architecture),
    "ChatGLMForConditionalGeneration": CHATGLM.architecture,
    "ElectraForPreTraining": ELECTRA.architecture,
    "IQuestCoderForCausalLM": LLAMA.architecture,
    "Gemma4ForConditionalGeneration": GEMMA4.architecture,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED.architecture,
    "Kimi_K25ForConditionalGeneration": KIMI_K2_5.architecture,
    "Qwen3_5ForConditionalGeneration": QWEN3_5.architecture,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE.architecture,
    f"Qwen3_5Text{ENDING}": QWEN3_5.architecture,
    **{f"GPT2{ending}": GPT2.architecture for ending in ("Model", ENDING, TOKEN_ENDING)},
    **{
        f"{name.removesuffix('Model')}{ending}": name
        for name, each in DEFINITIONS.items()
        for ending in (MASKED_ENDING, ENDING, TOKEN_ENDING)
        if not each.causal and (ending != ENDING or each.head is not None)
    },
    **{
        f"{name.removesuffix('ForCausalLM')}{ending}": name
        for name in DEFINITIONS
        if name.endswith("ForCausalLM")
        for ending in (ENDING, TOKEN_ENDING)
    },
    **{f"Gte{ending}": GTE.architecture for ending in ("Model", MASKED_ENDING, ENDING, TOKEN_ENDING)},
}
"""Architectures that are one of `DEFINITIONS` but for their name and their head."""


def find_definition(architectures: list[str]) -> ModelDefinition:
    """Returns the first of `architectures` that is known, here or to an installed package.

    A base model, such as Qwen3Model or Gemma3TextModel, is the decoder of Qwen3ForCausalLM or Gemma3ForCausalLM.

    Raises UnsupportedModel naming these, the nearest, and all that are known; ModelPackageError for a package that cannot be used.
    """
    for name in architectures:
        base = name.removesuffix("Model")
        for known in (OTHER_NAMES.get(name, name), f"{base}ForCausalLM", f"{base.removesuffix('Text')}ForCausalLM"):
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
    families = {_family(name): name for name in reversed(known_names)}  # a text model is before one with images
    found = [match for name in architectures for match in difflib.get_close_matches(_family(name), families, n=1)]
    return families[found[0]] if found else None


def _family(architecture: str) -> str:
    return re.sub(r"(for.+|lmheadmodel|model)$", "", architecture.lower())


def definition_of(architecture: str) -> ModelDefinition:
    """Returns the definition of an architecture that `find_definition` has found."""
    return DEFINITIONS.get(architecture) or load_plugin(architecture)
