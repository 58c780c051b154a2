"""Chooses the attention backend: once, before the model is built."""

import importlib.util
import logging

import torch

from starling_engine import native
from starling_engine.attention import native_cpu
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.compressed import CompressedAttention
from starling_engine.attention.mla_base import MlaBackend
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.config import CacheType
from starling_engine.errors import ConfigError
from starling_engine.kernels.attention_plan import MAX_GROUP
from starling_engine.platforms.base import Platform
from starling_engine.platforms.triton_support import why_not_triton

Backend = AttentionBackend | MlaBackend | CompressedAttention

BY_NAME_ONLY = ("flash_attn", "flashinfer")
"""Backends of packages that are not installed with Starling: taken only when asked for."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARY_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM, LIBRARY_HEAD_DIM = 512, 256
FLASHINFER_HEAD_DIMS = (64, 128, 256)

logger = logging.getLogger("starling.attention")


def select_attention(
    name: str,
    platform: Platform,
    dtype: torch.dtype,
    head_dim: int,
    *,
    group: int = 1,
    latent: bool = False,
    indexed: bool = False,
    compressed: bool = False,
    sinks: bool = False,
    cache: CacheType | None = None,
) -> tuple[Backend, str]:
    """Returns the backend and why it was taken. "auto" takes the first of the platform's backends that can serve the model.

    `group` query heads share a key-value head. `latent` is for a model whose cache holds latents (MLA), `indexed` for one that
    attends to those that an indexer chooses. `compressed` is for one that compresses runs of tokens. All others have grouped-query
    attention, maybe with `sinks`. With `cache` keys and values are cached in that, not in `dtype`. Raises ConfigError when `name`
    cannot serve the model; it lists those that can.
    """
    offered = platform.attention_backends()

    def why_not(other: str) -> str | None:
        if indexed and other == "triton":
            return "it has no kernels for an indexer, which chooses what this model attends to"
        if compressed and other not in ("torch", "sdpa"):
            return "it has no kernels for compressed runs of tokens, to which this model attends"
        return _why_not(other, platform, dtype, head_dim, group, latent, sinks, cache)

    refused = {other: why for other in offered if (why := why_not(other))}
    possible = [other for other in offered if other not in refused]
    if name == "auto":
        chosen = next((other for other in possible if other not in BY_NAME_ONLY), "")
        if not chosen:
            why = "; ".join(f"{other}: {why}" for other, why in refused.items())
            raise ConfigError(f"no backend can serve this model ({why})", "attention_backend")
        better = [other for other in offered[: offered.index(chosen)] if other not in BY_NAME_ONLY]
        reason = "; ".join(f"not {other}: {refused[other]}" for other in better) or "the fastest here"
    elif name in possible:
        chosen, reason = name, "asked for"
    else:
        why = refused.get(name, f"{platform.name} has no such backend")
        raise ConfigError(f"{name!r} is not possible ({why}); possible: auto, {', '.join(possible)}", "attention_backend")
    logger.info("attention: %s (%s)", chosen, reason)
    return CompressedAttention() if compressed else _make(chosen, latent), reason


def _why_not(
    name: str,
    platform: Platform,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    latent: bool,
    sinks: bool,
    cache: CacheType | None,
) -> str | None:
    """Returns why the backend cannot serve the model; None when it can."""
    assert not (latent and cache), "refused with the arguments"
    if name in ("torch", "sdpa"):
        return None
    if cache and name in BY_NAME_ONLY:
        return f"it reads no cache in {cache}"
    if sinks and name in BY_NAME_ONLY:
        return "it has no attention sinks, and this model has"
    if latent and name == "triton":
        return why_not_triton(platform.device) or _why_unsupported(dtype, 0, TRITON_DTYPES)
    if latent:
        return "its kernels serve grouped-query attention, and this model caches latents"
    match name:
        case "native":
            return _why_not_native(dtype, head_dim)
        case "triton" if group > MAX_GROUP:
            return f"{group} query heads share a key-value head, above {MAX_GROUP}"
        case "triton":
            return why_not_triton(platform.device) or _why_unsupported(dtype, head_dim, TRITON_DTYPES)
    if importlib.util.find_spec(name) is None:
        return f"the package {name} is not installed"
    if why := why_not_triton(platform.device):
        return f"{why}, and it rotates and stores"
    if name == "flashinfer" and head_dim not in FLASHINFER_HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
    return _why_unsupported(dtype, head_dim, LIBRARY_DTYPES, LIBRARY_HEAD_DIM)


def _why_not_native(dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in native_cpu.DTYPES:
        return f"its kernels have no {dtype}"
    if head_dim % native_cpu.HEAD_DIM_STEP or head_dim > native_cpu.MAX_HEAD_DIM:
        return f"head_dim {head_dim} is no multiple of {native_cpu.HEAD_DIM_STEP} up to {native_cpu.MAX_HEAD_DIM}"
    return None if native.load() is not None else "the native kernels are not available on this machine"


def _why_unsupported(dtype: torch.dtype, head_dim: int, dtypes: tuple[torch.dtype, ...], most: int = MAX_HEAD_DIM) -> str | None:
    if dtype not in dtypes:
        return f"its kernels have no {dtype}"
    return None if head_dim <= most else f"head_dim {head_dim} is above {most}"


def _make(name: str, latent: bool) -> Backend:
    """Imports the backend here and not above: other machines have no triton, and few have the libraries."""
    if latent:
        return _make_latent(name)
    match name:
        case "native":
            return native_cpu.NativeAttention()
        case "triton":
            from starling_engine.attention.triton_paged import TritonAttention

            return TritonAttention()
        case "flash_attn":
            from starling_engine.attention.flash import FlashAttention

            return FlashAttention()
        case "flashinfer":
            from starling_engine.attention.flashinfer import FlashInferAttention

            return FlashInferAttention()
    return TorchPagedAttention()


def _make_latent(name: str) -> MlaBackend:
    if name != "triton":
        return TorchMla()
    from starling_engine.attention.mla_triton import TritonMla

    return TritonMla()
