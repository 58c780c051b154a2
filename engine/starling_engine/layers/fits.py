"""Whether a layer may use the native kernels; asked once, when the layer is built."""

import torch

from starling_engine import native

DTYPES = (torch.float32, torch.bfloat16)


def native_fits(dtype: torch.dtype, device: torch.device) -> bool:
    """True for a dtype and device that the element-wise native kernels serve, on a machine that has them."""
    return device.type == "cpu" and dtype in DTYPES and native.load() is not None
