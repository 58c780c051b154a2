"""Loading holds at most the model and one shard, whatever the dtype and the packing; measured in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from starling_engine import native
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.gguf.reader import GgufFile
from starling_engine.layers.linear_dense import DenseLinear
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native.group_quantized import AT_ONCE
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.loader import load_weights

from tests.engine.gguf_files import BY_32, BY_256, SMOLLM2, write_gguf
from tests.engine.real_engine import MODEL

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 24000,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
SHARDS = 5
SLACK = 28 << 20
"""Bytes that the allocator keeps of staged matrices, and the interpreter's noise."""
WORKING = 4 * 4 * AT_ONCE
"""Bytes that are made on the way, in float32, of rows that are quantized at a time."""

MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.loader import load_weights

def resident():
    lines = (line.split() for line in open("/proc/self/status"))
    return sum(int(line[1]) * 1024 for line in lines if line[0] in sys.argv[4:])

folder, dtype, quantization = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] or None
torch.set_num_threads(2)
device = torch.device("cpu")
stored = stored_formats(folder)
linear, experts = (each(dtype, device, quantization, stored) for each in (select_linear_method, select_experts_method))
model = Decoder(load_model_config(folder), dtype, device, linear, TorchPagedAttention(), experts_method_selector=experts)
# Threads and libraries that the first kernel brings are not the model's.
shape = stacked(["warm"], [512], 512)
warm = Linear(shape, linear(shape), dtype, device)
for slot in warm.weight_slots().values():
    slot.load(torch.ones(slot.shape))
start = resident()
peak, running = 0, True

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
load_weights(model, folder)
running = False
thread.join()
kept = resident()
print(max(peak, kept) - start, kept - start)
"""


@pytest.fixture(scope="module", params=[DENSE, EXPERTS], ids=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes about 110 MB of bf16."""
    return written(tmp_path_factory.mktemp("large"), request.param)


def written(folder: Path, fields: dict[str, object]) -> Path:
    """Writes ones in bf16 in five shards, cut in the order of names, as transformers cuts them."""
    (folder / "config.json").write_text(json.dumps(fields))
    config = load_model_config(folder)
    device = torch.device("cpu")
    slots = Decoder(config, torch.bfloat16, device, lambda _: DenseLinear(), TorchPagedAttention()).weight_slots()
    names = sorted(slots)
    weight_map = {name: f"model-{at * SHARDS // len(names)}.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        tensors = {name: torch.ones(slots[name].shape).bfloat16() for name in names if weight_map[name] == file}
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), pytest.param("float32", 4, marks=pytest.mark.whole)])
def test_peak_is_the_model_and_one_shard(dtype: str, element_bytes: int, folder: Path) -> None:
    files = list(folder.glob("*.safetensors"))
    model_bytes = sum(file.stat().st_size for file in files) // 2 * element_bytes
    largest_shard = max(file.stat().st_size for file in files)
    peak, kept = measured(folder, dtype)
    print(f"{model_bytes=} {largest_shard=} {peak=} {kept=}")
    assert model_bytes - SLACK < kept < model_bytes + SLACK
    assert peak < model_bytes + largest_shard + SLACK


def measured(folder: Path, dtype: str, quantization: str = "", kinds: Sequence[str] = ("RssAnon:", "RssFile:")) -> tuple[int, int]:
    """Returns the most memory that loading takes, and what it keeps."""
    command = [sys.executable, "-c", MEASURE, folder, dtype, quantization, *kinds]
    peak, kept = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return peak, kept


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("fields", [DENSE, pytest.param(EXPERTS, marks=pytest.mark.whole)], ids=["dense", "experts"])
@pytest.mark.parametrize("quantization", ["int4", *(pytest.param(name, marks=pytest.mark.whole) for name in ("int8", "fp8"))])
def test_weights_that_are_quantized_are_never_there_in_whole(quantization: str, fields: dict[str, object], tmp_path: Path) -> None:
    """Besides the codes there are files, which are mapped, and one matrix in bfloat16."""
    plain = sum(
        file.stat().st_size
        for file in written(tmp_path, {**fields, "vocab_size": 2000, "num_hidden_layers": 12}).glob("*.safetensors")
    )
    codes = plain * ONLINE[quantization].element_bytes / 2
    peak, kept = measured(tmp_path, "bfloat16", quantization, ["RssAnon:"])
    print(f"{plain=} {codes=} {peak=} {kept=}")
    assert kept <= peak < codes + WORKING + SLACK < plain


REST = sorted({*BY_32, *BY_256, "BF16", "F16"} - {"Q4_0", "Q4_K", "Q3_K"})
MOST = 1.15
"""The bytes that a loaded model may take, to those of its file's tensors."""
MORE = {"Q2_K": 1.55, "Q3_K": 1.5}
"""Their scales have 16 bits for 16 columns here, and 4 to 6 in the file; 3 bits are kept in 4."""


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q3_K", *(pytest.param(name, marks=pytest.mark.whole) for name in REST)])
def test_a_gguf_model_takes_hardly_more_memory_than_its_file(type_name: str, tmp_path: Path) -> None:
    """Counts as the memory plan does."""
    path, device = tmp_path / "model.gguf", torch.device("cpu")
    write_gguf(path, Path(MODEL), lambda _: type_name)
    linear = select_linear_method(torch.bfloat16, device, None, stored_formats(path))
    model = Decoder(load_model_config(path), torch.bfloat16, device, linear, TorchPagedAttention())
    load_weights(model, path)
    held = sum(slot.held_bytes(torch.bfloat16.itemsize) for slot in model.weight_slots().values())
    ratio = held / sum(tensor.num_bytes for tensor in GgufFile(path).tensors.values())
    print(f"{type_name}: {ratio:.3f}")
    assert 0.9 < ratio < MORE.get(type_name, MOST)


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs SmolLM2 (make smollm2)")
def test_a_gguf_model_of_others_takes_what_its_file_does() -> None:
    """The file has 92 MiB, and at no time is more of it in memory, as the system counts it."""
    peak, kept = measured(SMOLLM2, "bfloat16", kinds=["RssAnon:"])
    size = SMOLLM2.stat().st_size
    print(f"{size=} {peak=} {kept=}")
    assert 0.9 * size < kept <= peak < MOST * size
