"""The head of a model whose config ties it to the embedding: checkpoints may hold one all the same, and with other numbers."""

import logging
from functools import lru_cache
from pathlib import Path

from starling_engine.model_config.base_model import model_names
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.stored_names import differ, stored_names

logger = logging.getLogger("starling.models")


def has_own_head(folder: Path, names: TensorNames) -> bool:
    """Says if the folder's safetensors hold both matrices, and they differ. As in transformers, both are then loaded.

    Of one in codes it cannot be the same.
    """
    found = stored_names(folder)
    stored = model_names(found)
    head, embedding = (stored.get(each, each) for each in (f"{names.lm_head}.weight", f"{names.embedding}.weight"))
    in_codes = head not in found and any(name.startswith(f"{head}_") or name == f"{names.lm_head}.qweight" for name in found)
    if not (in_codes and embedding in found) and not differ(folder, head, embedding):
        return False
    _log(head, embedding)
    return True


@lru_cache
def _log(head: str, embedding: str) -> None:
    """Logs once a process, and not each time that the config is read."""
    logger.warning("%s is loaded, too: it differs from %s, though config.json says tie_word_embeddings: true", head, embedding)
