"""A rank reads its part of the checkpoint's files and no more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import SingleRank
from starling_engine.topology.shard import Shard
from starling_engine.weights import loader, safetensors_source

from tests.engine.checkpoints import VARIANTS, write_checkpoint

CPU = torch.device("cpu")


class Silent(SingleRank):
    """A rank of several that only loads."""

    def __init__(self, index: int, count: int) -> None:
        self.shard = Shard(index, count)


class Counting:
    """safetensors' reader, with the bytes of every tensor and slice that it hands out."""

    total = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safe_open(*args, **options)

    def __enter__(self) -> "Counting":
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        names: list[str] = self._opened.keys()
        return names

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = self._opened.metadata()
        return found

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self._opened.get_tensor(name))

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self._opened.get_slice(name))

    @classmethod
    def _count(cls, tensor: torch.Tensor) -> torch.Tensor:
        cls.total += tensor.nbytes
        return tensor


class CountingSlice:
    def __init__(self, view: Any) -> None:
        self._view = view
        self.get_shape, self.get_dtype = view.get_shape, view.get_dtype

    def __getitem__(self, take: Any) -> torch.Tensor:
        return Counting._count(self._view[take])


def bytes_read(folder: Path, index: int, count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(safetensors_source, "safe_open", Counting)
    Counting.total = 0
    methods = select_linear_method(torch.float32, CPU)
    model = Decoder(load_model_config(folder), torch.float32, CPU, methods, TorchPagedAttention(), tensor=Silent(index, count))
    seen: list[tuple[int, int]] = []
    loader.load_weights(model, folder, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (Counting.total, Counting.total)
    return Counting.total


@pytest.mark.parametrize("name", ["qwen3", "llama-biases"])
def test_ranks_read_every_matrix_once_between_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, VARIANTS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in tensors.values())
    # Norms are on every rank; biases of products that are added up are the first rank's.
    norms = sum(tensor.nbytes for key, tensor in tensors.items() if "norm" in key)
    assert bytes_read(tmp_path, 0, 1, monkeypatch) == whole
    assert sum(bytes_read(tmp_path, rank, 2, monkeypatch) for rank in range(2)) == whole + norms


def test_ranks_without_key_value_heads_of_their_own_read_shared_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen2"])
    tensors = load_file(tmp_path / "model.safetensors")
    parts = [bytes_read(tmp_path, rank, 4, monkeypatch) for rank in range(4)]
    norms = sum(tensor.nbytes for key, tensor in tensors.items() if "norm" in key)
    shared = sum(tensor.nbytes for key, tensor in tensors.items() if "k_proj" in key or "v_proj" in key)
    assert sum(parts) == sum(tensor.nbytes for tensor in tensors.values()) + 3 * norms + shared
