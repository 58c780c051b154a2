"""Memory is found, goes, and comes back under the same tensors."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from starling_engine import native
from starling_engine.attention.mla import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.dense import DenseLinear
from starling_engine.layers.linear import LinearMethod, LinearShape
from starling_engine.layers.packed import NativeLinear
from starling_engine.models.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.weights.dummy import load_dummy
from starling_engine.worker.memory import HostCopies, Pages, as_bytes, discard_pages, storages_of

from tests.engine.checkpoints import VARIANTS, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device(request.param)


def model_of(variant: str, folder: Path, dtype: torch.dtype, method: type[LinearMethod]) -> Decoder:
    write_checkpoint(folder, VARIANTS[variant])
    config = load_model_config(folder)

    def select(_: LinearShape) -> LinearMethod:
        return method()

    model = Decoder(config, dtype, CPU, select, TorchMla() if config.mla else TorchPagedAttention(), max_position=64)
    load_dummy(model, 0)
    return model


@pytest.mark.parametrize("method", [DenseLinear, NativeLinear])
@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-tied", "qwen3-moe-some-plain", "deepseek-v3"])
def test_all_that_a_model_holds_is_found_once(variant: str, method: type[LinearMethod], tmp_path: Path) -> None:
    """What the checkpoint fills is there, a tied matrix once; besides that the rotations, and which expert lies where."""
    if method is NativeLinear and native.load() is None:
        pytest.skip("this machine has no native kernels")
    model = model_of(variant, tmp_path, torch.bfloat16, method)
    weights = sum(2 * torch.Size(slot.taken).numel() for slot in model.slots().values())
    found = storages_of(model)
    assert len({storage.data_ptr() for storage in found}) == len(found)
    rotations = 64 * model.config.rotary_dim * 4
    assert weights + rotations <= sum(storage.nbytes() for storage in found) <= 1.02 * weights + rotations + 1024
    assert all(storage.resizable() for storage in found)


def test_copies_come_back_under_the_same_tensors(device: torch.device) -> None:
    whole = torch.arange(1000, device=device, dtype=torch.float32).reshape(10, 100)
    view, expected = whole[3:5], whole.clone()
    storages = storages_of({"a": [whole, view], "b": (view,)})
    assert len(storages) == 1
    copies = HostCopies(storages)
    assert whole.untyped_storage().nbytes() == 0
    copies.restore()
    assert torch.equal(whole, expected) and view.data_ptr() == whole[3].data_ptr()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_cache_is_zero_again(kind: str, device: torch.device) -> None:
    if kind == "numpy" and device.type == "cuda":
        pytest.skip("numpy's memory is the host's")
    size = 3 * mmap.PAGESIZE + 100
    place = torch.from_numpy(np.zeros(size, np.uint8)) if kind == "numpy" else torch.zeros(size, dtype=torch.uint8, device=device)
    views = [place[8:].view(torch.float16), place[:100]]
    pages = Pages([*views, place])
    assert pages.nbytes == size
    place.fill_(7)
    pages.release()
    pages.restore()
    assert place.shape == (size,) and not place.any() and not views[0].any()
    place.fill_(9)
    assert views[1].tolist() == [9] * 100


def test_what_does_not_fit_is_given_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(10), torch.ones(20)]
    copies = HostCopies(storages_of(tensors))

    def full(storage: torch.UntypedStorage) -> torch.Tensor:
        if storage.nbytes() == 80:
            raise RuntimeError("out of memory")
        return as_bytes(storage)

    with monkeypatch.context() as patched:
        patched.setattr("starling_engine.worker.memory.as_bytes", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.restore()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    copies.restore()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize(("first", "size"), [(0, 4096), (1, 4096), (100, 3 * 4096), (0, 10), (4090, 10), (50, 2 * 4096 - 50)])
def test_only_the_memory_that_is_named_becomes_zero(first: int, size: int) -> None:
    memory = mmap.mmap(-1, 5 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = 1
    discard_pages(whole.ctypes.data + first, size)
    assert not whole[first : first + size].any() and whole.sum() == len(whole) - size
