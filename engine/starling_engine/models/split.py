"""Whether a model can be split over ranks. Imports no torch."""

from starling_engine.errors import ConfigError
from starling_engine.layout import ParallelLayout
from starling_engine.models.config import ModelConfig


def check_split(model: ModelConfig, layout: ParallelLayout) -> None:
    """Raises ConfigError naming what does not divide, with the sizes that are possible."""
    tensor = layout.tensor
    if layout.pipeline > model.num_layers:
        raise ConfigError(
            f"must be at most {model.num_layers}, the model's layers, got {layout.pipeline}", "pipeline_parallel_size"
        )
    if not _splits(model, tensor):
        possible = ", ".join(str(n) for n in range(1, model.num_heads + 1) if _splits(model, n))
        raise ConfigError(
            f"{tensor} ranks cannot share this model: {model.num_heads} attention heads and an MLP of {model.intermediate_size}"
            f" must be multiples of it, and {model.num_kv_heads} key-value heads a multiple or a divisor; possible: {possible}",
            "tensor_parallel_size",
        )


def _splits(model: ModelConfig, tensor: int) -> bool:
    heads = model.num_kv_heads
    return not (model.num_heads % tensor or model.intermediate_size % tensor) and not (heads % tensor and tensor % heads)
