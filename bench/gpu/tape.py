"""Lists what a step launches, and how long that takes: from shapes alone, without a GPU.

Every kernel and every matrix product of a step is written down with its bytes and operations. The least time is the sum of what
each takes by the device's limits, and of a pause behind each. Kernels do not reach these limits: what is expected takes each kind
at a share of them that others have measured for such kernels, or that was estimated by reading ours.
For a process whose kernels are not interpreted; it is used for nothing else.

    python -m bench.gpu.tape
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from starling_engine.attention.prompt_libraries import FlashAttention3
from starling_engine.attention.prompts import TakesLibraries, head_shape
from starling_engine.config import WorkerConfig
from starling_engine.kernels.ahead import pretend
from starling_engine.parallel import peer_sums
from starling_engine.platforms.triton_support import H200
from starling_engine.topology.layout import ParallelLayout
from starling_engine.worker import warm
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.device.graphs import LARGEST
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.batch import FlatBatch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.roofline import Cost, Limits, StepRow, chosen_experts, step_cost
from bench.gpu.shapes import LARGE, SHAPES, model_config

PAUSE = 1.2e-6
"""Seconds between two kernels of a recording that depend on each other."""

OVERLAPPED = 1.0e-6
"""The same, where the second begins before the first one ends. In a recording on an H100 that saved 0.15 and 0.21 us between a norm
and a product of one row (pegainfer-project/pegainfer, issue 569). On a GH200 it saved 0.2 to 0.6 us between Triton's products of
one row, and 0.5 between norms (SamMausberg/verified-progress, evidence/backbone). None asked for weights ahead, as ours does.
"""

ROOM = 256
"""Rows that a recorded step with prompts has room for, besides the one of padding."""


@dataclass(frozen=True, slots=True)
class TapedStep:
    """A step's rows; `library`: FlashAttention-3 computes the attention of its prompts."""

    rows: Sequence[StepRow]
    library: bool = False

    @property
    def tokens(self) -> int:
        return sum(row.new for row in self.rows)

    @property
    def longest(self) -> int:
        return max(row.new for row in self.rows)

    @property
    def mixed(self) -> bool:
        """True for a recorded step with prompts."""
        return self.longest > 1 and self.tokens <= LARGEST

    def flat(self) -> FlatBatch:
        """Returns the step as the host knows it."""
        new, contexts = (np.array(column, np.int64) for column in zip(*((row.new, row.context) for row in self.rows), strict=True))
        nothing = np.zeros(len(new), np.int64)
        ids, positions = np.zeros(self.tokens, np.int32), np.zeros(self.tokens, np.int64)
        return FlatBatch(np.arange(len(new)), contexts - new, nothing, ids, positions, new.cumsum(), contexts, self.longest)


ONE, MANY, MOST = "decode, 1 row of 1,024 tokens", "decode, 64 rows", "decode, 256 rows"
MIXED, PROMPT = "64 rows and 448 tokens of a prompt", "prompt of 8,192 tokens"
BY_LIBRARY = f"{PROMPT}, by FlashAttention-3"
STEPS = {
    ONE: TapedStep([StepRow(1, 1024)]),
    MANY: TapedStep([StepRow(1, 1024)] * 64),
    MOST: TapedStep([StepRow(1, 1024)] * 256),
    MIXED: TapedStep([StepRow(1, 1024)] * 64 + [StepRow(448, 4096)]),
    PROMPT: TapedStep([StepRow(8192, 8192)]),
    BY_LIBRARY: TapedStep([StepRow(8192, 8192)], library=True),
}


MODELS = SHAPES | LARGE
EXPECTED = {
    "Llama-3-8B": (ONE, MANY, MIXED, PROMPT, BY_LIBRARY),
    "Qwen3-0.6B": (ONE, MANY, MIXED),
    "30B-A3B": (ONE, MANY, PROMPT, BY_LIBRARY),
}
"""Steps of latent attention are left out: no figures of such kernels are known."""
RANKS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes/s, and FLOP/s of products in bf16 and in FP8."""

    bandwidth: float
    bf16: float
    fp8: float


H200_RATES, H100_RATES = Rates(4.3e12, 790e12, 1580e12), Rates(3.0e12, 798e12, 1596e12)
"""Speeds as others have measured them on such cards. Products in FP8 are taken for twice as fast, as data sheets say.

Both have as many processors of one kind, so that they launch the same.
"""
DEVICES = {"H200": H200_RATES, "H100": H100_RATES}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or operation. It is expected to reach `share` of its limit, and to take `least` seconds at least.

    `more` seconds are for what its programs do before and after, one thing after the other: until their first loads are there, and
    their last stores. `overlaps`: it begins early.
    """

    name: str
    cost: Cost
    fp8: bool = False
    share: float = 0.8
    least: float = 0.0
    more: float = 1e-6
    overlaps: bool = False

    def seconds(self, rates: Rates) -> float:
        return self._pause + self._at_limits(rates)

    def expected(self, rates: Rates) -> float:
        return self._pause + max(self.least, self._at_limits(rates) / self.share) + self.more

    @property
    def _pause(self) -> float:
        return OVERLAPPED if self.overlaps else PAUSE

    def _at_limits(self, rates: Rates) -> float:
        return max(self.cost.bytes / rates.bandwidth, self.cost.flops / (rates.fp8 if self.fp8 else rates.bf16))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of one step: seconds at least and as expected, launches of all, and those of a layer, in their order."""

    seconds: float
    expected: float
    launches: int
    layer: list[str]
    tail: list[str]
    """Launches behind the last layer."""


@dataclass(frozen=True, slots=True)
class StepTape:
    """Launches of a step; from `tail` on they follow the model's last layer."""

    launches: list[Launch]
    tail: int


@dataclass(frozen=True, slots=True)
class ModelTape:
    """Launches of a step by a model of few layers and by one of two more: layers are alike, and the whole has `others` beyond few.

    The last layer is like no other: it computes what is sampled alone.
    """

    few: StepTape
    more: StepTape
    others: int

    def predict(self, rates: Rates) -> Prediction:
        """Returns what the whole model's step takes on a device."""
        own = (len(self.more.launches) - len(self.few.launches)) // 2
        names = [each.name for each in self.more.launches]
        first = next(at for at, name in enumerate(names) if names[at : at + own] == names[at + own : at + 2 * own])

        def total(seconds: Callable[[Launch], float]) -> float:
            of_few, of_more = (sum(map(seconds, found.launches)) for found in (self.few, self.more))
            return of_few + self.others * (of_more - of_few) / 2

        least, expected = total(lambda each: each.seconds(rates)), total(lambda each: each.expected(rates))
        launches = len(self.few.launches) + self.others * own
        return Prediction(least, expected, launches, names[first : first + own], names[self.more.tail :])


def model_tape(shape: str, step: TapedStep, quantization: str | None = None, ranks: int = 1) -> ModelTape:
    """Looks at a step that samples one token of each row, by the first of so many ranks (TP) that reach each other's memory."""
    pretend(H200)
    config = MODELS[shape]
    fewest = 1 + config.get("first_k_dense_replace", 0)  # layers without experts come first
    with tempfile.TemporaryDirectory() as folder:
        few, more = (_tape(Path(folder) / str(layers), shape, layers, step, quantization, ranks) for layers in (fewest, fewest + 2))
    return ModelTape(few, more, config["num_hidden_layers"] - fewest)


def predict(shape: str, step: TapedStep, quantization: str | None = None, rates: Rates = H200_RATES, ranks: int = 1) -> Prediction:
    """Returns what a step takes that samples one token of each row."""
    return model_tape(shape, step, quantization, ranks).predict(rates)


def overlapped(shape: str, step: TapedStep) -> list[tuple[str, bool]]:
    """Returns the launches of a step of two layers, and which of them begin early."""
    pretend(H200)
    with tempfile.TemporaryDirectory() as folder:
        return [(each.name, each.overlaps) for each in _tape(Path(folder) / "two", shape, 2, step, None).launches]


def _tape(folder: Path, shape: str, layers: int, step: TapedStep, quantization: str | None, ranks: int = 1) -> StepTape:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODELS[shape], "num_hidden_layers": layers}))
    rows, samples = ROOM if step.mixed else len(step.rows), len(step.rows)
    runner = warm.shapes_only_runner(_config(folder, max(row.context for row in step.rows), step.tokens, rows, quantization, ranks))
    room = StepShape(step.tokens, ROOM + 1, min(step.tokens, runner._max_samples)) if step.mixed else None
    with torch.inference_mode(), ExitStack() as stack:
        fields = runner._writer.padding(room or StepShape(step.tokens, rows, rows))
        found = stack.enter_context(_written_down(step.rows))
        hidden = _run(runner, step, fields, room, found)
        tail = len(found)
        runner._head(fields.samples(samples, samples), hidden[:samples], 0)
    return StepTape(found, tail)


def _run(runner: DeviceRunner, step: TapedStep, fields: Fields, room: StepShape | None, found: list[Launch]) -> torch.Tensor:
    """Runs a step as the engine would; returns the hidden states that are sampled from."""
    if step.longest == 1:
        return runner._forward(fields, None, 1)
    if room is not None:
        runner._keep_hidden(fields, room, None)
        return runner._hidden
    if step.library:
        backend = runner._model._build.backend  # type: ignore[attr-defined] # a whole decoder
        assert isinstance(backend, TakesLibraries)
        for weights in runner._model.attention_weights.values():  # type: ignore[attr-defined]
            backend.libraries[head_shape(weights)] = TapedLibrary(found)
    flat = step.flat()
    return runner._forward(
        fields, torch.empty(len(step.rows), dtype=torch.int64, device="meta"), step.longest, flat.lens, step=flat
    )


class TapedLibrary(FlashAttention3):
    """Gathers keys and values as it would, and writes down the kernel. It is not installed where nothing runs."""

    def __init__(self, found: list[Launch]) -> None:
        self._found = found
        self._attend = self._write_down

    def _write_down(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: object) -> torch.Tensor:
        heads, dim = q.shape[2:]
        cost = Cost(2 * _bytes(q) + _bytes(keys, values), 4 * heads * dim * StepRow(q.shape[1], keys.shape[1]).seen())
        self._found.append(Launch("flash_attention_3", cost, share=_FLASH_ATTENTION_3, least=4e-6, more=0.0))
        return torch.empty_like(q)


_FLASH_ATTENTION_3 = 0.75
"""Share of the rate: as H100s and H200s have computed a prompt of 8,192 tokens, causal, with 32 heads of 128 and 8 for keys, at 578
to 619 TFLOP/s, its keys and values stored (ai-dynamo/aiconfigurator, 0.12.0: vLLM 0.24.0 and SGLang 0.5.14).
"""


def _config(folder: Path, context: int, tokens: int, rows: int, quantization: str | None, ranks: int) -> WorkerConfig:
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
        layout=ParallelLayout(tensor=ranks),
        local_ranks=ranks,
    )


@contextmanager
def _written_down(rows: Sequence[StepRow]) -> Iterator[list[Launch]]:
    """Writes down what is launched meanwhile; nothing runs."""
    from triton.runtime import JITFunction

    found: list[Launch] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False)) | options
        launch = _of_kernel(self.__name__, named, rows)
        found.append(replace(launch, overlaps=bool(options.get("launch_pdl"))))

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
        if name not in _NO_KERNEL and not (func.is_view and _in_same_memory(args, out)):
            self._found.append(_of_operation(name, args, out))
        return out


def _in_same_memory(args: tuple[Any, ...], out: Any) -> bool:
    """Returns False for a cast, or a copy that is contiguous: by their schemas both are views."""
    return not isinstance(out, torch.Tensor) or out.untyped_storage()._cdata == args[0].untyped_storage()._cdata


_NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "_unsafe_view", "set_"}
_PRODUCTS = {"linear", "mm", "addmm", "bmm", "_scaled_mm"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Operations that read of a larger tensor as much as they write."""
_PARTLY_READ = {"kv", "cos_sin", "block_tables"}
"""Arguments of kernels of which a launch reads or writes what is another argument's, or little."""


def _bytes(*values: object) -> int:
    """Returns the bytes of tensors; each counts once."""
    tensors = {id(each): each for each in values if isinstance(each, torch.Tensor)}
    return sum(each.numel() * each.element_size() for each in tensors.values())


def _of_operation(name: str, args: tuple[Any, ...], out: Any) -> Launch:
    read = _bytes(out) if name in _LOOKUPS else _bytes(*args)
    flops = 2 * out.numel() * args[0 if name != "addmm" else 1].shape[-1] if name in _PRODUCTS else 0
    cost = Cost(read + _bytes(out), flops)
    if not flops:
        return Launch(name, cost)
    share = next(share for most, share in _OF_PRODUCTS if len(out) <= most)
    return Launch(name, cost, fp8=name == "_scaled_mm", share=share, more=_BESIDE_PRODUCT)


_BESIDE_PRODUCT = 2.5e-6
_OF_PRODUCTS = ((16, 0.95), (256, 0.90), (1024, 0.97), (math.inf, 0.91))
"""Seconds that a product of cuBLAS takes beside its limit, and the share of that which it reaches, by the most rows.

Fitted to what ai-dynamo/aiconfigurator 0.12.0 has measured on an H100 and an H200: six matrices in turn, in recordings, by three
engines. 19 matrices of 4 MB to 1 GB are told by 8 % (root mean square), at 1 to 8,192 rows. From 17 to 256 rows, and above 1,024,
the share is as the four of Llama-3-8B reach it together.
"""


def _of_kernel(name: str, args: Mapping[str, Any], rows: Sequence[StepRow]) -> Launch:
    prompt = rows[0].new > 1
    if name == "attention_kernel":
        # Of prompts as fast as kernels whose pages are gathered by pointers: 320 TFLOP/s.
        own = [row for row in rows if args["shortest"] <= row.new <= args["longest"]]
        more = _CHAIN * ((args["positions"] is not None) + (args["arrived"] is not None))
        share = 0.405 if max(row.new for row in own) > 1 else 0.8
        return Launch(name, _attention(args, own, rows), share=share, least=4e-6, more=more)
    if name == "_merge":
        return Launch(name, Cost(_bytes(*(each for key, each in args.items() if key not in _PARTLY_READ))), least=2e-6, more=0.0)
    if name == "_attend":
        return Launch(name, _latents(args, rows) if "q_latent" in args else _expanded(args))
    if name in ("_gate_up", "_down"):
        return Launch(name, _experts(args), share=0.49 if prompt else 0.8)
    if name == "_few_rows":
        read = (each for key, each in args.items() if key not in _PARTLY_READ)
        cost = Cost(_bytes(*read), 2 * len(args["x"]) * args["weight"].numel())
        more = next(seconds for least, seconds in _BESIDE_FEW_ROWS if len(args["weight"]) >= least)
        return Launch(name, cost, share=1.0, more=more)
    if name in _SHOTS:
        moved = _bytes(*(each for key, each in args.items() if key != "regions"))
        least = peer_sums.seconds(_bytes(args["x"]), args["RANKS"], shots=_SHOTS[name])
        return Launch(name, Cost(moved), least=least, more=1e-6 if name == "_one_shot_norm" else 0.0)
    if name == "_accept":
        return Launch(name, Cost(_bytes(args["values"], args["tokens"], args["out"])))
    if name in ("_survey", "_thresholds"):
        return Launch(name, Cost(_bytes(args["temperature"], args["top_k"], args["top_p"], args["min_p"])))  # no row has a filter
    flops = 2 * len(args["x"]) * args["WIDTH"] * args["DEPTH"] if name in ("_linear", "_scaled_linear") else 0
    cost = Cost(_bytes(*(each for key, each in args.items() if key not in _PARTLY_READ)), flops)
    return Launch(name, cost, fp8=name == "_scaled_linear" and args["ROWS"] >= _LEAST_OF_FP8)


_SHOTS = {"_one_shot": 1, "_one_shot_norm": 1, "_two_shots": 2}
"""Sums over ranks: what others have measured of each has its launch in it. A norm behind it takes as long as one's own launch, but
for reading what was summed.
"""

_BESIDE_FEW_ROWS = ((12288, 1.0e-6), (0, 2.5e-6))
"""Seconds of products of few rows beside their bytes at the rate of a copy, by the least columns of the matrix.

A kernel of the same kind took so much at most on a GH200: Triton's, in recordings, of one row or with tiles of 16 and 32 columns,
begun early (SamMausberg/verified-progress, evidence/backbone). It read 21, 47 and 52 MB in 9.3, 16.6 and 17.7 us from one launch to
the next, and of matrices with more columns 63 and 94 MB in 19.5 and 27.6. That card's copy is taken for 3.6 TB/s, as much of its
data sheet's bandwidth as the others reach. By that ours is 4 % faster than cuBLAS; theirs was by 5 %.
"""

_CHAIN = 1e-6
"""Seconds for two reads of the L2 cache, one after the other, and what lies between. Before attention these are a token's position
and the row of its rotation; behind it how many programs are done, and what they have left. An estimate by reading.
"""

_LEAST_OF_FP8 = 64
"""Rows from which Hopper multiplies FP8 itself."""


def _attention(args: Mapping[str, Any], rows: Sequence[StepRow], of_all: Sequence[StepRow]) -> Cost:
    """Reads the keys and values that rows see, once each, and the queries of these rows among those of all."""
    row_bytes = 2 * args["HEADS"] // args["GROUP"] * args["HEAD_DIM"] * args["kv"].element_size()
    rest = _bytes(args["partial_out"], args["partial_lse"], args["q_norm"], args["k_norm"])
    rest += _bytes(args["q"], args["out"]) * sum(row.new for row in rows) // sum(row.new for row in of_all)
    flops = 4 * args["HEADS"] * args["HEAD_DIM"] * sum(row.seen() for row in rows)
    return Cost(rest + row_bytes * sum(row.read() for row in rows), flops)


def _latents(args: Mapping[str, Any], rows: Sequence[StepRow]) -> Cost:
    """Reads the latents that rows see, once each: the heads of a token share them."""
    width = args["RANK"] + args["ROPE"]
    read = sum(row.read() for row in rows) * width * args["kv"].element_size()
    flops = 2 * args["num_heads"] * (width + args["RANK"]) * sum(row.seen() for row in rows)
    return Cost(read + _bytes(args["q_latent"], args["q_rope"], args["out"], args["lse"]), flops)


def _expanded(args: Mapping[str, Any]) -> Cost:
    """Attends in one sequence, to keys and values of each head."""
    row, heads = StepRow(args["queries"], args["context"]), args["q_nope"].shape[1]
    parts = (args[name] for name in ("q_nope", "q_rope", "k_nope", "k_rope", "v", "out"))
    return Cost(_bytes(*parts), 2 * heads * (args["NOPE"] + args["ROPE"] + args["VALUE"]) * row.seen())


def _experts(args: Mapping[str, Any]) -> Cost:
    """Reads the matrices of the experts that are chosen when tokens choose evenly."""
    weight, (tokens, top_k) = args["weight"], args["expert_slots"].shape
    read = _bytes(weight) * chosen_experts(len(weight), top_k, tokens) / len(weight)
    rows = args["x"] if "x" in args else args["activated"]
    return Cost(read + _bytes(rows, args["out"]), 2 * tokens * top_k * weight[0].numel())


def table() -> str:
    """Returns the rows of docs/gpu.md."""
    lines = ["| Llama-3-8B on an H200 | least in bf16 | with `fp8` | launches of a layer | measured |", "|---|---:|---:|---:|---|"]
    for what in (ONE, MANY, MOST, PROMPT):
        plain, fp8 = predict("Llama-3-8B", STEPS[what]), predict("Llama-3-8B", STEPS[what], "fp8")
        times = f"{_milliseconds(plain.seconds)} | {_milliseconds(fp8.seconds)} ({plain.seconds / fp8.seconds:.2f}x)"
        lines.append(f"| {what} | {times} | {len(plain.layer)}, {len(fp8.layer)} | not run |")
    return "\n".join(lines)


def expectations() -> str:
    """Returns the rows of docs/gpu.md about what steps are expected to take, in bf16, beside their roofline."""
    columns = "".join(f" {device}: roofline | expected | share |" for device in DEVICES)
    lines = [f"| in bf16 |{columns} launches of a layer, and of all | measured |", f"|---|{'---:|' * (3 * len(DEVICES) + 1)}---|"]
    for shape, whats in EXPECTED.items():
        for what in whats:
            tape = model_tape(shape, STEPS[what])
            cells, found = [f"{shape}, {what}"], tape.predict(H200_RATES)
            for rates in DEVICES.values():
                limit, expected = _roofline(shape, STEPS[what], rates), tape.predict(rates).expected
                cells += [_milliseconds(limit), _milliseconds(expected), f"{limit / expected:.0%}"]
            lines.append("| " + " | ".join([*cells, f"{len(found.layer)}, {found.launches}", "not run"]) + " |")
    return "\n".join(lines)


def shared() -> str:
    """Returns the rows of docs/gpu.md about ranks that share each layer."""
    columns = "".join(f" {ranks} H200s | launches of a layer |" for ranks in RANKS)
    lines = [f"| in bf16 | 1 H200 |{columns}", f"|---|{'---:|' * (2 * len(RANKS) + 1)}"]
    for what in (ONE, MANY, MOST):
        cells = [f"Llama-3-8B, {what}", _milliseconds(predict("Llama-3-8B", STEPS[what]).expected)]
        for ranks in RANKS:
            found = predict("Llama-3-8B", STEPS[what], ranks=ranks)
            cells += [_milliseconds(found.expected), str(len(found.layer))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _roofline(shape: str, step: TapedStep, rates: Rates) -> float:
    """Returns the limit that `bench/gpu.sh` measures a step by."""
    limits = Limits(rates.bandwidth, rates.bf16)
    return limits.seconds(step_cost(model_config(shape, toy=False), step.rows))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.02 else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    print(table(), expectations(), shared(), sep="\n\n")
