"""BGE-M3's heads in fp32: linear layers that make a vector of each token, and a weight. Every rank of the last stage has them."""

from pathlib import Path

import torch
from torch.nn import functional as F

from starling_engine.errors import WeightError
from starling_engine.model_config.retrieval_heads import COLBERT, LEXICAL
from starling_engine.weights.pickle_source import load_pickle


class TokenHeads:
    """Makes vectors [N, hidden_size] and weights [N] of hidden states [N, hidden_size] fp32 (arXiv 2402.03216, section 3.2)."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._layers = {
            name: (torch.empty(rows, hidden_size, device=device), torch.zeros(rows, device=device))
            for name, rows in ((COLBERT, hidden_size), (LEXICAL, 1))
        }

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def vectors(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, *self._layers[COLBERT])

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, *self._layers[LEXICAL]).relu_()[:, 0]

    def load(self, folder: Path) -> None:
        """Reads the files in the model's folder. Raises WeightError naming one that has other tensors."""
        for file, layer in self._layers.items():
            found = load_pickle(folder / file, file, mmap=False)
            for name, target in zip(("weight", "bias"), layer, strict=True):
                if name not in found or found[name].shape != target.shape:
                    has = list(found[name].shape) if name in found else "nothing"
                    raise WeightError(f"{file}: {name} must be {list(target.shape)}, got {has}")
                target.copy_(found[name])

    def fill(self) -> None:
        """Makes weights where there are no files."""
        for matrix, _ in self._layers.values():
            torch.nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)


def add_weights(ids: torch.Tensor, weights: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Gives each token of ids [N] the greatest of its weights [N] and the one `before` [vocab_size], which is overwritten."""
    return before.scatter_reduce_(0, ids, weights, "amax")
