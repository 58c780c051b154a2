"""Starling's inference engine: a library that knows neither Kubernetes nor HTTP.

The names below are loaded when first used, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starling_engine.args import EngineArgs as EngineArgs
    from starling_engine.frontend.async_engine import AsyncEngine as AsyncEngine
    from starling_engine.frontend.llm import LLM as LLM
    from starling_engine.params import BeamSearchParams as BeamSearchParams
    from starling_engine.params import PoolingParams as PoolingParams
    from starling_engine.params import RepetitionDetectionParams as RepetitionDetectionParams
    from starling_engine.params import SamplingParams as SamplingParams
    from starling_engine.params import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncEngine": "starling_engine.frontend.async_engine",
    "BeamSearchParams": "starling_engine.params",
    "EngineArgs": "starling_engine.args",
    "LLM": "starling_engine.frontend.llm",
    "PoolingParams": "starling_engine.params",
    "RepetitionDetectionParams": "starling_engine.params",
    "SamplingParams": "starling_engine.params",
    "StructuredOutputsParams": "starling_engine.params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "EngineArgs",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
