"""Lists what a step launches, and how long that takes at least: from shapes alone, without a GPU.

Every kernel and every matrix product of a step is written down with its bytes and operations. A prediction is the sum of what each
takes by the device's limits, and of a pause behind each. Kernels do not reach these limits, so that a step takes longer than this.
For a process whose kernels are not interpreted; it is used for nothing else.

    python -m bench.gpu.tape
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from starling_engine.config import WorkerConfig
from starling_engine.kernels.ahead import pretend
from starling_engine.platforms.triton_support import H200
from starling_engine.worker import warm
from starling_engine.worker.device.step_buffer import StepShape
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.roofline import Cost, StepRow
from bench.gpu.shapes import SHAPES

PAUSE = 1.2e-6
"""Seconds between two kernels of a recording that depend on each other."""

STEPS = {
    "decode, 1 row of 1,024 tokens": [StepRow(1, 1024)],
    "decode, 64 rows": [StepRow(1, 1024)] * 64,
    "decode, 256 rows": [StepRow(1, 1024)] * 256,
    "prompt of 8,192 tokens": [StepRow(8192, 8192)],
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes/s, and FLOP/s of products in bf16 and in FP8."""

    bandwidth: float
    bf16: float
    fp8: float


H200_RATES = Rates(4.3e12, 790e12, 1580e12)
"""Speeds as others have measured them on such cards. Products in FP8 are taken for twice as fast, as data sheets say."""


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    cost: Cost
    fp8: bool = False

    def seconds(self, rates: Rates) -> float:
        return PAUSE + max(self.cost.bytes / rates.bandwidth, self.cost.flops / (rates.fp8 if self.fp8 else rates.bf16))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of one step: seconds at least, launches of all, and those of a layer, in their order."""

    seconds: float
    launches: int
    layer: list[str]


def predict(shape: str, rows: Sequence[StepRow], quantization: str | None = None, rates: Rates = H200_RATES) -> Prediction:
    """Looks at a step that samples one token of each row. Layers are alike: two models of few tell of all.

    The last layer is like no other: it computes what is sampled alone.
    """
    pretend(H200)
    with tempfile.TemporaryDirectory() as folder:
        one, three = (_tape(Path(folder) / str(layers), shape, layers, rows, quantization) for layers in (1, 3))
    ends, all_of_three = (sum(each.seconds(rates) for each in launches) for launches in (one, three))
    others, own = SHAPES[shape]["num_hidden_layers"] - 1, (len(three) - len(one)) // 2
    names = [each.name for each in three]
    first = next(at for at, name in enumerate(names) if names[at : at + own] == names[at + own : at + 2 * own])
    return Prediction(ends + others * (all_of_three - ends) / 2, len(one) + others * own, names[first : first + own])


def _tape(folder: Path, shape: str, layers: int, rows: Sequence[StepRow], quantization: str | None) -> list[Launch]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "num_hidden_layers": layers}))
    tokens, longest = sum(row.new for row in rows), max(row.new for row in rows)
    runner = warm.shapes_only_runner(_config(folder, max(row.context for row in rows), tokens, len(rows), quantization))
    starts = [0, *itertools.accumulate(row.new for row in rows)]
    samples = torch.empty(len(rows), dtype=torch.int64, device="meta")
    with torch.inference_mode(), ExitStack() as stack:
        fields = runner._writer.padding(StepShape(tokens, len(rows), len(rows)))
        found = stack.enter_context(_written_down(rows))
        if longest == 1:
            hidden = runner._forward(fields, None, 1)
        else:
            hidden = runner._forward(fields, samples, longest, host_lens=(starts, [row.context for row in rows]))
        runner._head(fields, hidden[: len(rows)], 0)
    return found


def _config(folder: Path, context: int, tokens: int, rows: int, quantization: str | None) -> WorkerConfig:
    return WorkerConfig(
        model_path=str(folder),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        seed=0,
        max_model_len=context + 1,
        max_num_seqs=max(rows, 4),
        max_num_batched_tokens=max(tokens, 64),
        block_size=16,
        kv_cache_memory_bytes=None,
        memory_fraction=None,
        attention_backend="auto",
        num_threads=1,
        quantization=quantization,
    )


@contextmanager
def _written_down(rows: Sequence[StepRow]) -> Iterator[list[Launch]]:
    """Writes down what is launched meanwhile; nothing runs."""
    from triton.runtime import JITFunction

    found: list[Launch] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | options
        found.append(_of_kernel(self.__name__, named, rows))

    with mock.patch.object(JITFunction, "run", run), _Operations(found):
        yield found


class _Operations(TorchDispatchMode):
    """Writes down torch's own operations that are kernels."""

    def __init__(self, found: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _NO_KERNEL and not func.is_view:
            self._found.append(_of_operation(name, args, out))
        return out


_NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "_unsafe_view", "set_"}
_PRODUCTS = {"linear", "mm", "addmm", "bmm", "_scaled_mm"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Operations that read as much as they write of a larger tensor."""
_PARTLY_READ = {"kv", "cos_sin", "block_tables"}
"""Arguments of kernels of which a launch reads or writes what is another argument's, or little."""


def _bytes(*values: object) -> int:
    """Returns the bytes of tensors; each counts once."""
    tensors = {id(each): each for each in values if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _of_operation(name: str, args: tuple[Any, ...], out: Any) -> Launch:
    read = () if name in _LOOKUPS else args
    flops = 2 * out.numel() * args[0 if name != "addmm" else 1].shape[-1] if name in _PRODUCTS else 0
    return Launch(name, Cost(_bytes(*read, out), flops), fp8=name == "_scaled_mm")


def _of_kernel(name: str, args: Mapping[str, Any], rows: Sequence[StepRow]) -> Launch:
    if name == "attention_kernel":
        return Launch(name, _attention(args, rows))
    flops = 2 * len(args["x"]) * args["WIDTH"] * args["DEPTH"] if name in ("_linear", "_scaled_linear") else 0
    cost = Cost(_bytes(*(each for key, each in args.items() if key not in _PARTLY_READ)), flops)
    return Launch(name, cost, fp8=name == "_scaled_linear" and args["ROWS"] >= _LEAST_OF_FP8)


_LEAST_OF_FP8 = 64
"""Rows from which Hopper multiplies FP8 itself."""


def _attention(args: Mapping[str, Any], rows: Sequence[StepRow]) -> Cost:
    """Reads the keys and values that rows see, once each."""
    row_bytes = 2 * args["HEADS"] // args["GROUP"] * args["HEAD_DIM"] * args["kv"].element_size()
    rest = _bytes(args["q"], args["out"], args["partial_out"], args["partial_lse"])
    flops = 4 * args["HEADS"] * args["HEAD_DIM"] * sum(row.seen() for row in rows)
    return Cost(rest + row_bytes * sum(row.read() for row in rows), flops)


def table() -> str:
    """Returns the rows of docs/gpu.md."""
    lines = ["| Llama-3-8B on an H200 | bf16 | `fp8` | launches of a layer | measured |", "|---|---:|---:|---:|---|"]
    for what, rows in STEPS.items():
        plain, fp8 = predict("Llama-3-8B", rows), predict("Llama-3-8B", rows, "fp8")
        times = f"{_milliseconds(plain.seconds)} | {_milliseconds(fp8.seconds)} ({plain.seconds / fp8.seconds:.2f}x)"
        lines.append(f"| {what} | {times} | {len(plain.layer)}, {len(fp8.layer)} | not run |")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.02 else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    print(table())
