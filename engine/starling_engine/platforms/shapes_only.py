"""A GPU of which only the kind is known: tensors have shapes and no memory, and kernels are noted. See `kernels.ahead`."""

import torch

from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.interpreted import InlineQueue


class ShapesOnlyPlatform(CpuPlatform):
    """Chooses what a GPU chooses. What is sampled cannot be read."""

    name = "meta"
    async_scheduling = True

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")
        self.queue = InlineQueue()

    def attention_backends(self) -> tuple[str, ...]:
        return ("triton",)
