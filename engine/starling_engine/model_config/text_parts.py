"""Text models inside models that read images, too, as their authors publish them. Images are refused, and their tensors not loaded.

Such a config has the text model's fields in `text_config`. Positions of text in time, height and width are the same, so that the
sections of a rotary embedding (`mrope_section`) do not matter.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starling_engine.model_config.deepseek import DEEPSEEK_V3
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.gemma import GEMMA3
from starling_engine.model_config.llama4 import LLAMA4
from starling_engine.model_config.mistral import MISTRAL3
from starling_engine.model_config.mistral4 import MISTRAL4
from starling_engine.model_config.qwen2 import QWEN2
from starling_engine.model_config.qwen3 import QWEN3
from starling_engine.model_config.qwen3_moe import QWEN3_MOE

GEMMA3_SIZES = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""Fields that the configs of Gemma 3 (4B to 27B) leave out, with what transformers takes for them."""
IMAGES = ("vision_tower.", "multi_modal_projector.")
VISUAL = ("model.visual.", "visual.")


def _text_part(
    text: ModelDefinition, name: str, left_out: tuple[str, ...], defaults: Mapping[str, Any] | None = None
) -> ModelDefinition:
    """Returns the definition of a model with that text model, and with tensors that begin so besides."""
    names = replace(text.names, left_out=(*text.names.left_out, *left_out))
    return replace(text, architecture=f"{name}ForConditionalGeneration", nested="text_config", names=names, defaults=defaults or {})


GEMMA3_NESTED = _text_part(GEMMA3, "Gemma3", IMAGES, GEMMA3_SIZES)
KIMI_K2_5 = _text_part(DEEPSEEK_V3, "KimiK25", ("vision_tower.", "mm_projector.", "model.mm_projector."))
LLAMA4_NESTED = _text_part(LLAMA4, "Llama4", ("vision_model.", "multi_modal_projector."))
MISTRAL4_NESTED = _text_part(MISTRAL4, "Mistral4", IMAGES)
MISTRAL3_NESTED = replace(_text_part(MISTRAL3, "Mistral3", IMAGES), texts={"mistral4": MISTRAL4_NESTED})
QWEN2_VL = _text_part(QWEN2, "Qwen2VL", VISUAL)
QWEN2_5_VL = _text_part(QWEN2, "Qwen2_5_VL", VISUAL)
QWEN3_VL = _text_part(QWEN3, "Qwen3VL", VISUAL)
# Its authors have experts in columns, and transformers 5 saves them in rows.
QWEN3_VL_MOE = _text_part(
    replace(QWEN3_MOE, names=replace(QWEN3_MOE.names, expert_layout="columns or rows")),
    "Qwen3VLMoe",
    VISUAL,
    {"norm_topk_prob": True},
)
