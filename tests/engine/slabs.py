"""Blocks as kernels find them in a layer's part of the slabs: strided, with other layers' bytes between."""

import torch

BEFORE, BEHIND = 64, 192


def in_slabs(blocks: torch.Tensor) -> torch.Tensor:
    """Copies blocks [num_blocks, ...] into slabs. All bits of what lies between are set: that is NaN in every type of cache."""
    size = blocks[0].nbytes
    slabs = torch.full((len(blocks), BEFORE + size + BEHIND), 255, dtype=torch.uint8, device=blocks.device)
    found = slabs[:, BEFORE : BEFORE + size].view(blocks.dtype).view(blocks.shape)
    return found.copy_(blocks)


def assert_untouched(blocks: torch.Tensor) -> None:
    """Checks that nothing was written between blocks of `in_slabs`."""
    slabs = torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(blocks.untyped_storage()).view(len(blocks), -1)
    assert (slabs[:, :BEFORE] == 255).all() and (slabs[:, -BEHIND:] == 255).all()
