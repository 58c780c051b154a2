"""Chooses the attention backend: once, before the model is built."""

import logging

import torch

from starling_engine import native
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.mla import TorchMla
from starling_engine.attention.native_cpu import DTYPES, HEAD_DIM_STEP, MAX_HEAD_DIM, NativeAttention
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import ConfigError
from starling_engine.platforms.base import Platform

Backend = AttentionBackend | TorchMla

logger = logging.getLogger("starling.attention")


def select_attention(
    name: str, platform: Platform, dtype: torch.dtype, head_dim: int, *, latent: bool = False
) -> tuple[Backend, str]:
    """The backend and why it was taken. "auto" takes the first of the platform's backends that can serve the model.

    `latent` is for a model whose cache holds latents (MLA); all others have grouped-query attention. Raises ConfigError when `name`
    cannot, with what can.
    """
    offered = platform.attention_backends()
    refused = {other: why for other in offered if (why := _why_not(other, dtype, head_dim, latent))}
    possible = [other for other in offered if other not in refused]
    if name == "auto":
        chosen = possible[0]
        reason = "; ".join(f"not {other}: {why}" for other, why in refused.items()) or "the fastest here"
    elif name in possible:
        chosen, reason = name, "asked for"
    else:
        why = refused.get(name, f"{platform.name} has no such backend")
        raise ConfigError(f"{name!r} is not possible ({why}); possible: auto, {', '.join(possible)}", "attention_backend")
    logger.info("attention: %s (%s)", chosen, reason)
    return _make(chosen, latent), reason


def _why_not(name: str, dtype: torch.dtype, head_dim: int, latent: bool) -> str | None:
    """Why the backend cannot serve the model; None when it can."""
    if name != "native":
        return None
    if latent:
        return "its kernels serve grouped-query attention, and this model caches latents"
    if dtype not in DTYPES:
        return f"its kernels have no {dtype}"
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    return None if native.load() is not None else "the native kernels are not available on this machine"


def _make(name: str, latent: bool) -> Backend:
    if latent:
        return TorchMla()
    return NativeAttention() if name == "native" else TorchPagedAttention()
