"""The tape's efficiencies, held to estimates that were made by hand, and before the tape.

The first code for GPUs (commit d563e67) was read by an engineer of this field, who said what its steps would take on an H100 and an
H200. Here are its launches, as it makes them on torch's meta device, priced by the same functions as those of today.

    python -m tests.bench.test_gpu_tape_calibration
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.roofline import StepRow
from tests.engine.kernels.compiled import in_compiler

pytest.importorskip("triton")

DOCUMENTED = Path(__file__).parents[2] / "docs" / "gpu-proofs.md"

BF16, FP32, INT32, INT64, FP64 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float64

Range = tuple[float, float]
"""Milliseconds."""

MARGIN = 0.05
"""What a prediction may be beside the estimate's range, as a share."""


@dataclass(frozen=True)
class Estimate:
    """Of a step of so many rows alike. `segments` of each context; `layer`: launches of each layer but the last."""

    shape: str
    rows: int
    row: StepRow
    segments: int
    layer: int
    h100: Range
    h200: Range

    @property
    def name(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.shape}, " + (f"decode, {rows}" if self.row.new == 1 else f"prompt of {self.row.new:,} tokens")


DECODE, PROMPT = StepRow(1, 1024), StepRow(8192, 8192)
ESTIMATES = [
    Estimate("Llama-3-8B", 1, DECODE, 4, 10, (5.9, 6.2), (4.4, 4.7)),
    Estimate("Llama-3-8B", 64, DECODE, 2, 10, (10.0, 10.5), (7.3, 7.7)),
    Estimate("Llama-3-8B", 256, DECODE, 1, 9, (21, 22), (15, 16)),
    Estimate("Llama-3-8B", 1, PROMPT, 1, 9, (223, 245), (219, 241)),
    Estimate("Qwen3-0.6B", 1, DECODE, 4, 10, (1.1, 1.25), (1.0, 1.1)),
    Estimate("Qwen3-0.6B", 64, DECODE, 2, 10, (4.2, 4.6), (3.2, 3.5)),
    Estimate("30B-A3B", 1, DECODE, 4, 14, (3.6, 4.0), (3.1, 3.4)),
    Estimate("30B-A3B", 64, DECODE, 4, 15, (29, 31), (21, 22)),
    Estimate("30B-A3B", 1, PROMPT, 1, 15, (190, 215), (190, 215)),
]

BEYOND = {(f"{shape}, decode, 1 row", device) for shape in ("Qwen3-0.6B", "30B-A3B") for device in ("H100", "H200")}
"""Figures that today's efficiencies do not meet; docs/gpu-proofs.md says why."""


class FirstCode:
    """A step of the first code; `launches` in their order, as it makes them."""

    def __init__(self, of: Estimate) -> None:
        from bench.gpu import tape

        self._tape, self._of, config = tape, of, tape.MODELS[of.shape]
        self.launches: list[Any] = []
        self._rows, self._tokens, self._samples = [of.row] * of.rows, of.rows * of.row.new, of.rows
        self._hidden, self._mlp = config["hidden_size"], config["intermediate_size"]
        self._heads, self._kv_heads, self._dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self._experts, self._top_k = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
        self._expert, self._vocab = config.get("moe_intermediate_size", 0), config["vocab_size"]
        layers = config["num_hidden_layers"]
        self._embed()
        for layer in range(layers):
            before = len(self.launches)
            self._attend()
            tokens = self._samples if layer == layers - 1 else self._tokens
            if tokens < self._tokens:
                self._choose(tokens)
            self._product(tokens, self._heads * self._dim, self._hidden)
            self._norm(tokens)
            self._route(tokens) if self._experts else self._gated(tokens)
            assert layer == layers - 1 or len(self.launches) - before == of.layer
        self._sample()

    def _embed(self) -> None:
        """Feeds sampled tokens back, finds the rows of the block tables, and the tokens' embeddings."""
        ids, slots, rows = _empty(self._tokens + 1, dtype=INT64), _empty(257, dtype=INT64), _empty(self._samples, dtype=INT64)
        tables = _empty(257, -(-(self._of.row.context + 1) // 16), dtype=INT32)
        self._operation("index_select", slots, 0, rows, out=rows)
        self._operation("index_copy_", ids, 0, rows, rows, out=ids)
        self._operation("index_select", tables, 0, rows, out=_empty(self._samples, tables.shape[1], dtype=INT32))
        self._operation("embedding", _empty(self._vocab, self._hidden), ids, out=_empty(self._tokens, self._hidden))

    def _attend(self) -> None:
        """Normalises heads, rotates them and stores in one launch, attends in another, and adds up the parts of contexts."""
        tokens, heads, both, dim = self._tokens, self._heads, 2 * self._kv_heads, self._dim
        self._norm(tokens)
        self._product(tokens, self._hidden, (heads + both) * dim)
        q, out = _empty(tokens, heads, dim), _empty(tokens, heads, dim)
        at = {"positions": _empty(tokens, dtype=INT64), "slots": _empty(tokens, dtype=INT64)}
        self._kernel("_qk_norm_rope_store", qkv=_empty(tokens, (heads + both) * dim), out=q, **at)
        split = self._of.segments > 1
        parts = {
            "partial_out": _empty(tokens, heads, self._of.segments, dim, dtype=FP32) if split else None,
            "partial_lse": _empty(tokens, heads, self._of.segments, dtype=FP32) if split else None,
        }
        self._kernel(
            "attention_kernel",
            q=q,
            kv=_empty(1, 2, self._kv_heads, 16, dim),
            out=None if split else out,
            shortest=1,
            longest=1 << 30,
            HEADS=heads,
            GROUP=2 * heads // both,
            HEAD_DIM=dim,
            **parts,
        )
        if split:
            self._kernel("_merge", out=out, **parts)

    def _choose(self, tokens: int) -> None:
        """Takes the rows of the last layer that are sampled from."""
        of_rows = _empty(tokens, dtype=INT64)
        for width, dtype in ((self._heads * self._dim, BF16), (self._hidden, BF16), *[(1, INT64)] * bool(self._experts)):
            self._operation("index", _empty(self._tokens, width, dtype=dtype), [of_rows], out=_empty(tokens, width, dtype=dtype))

    def _gated(self, tokens: int) -> None:
        both = _empty(tokens, 2 * self._mlp)
        self._product(tokens, self._hidden, 2 * self._mlp)
        self._kernel("_silu_mul_rows", gate_up=both, out=_empty(tokens, self._mlp))
        self._product(tokens, self._mlp, self._hidden)

    def _route(self, tokens: int) -> None:
        """Routes in fp32, sorts where there are several tokens, and adds up each token's experts."""
        count, top_k, hidden, width = self._experts, self._top_k, self._hidden, self._expert
        pairs, x = tokens * top_k, _empty(tokens, hidden)
        wide, logits = _empty(tokens, hidden, dtype=FP32), _empty(tokens, count, dtype=FP32)
        ids, weights = _empty(tokens, top_k, dtype=INT64), _empty(tokens, top_k, dtype=FP32)
        self._operation("to", x, FP32, out=wide)
        self._operation("linear", wide, _empty(count, hidden, dtype=FP32), out=logits)
        self._kernel("_route", logits=logits, slots=_empty(tokens, dtype=INT64), weights=weights, ids=ids)
        self._operation("index", _empty(count + 1, dtype=INT64), [ids], out=ids)
        counts, order = _empty(-(-pairs // 512), 256, dtype=INT32), _empty(pairs, dtype=INT32)
        if pairs > 512:
            self._kernel("_count", slots=ids, counts=counts)
        if tokens > 1:
            self._kernel("_place", slots=ids, counts=counts, order=order)
        inner, parts = _empty(pairs, width), _empty(pairs, hidden)
        self._kernel("_gate_up", x=x, weight=_empty(count, 2 * width, hidden), out=inner, expert_slots=ids)
        self._kernel("_down", activated=inner, weight=_empty(count, hidden, width), out=parts, expert_slots=ids)
        self._kernel("_sum", parts=parts, slots=ids, out=x)

    def _sample(self) -> None:
        """Widens the logits of the head, draws, and says which tokens came of finite ones."""
        rows, vocab = self._samples, self._vocab
        self._norm(rows)
        logits, chosen, one = _empty(rows, vocab, dtype=FP32), _empty(rows, dtype=INT64), _empty(rows, dtype=FP32)
        self._product(rows, self._hidden, vocab)
        self._operation("copy_", logits, _empty(rows, vocab), out=logits)
        settings = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), one)
        self._kernel("_survey", logits=logits, **settings)
        self._kernel("_thresholds", logits=logits, lowest=one, **settings)
        parts = min(-(-vocab // 2048), -(-1024 // rows))
        values = {"values": _empty(rows, parts, dtype=FP64), "tokens": _empty(rows, parts, dtype=INT32)}
        self._kernel("_draw", logits=logits, temperature=one, **values)
        self._kernel("_pick", out=chosen, **values)
        self._operation("index_copy_", _empty(257, dtype=INT64), 0, chosen, chosen, out=chosen)
        self._operation("copy_", chosen, chosen, out=chosen)
        self._operation("gather", logits, 1, chosen, out=one)
        for name in ("abs", "eq", "ne", "mul"):  # torch's isfinite
            self._operation(name, one, out=one)
        self._operation("copy_", chosen, chosen, out=chosen)

    def _norm(self, tokens: int) -> None:
        x = _empty(tokens, self._hidden)
        self._kernel("_rms_norm_rows", x=x, residual=_empty(tokens, self._hidden), weight=_empty(self._hidden), out=x)

    def _product(self, tokens: int, depth: int, width: int) -> None:
        self._operation("linear", _empty(tokens, depth), _empty(width, depth), out=_empty(tokens, width))

    def _kernel(self, name: str, **args: Any) -> None:
        self.launches.append(self._tape._of_kernel(name, defaultdict(lambda: None, args), self._rows))

    def _operation(self, name: str, *args: Any, out: torch.Tensor) -> None:
        self.launches.append(self._tape._of_operation(name, args, out))


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Predicted = dict[str, dict[str, float]]
"""Milliseconds, by step and device."""


def predict_all() -> Predicted:
    from bench.gpu import tape

    steps = {of.name: FirstCode(of).launches for of in ESTIMATES}
    return {
        name: {device: 1e3 * sum(each.expected(of) for each in launches) for device, of in tape.DEVICES.items()}
        for name, launches in steps.items()
    }


def written(predicted: Predicted) -> str:
    """Returns the table of docs/gpu-proofs.md."""
    lines = ["| first code, ms | H100: estimated | by the tape | H200: estimated | by the tape |", "|---|---:|---:|---:|---:|"]
    for of in ESTIMATES:
        found = predicted[of.name]
        cells = (f"{low:g}-{high:g} | {found[device]:.3g}" for device, (low, high) in (("H100", of.h100), ("H200", of.h200)))
        lines.append(f"| {of.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def predicted() -> Predicted:
    found: Predicted = in_compiler(predict_all)
    return found


@pytest.mark.parametrize("device", ["H100", "H200"])
@pytest.mark.parametrize("of", ESTIMATES, ids=lambda of: of.name)
def test_todays_efficiencies_give_for_the_first_code_what_was_estimated_for_it(
    of: Estimate, device: str, predicted: Predicted
) -> None:
    low, high = of.h100 if device == "H100" else of.h200
    within = (1 - MARGIN) * low <= predicted[of.name][device] <= (1 + MARGIN) * high
    assert within == ((of.name, device) not in BEYOND), (low, predicted[of.name][device], high)


def test_the_documented_calibration_is_that_of_the_code(predicted: Predicted) -> None:
    assert written(predicted) in DOCUMENTED.read_text()


if __name__ == "__main__":
    print(written(predict_all()))
