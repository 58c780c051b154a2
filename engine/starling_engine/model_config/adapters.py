"""Low-rank adapters that a checkpoint has beside its weights, one for each of its tasks (arXiv 2409.10173). Imports no torch."""

from dataclasses import dataclass

from starling_engine.model_config.fields import Fields

INSTRUCTIONS = "task_instructions"
"""The config's field with the texts that go before inputs, by the name of an adapter."""
MAX_ADAPTERS, MAX_RANK = 256, 1024
"""More than any checkpoint has; a config with more is damaged."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters of all matrices: W becomes W + `scale` * B A, where A and B are those of a token's adapter (arXiv 2106.09685).

    names   in the order in which tensors have them: `lora_A` [adapters, rank, columns] and `lora_B` [adapters, rows, rank]; of a
            table these are [adapters, rows, rank] and [adapters, rank, columns]
    rank    of each product
    """

    names: tuple[str, ...]
    rank: int
    scale: float

    @property
    def columns(self) -> int:
        """Columns of all adapters' A, one behind the other."""
        return len(self.names) * self.rank


def no_adapters(_config: Fields) -> AdapterConfig | None:
    """Returns None, for a family whose checkpoints have none."""
    return None


def task_adapters(config: Fields) -> AdapterConfig | None:
    """Reads the adapters of Jina 3; None where they are not in the checkpoint."""
    names = config.texts("lora_adaptations")
    if not names or not config.boolean("load_trained_adapters", True):
        return None
    if len({*names}) != len(names) or len(names) > MAX_ADAPTERS:
        raise config.error("lora_adaptations", f"must be at most {MAX_ADAPTERS} different names")
    for name in config.child(INSTRUCTIONS).names():
        if name not in names:
            raise config.error(INSTRUCTIONS, f"must have texts of {', '.join(names)} alone")
    rank = config.integer("lora_rank", 4, high=MAX_RANK)
    return AdapterConfig(names=tuple(names), rank=rank, scale=config.number("lora_alpha", 1.0) / rank)
