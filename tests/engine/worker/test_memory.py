"""Memory of tensors is found, released, and restored under the same tensors."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from starling_engine import native
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.linear import LinearMethod, LinearShape
from starling_engine.layers.linear_dense import DenseLinear
from starling_engine.layers.linear_packed import NativeLinear
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native import weight_memory
from starling_engine.platforms import host_memory
from starling_engine.weights.dummy import load_dummy
from starling_engine.worker.sleep.memory import ALIGNMENT, HostCopies, Pages, as_bytes, discard_pages, storages_of

from tests.engine.checkpoints import FAMILIES, VARIANTS, write_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return torch.device(request.param)


def model_of(variant: str, folder: Path, dtype: torch.dtype, method: type[LinearMethod]) -> Decoder:
    write_checkpoint(folder, {**VARIANTS, **FAMILIES}[variant])
    config = load_model_config(folder)

    def select(_: LinearShape) -> LinearMethod:
        return method()

    model = Decoder(config, dtype, CPU, select, TorchMla() if config.mla else TorchPagedAttention(), max_position=64)
    load_dummy(model, 0)
    return model


@pytest.mark.parametrize("method", [DenseLinear, NativeLinear])
@pytest.mark.parametrize(
    "variant",
    [
        "llama-biases",
        "qwen3-tied",
        "qwen3-moe-some-plain",
        "deepseek-v3",
        "deepseek-v3.2",
        "smollm3",
        "olmo2",
        "hunyuan",
        "gemma4-inputs",
    ],
)
def test_all_storages_of_a_model_are_found_once(
    variant: str, method: type[LinearMethod], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's tensors, a tied matrix once; also rotary tables, and the experts' slots. No memory is taken ahead."""
    monkeypatch.setattr(weight_memory, "PIECE", 64)
    monkeypatch.setattr(weight_memory, "HUGE_PAGE", 64)
    monkeypatch.setattr(weight_memory.WEIGHTS, "_rest", torch.empty(0, dtype=torch.uint8))
    if method is NativeLinear and native.load() is None:
        pytest.skip("this machine has no native kernels")
    model = model_of(variant, tmp_path, torch.bfloat16, method)
    weights = sum(2 * torch.Size(slot.local_shape).numel() for slot in model.weight_slots().values())
    found = storages_of(model)
    assert len({storage.data_ptr() for storage in found}) == len(found)
    rotations = 64 * model.config.rotation_columns * 4
    assert weights + rotations <= sum(storage.nbytes() for storage in found) <= 1.02 * weights + rotations + 1024
    assert all(storage.resizable() for storage in found)


def test_copies_come_back_under_the_same_tensors(device: torch.device) -> None:
    whole = torch.arange(1000, device=device, dtype=torch.float32).reshape(10, 100)
    view, expected = whole[3:5], whole.clone()
    storages = storages_of({"a": [whole, view], "b": (view,)})
    assert len(storages) == 1
    copies = HostCopies(storages, device)
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


class Runtime:
    """CUDA's, as far as pinning goes: each block that is pinned, and all that was asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.asked: list[str] = []
        self.error = error
        calls = SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.asked.append("wait"))
        monkeypatch.setattr(host_memory, "forget_error", lambda: self.asked.append("forget"))

    def _pin(self, address: int, size: int, _flags: int) -> int:
        self.asked.append("pin")
        if not self.error:
            self.pinned[address] = size
        return self.error

    def _unpin(self, address: int) -> int:
        self.asked.append("unpin")
        assert is_mapped(address)
        del self.pinned[address]
        return 0


def is_mapped(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in ranges)


def of_sizes(*sizes: int) -> list[torch.UntypedStorage]:
    """Storages whose bytes are numbered from 1 on."""
    return [torch.full((size,), number, dtype=torch.uint8).untyped_storage() for number, size in enumerate(sizes, 1)]


@pytest.mark.parametrize("end", ["restore", "drop"])
def test_one_block_of_their_size_is_pinned_and_given_back(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MiB and a bit: a power of two would be 8."""
    runtime, sizes = Runtime(monkeypatch), (1, 5 << 20, 4097)
    storages = of_sizes(*sizes)
    copies = HostCopies(storages, CUDA)
    ((address, pinned),) = runtime.pinned.items()
    assert sum(sizes) <= pinned < sum(sizes) + len(sizes) * ALIGNMENT
    assert not any(storage.nbytes() for storage in storages)
    getattr(copies, end)()
    assert runtime.asked == ["pin", "wait", "unpin"] and not runtime.pinned and not is_mapped(address)
    if end == "restore":
        for number, (storage, size) in enumerate(zip(storages, sizes, strict=True), 1):
            assert storage.nbytes() == size and bool((as_bytes(storage) == number).all())


def test_weights_that_cannot_be_pinned_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, storages = Runtime(monkeypatch, error=2), of_sizes(1 << 20)
    with pytest.raises(MemoryError, match=r"1.00 MiB of host memory cannot be pinned \(CUDA error 2\)"):
        HostCopies(storages, CUDA)
    assert runtime.asked == ["pin", "forget"], "torch is not to blame the next kernel for it"
    assert storages[0].nbytes() == 1 << 20


def test_a_restore_that_does_not_fit_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(10), torch.ones(20)]
    runtime = Runtime(monkeypatch)
    copies = HostCopies(storages_of(tensors), CUDA)

    def full(storage: torch.UntypedStorage) -> torch.Tensor:
        if storage.nbytes() == 80:
            raise RuntimeError("out of memory")
        return as_bytes(storage)

    with monkeypatch.context() as patched:
        patched.setattr("starling_engine.worker.sleep.memory.as_bytes", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.restore()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors) and runtime.pinned
    copies.restore()
    assert all(bool((tensor == 1).all()) for tensor in tensors) and not runtime.pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_no_kernel_is_blamed_for_what_could_not_be_pinned() -> None:
    block = host_memory.anonymous(1 << 20)
    host_memory.pin(block)
    with pytest.raises(MemoryError, match="CUDA error 712"):  # it is already
        host_memory.pin(block)
    assert int(torch.ones(3, device=CUDA).neg().sum()) == -3
    host_memory.unpin(block)


@pytest.mark.parametrize(("first", "size"), [(0, 4096), (1, 4096), (100, 3 * 4096), (0, 10), (4090, 10), (50, 2 * 4096 - 50)])
def test_only_the_memory_that_is_named_becomes_zero(first: int, size: int) -> None:
    memory = mmap.mmap(-1, 5 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = 1
    discard_pages(whole.ctypes.data + first, size)
    assert not whole[first : first + size].any() and whole.sum() == len(whole) - size
