"""Phi-3, 3.5 and 4 (also mini): Llama with fused matrices in its checkpoints, LongRoPE, and partly rotated heads."""

from starling_engine.model_config.definition import ModelDefinition, partial_rope, written_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers with one window. Configs for long contexts write one that is as long as these: it hides nothing."""
    window = written_window(config)
    return with_windows((0 if window >= config.integer("max_position_embeddings") else window,) * num_layers)


PHI3 = ModelDefinition(architecture="Phi3ForCausalLM", layers=_layers, ropes=partial_rope(1.0), rms_eps=1e-5)
