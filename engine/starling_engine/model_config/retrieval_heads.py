"""The two heads that BGE-M3 has beside its encoder (arXiv 2402.03216): vectors of tokens, and their weights. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

COLBERT, LEXICAL = "colbert_linear.pt", "sparse_linear.pt"
"""Files of a checkpoint's folder, each with a linear layer. Both are pickles."""


@dataclass(frozen=True, kw_only=True)
class RetrievalHeads:
    """Says that a checkpoint has both heads. `readable` is False where pickles are not to be read: then nothing is made by them."""

    readable: bool = True


def read_retrieval_heads(folder: Path) -> RetrievalHeads | None:
    return RetrievalHeads() if all((folder / name).exists() for name in (COLBERT, LEXICAL)) else None
