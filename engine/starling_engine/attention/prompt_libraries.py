"""Libraries for the attention of prompts, found where they are installed and never needed: FlashAttention-3, and cuDNN by torch."""

import importlib
import importlib.util
from collections.abc import Callable

import torch

from starling_engine.attention.prompts import HeadShape, PromptChunk, PromptLibrary

FLASH_ATTENTION_3 = ("flash_attn_interface", "fa3_fwd_interface")
"""Modules that have it: of the whole library, and of a wheel of its forward pass (fa3-fwd)."""

HOPPER, BLACKWELL = 9, 10
CUDNN_TORCH = (2, 15)
"""The first torch whose `varlen_attn` gives cuDNN the pages of a cache."""
CUDNN_HEAD_DIM, FLASH_HEAD_DIM = 128, 256
WORD = torch.complex128
"""Rows are gathered in elements of 16 bytes: a gather moves one element a thread."""


class FlashAttention3:
    """Gathers keys and values: the wheel of its forward pass is built without pages."""

    name = "fa3"
    gathers = True

    def __init__(self, module: str) -> None:
        self._attend: Callable[..., torch.Tensor] = importlib.import_module(module).flash_attn_func

    def attend(self, q: torch.Tensor, kv: torch.Tensor, chunk: PromptChunk, scale: float) -> torch.Tensor:
        """See `PromptLibrary`. With causal=True its mask is aligned to the last key."""
        keys, values = gather(kv, chunk)
        return self._attend(q[None], keys[None], values[None], softmax_scale=scale, causal=True)[0]


class CudnnAttention:
    """Reads pages in place. cuDNN plans for each bound of tokens, which takes 50 ms: so bounds are powers of two."""

    name = "cudnn"
    gathers = False

    def attend(self, q: torch.Tensor, kv: torch.Tensor, chunk: PromptChunk, scale: float) -> torch.Tensor:
        """See `PromptLibrary`. Raises RuntimeError with cuDNN's reasons where it cannot: no other kernel takes its place."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.varlen import varlen_attn

        keys, values = (kv[:, part].transpose(1, 2) for part in (0, 1))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = varlen_attn(
                *(q, keys, values, chunk.tokens, None),
                max_q=1 << (len(q) - 1).bit_length(),
                max_k=chunk.table.shape[1] * kv.shape[3],
                scale=scale,
                window_size=(-1, 0),
                enable_gqa=True,
                seqused_k=chunk.contexts,
                block_table=chunk.table,
            )
        assert isinstance(out, torch.Tensor), "nothing else was asked for"
        return out


def gather(kv: torch.Tensor, chunk: PromptChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of the chunk's whole sequence, [context, KVH, D] each."""
    blocks, offsets = chunk.places(kv.shape[3])
    words = kv.view(WORD)
    return words[blocks, 0, :, offsets].view(kv.dtype), words[blocks, 1, :, offsets].view(kv.dtype)


def installed_libraries(shape: HeadShape, dtype: torch.dtype, block_size: int, major: int) -> dict[str, PromptLibrary | str]:
    """Returns each library that may serve such heads on a device of compute capability `major`; or why not."""
    return {
        FlashAttention3.name: _flash_attention_3(shape, dtype, major),
        CudnnAttention.name: _why_not_cudnn(shape, dtype, block_size, major) or CudnnAttention(),
    }


def _flash_attention_3(shape: HeadShape, dtype: torch.dtype, major: int) -> PromptLibrary | str:
    module = next((name for name in FLASH_ATTENTION_3 if importlib.util.find_spec(name)), None)
    if module is None:
        return f"neither {' nor '.join(FLASH_ATTENTION_3)} is installed"
    if major != HOPPER:
        return "its kernels are for compute capability 9"
    if why := _why_not_heads(shape, dtype, FLASH_HEAD_DIM):
        return why
    try:
        return FlashAttention3(module)
    except (ImportError, OSError, AttributeError) as error:
        return f"{module} cannot be imported: {error}"


def _why_not_cudnn(shape: HeadShape, dtype: torch.dtype, block_size: int, major: int) -> str | None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < CUDNN_TORCH:
        return f"torch {torch.__version__} has no attention to pages by cuDNN, which came with 2.15"
    if major not in (HOPPER, BLACKWELL):
        return "its kernels are for compute capabilities 9 and 10"
    if block_size & (block_size - 1):
        return f"blocks of {block_size} tokens are no power of two"
    return _why_not_heads(shape, dtype, CUDNN_HEAD_DIM)


def _why_not_heads(shape: HeadShape, dtype: torch.dtype, most: int) -> str | None:
    if dtype != torch.bfloat16:
        return f"{dtype} is not bfloat16"
    dim = shape[2]
    return None if dim <= most and dim % 8 == 0 else f"head_dim {dim} is no multiple of 8 up to {most}"
