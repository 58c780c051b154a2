"""The longest sequence of a model with linear scaling, whose config alone does not tell it.

Some configs have the length before scaling in max_position_embeddings (Vicuna 16k: 4096, and a factor of 4), others the one after
it (DeepSeek Coder: 16384, and a factor of 4).
"""

import json
import logging
from functools import lru_cache
from pathlib import Path

from starling_engine.model_config.rope import LinearScaling, RopeConfig

logger = logging.getLogger("starling.models")


def within_training(folder: Path, ropes: tuple[RopeConfig, ...], max_position: int) -> int:
    """Returns the length that the tokenizer's config has, if it lies between both, else `max_position`, the one after scaling."""
    scalings = [rope.scaling for rope in ropes if isinstance(rope.scaling, LinearScaling)]
    factors = [scaling.factor for scaling in scalings if not scaling.original_max_position]
    if not factors or len(factors) < len(ropes) or max(factors) == 1:
        return max_position
    before, found = int(max_position / max(factors)), _model_max_length(folder)
    if found is None or not before <= found <= max_position:
        _log("max_position_embeddings times the factor of linear scaling", max_position)
        return max_position
    if found < max_position:
        _log("model_max_length of tokenizer_config.json; linear scaling may leave more", found)
    return found


def _model_max_length(folder: Path) -> int | None:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


@lru_cache
def _log(reason: str, length: int) -> None:
    """Logs once a process, and not each time that the config is read."""
    logger.info("sequences have at most %d tokens, %s", length, reason)
