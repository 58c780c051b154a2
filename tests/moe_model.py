"""A model of experts that can be talked to: random weights, and the tokenizer of the repository's own model."""

import shutil
from pathlib import Path
from typing import Any

from tests.engine.checkpoints import EXPERTS, Variant, write_checkpoint

PYDOC = Path(__file__).parents[1] / "models" / "starling-pydoc"
VOCAB = 4096


def write_moe_model(folder: Path, **changes: Any) -> Path:
    """`changes` are of transformers' config."""
    write_checkpoint(folder, Variant("qwen3_moe", {**EXPERTS, "vocab_size": VOCAB, "norm_topk_prob": True, **changes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PYDOC / name, folder / name)
    return folder
