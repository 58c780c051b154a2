"""Temperatures of queries, which depend on their positions."""

import torch

from starling_engine.model_config.layer import Temperature


def temperatures(temperature: Temperature, positions: torch.Tensor) -> torch.Tensor:
    """positions [T] -> what queries are multiplied by, [T, 1] fp32."""
    steps = torch.floor((positions.float() + temperature.first) / temperature.step)
    return (torch.log1p(steps) * temperature.scale + 1.0)[:, None]
