"""Youtu-LLM: DeepSeek-V3's latents, with an MLP in each layer."""

from dataclasses import replace

from starling_engine.model_config.deepseek import DEEPSEEK_V3
from starling_engine.model_config.moe import no_experts

YOUTU = replace(DEEPSEEK_V3, architecture="YoutuForCausalLM", moe=no_experts, tie_word_embeddings=True)
