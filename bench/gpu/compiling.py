"""A step of decodes as the engine records it, beside the same through torch.compile, and how long that takes to compile.

Once with our kernels as they are, so that what surrounds them is left to it, and once without those of norms and gates, which it
then makes itself. It is no option of the engine: docs/gpu.md says why.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from starling_engine.attention.base import AttentionBackend
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers import activation, norm
from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import ModelConfig
from starling_engine.models.decoder import Decoder, ForwardContext
from starling_engine.weights.dummy import load_dummy

from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.roofline import StepRow, step_cost
from bench.gpu.shapes import model_config
from bench.gpu.table import Row, quantity

SHAPE, CONTEXT, BATCHES = "Qwen3-0.6B", 1024, (1, 64)
BLOCK, BF16 = 16, torch.bfloat16
TOLERANCE = 0.1
"""Of the largest logit: what bf16 leaves of sums in another order after all layers."""

Step = Callable[[], torch.Tensor]


def rows(*, toy: bool) -> Iterator[Row]:
    """What fails is a row that says so, and the others run on; SystemExit at the end, with what was raised."""
    clock, errors = make_clock(toy=toy), []
    limits, config = measure_limits(clock), model_config(SHAPE, toy=toy)
    context, batches = (32, (2,)) if toy else (CONTEXT, BATCHES)
    ours = decoder(config, clock.device)
    models = {"through torch.compile": ours, "with its norms and gates": decoder(config, clock.device, own=False)}
    for batch in batches:
        recorded = step(ours, batch, context, clock.device)
        took, least = clock([recorded]), limits.seconds(step_cost(config, [StepRow(1, context)] * batch))
        what = f"{SHAPE}, batch {batch}, context {context}: a step up to its logits"
        yield Row(what, quantity(took, "s"), quantity(least, "s"), least / took)
        for kind, model in models.items():
            what = f"the same {kind}; its limit is ours"
            try:
                seconds, compiled = compile_step(step(model, batch, context, clock.device), toy=toy)
                check(compiled(), recorded())
                now = clock([compiled])
            except Exception:  # noqa: BLE001 - whatever the compiler makes of it
                errors.append(f"batch {batch}, {kind}: {traceback.format_exc(limit=-3)}")
                yield Row(what, "failed")
                continue
            yield Row(what, quantity(now, "s"), quantity(took, "s"), took / now)
            yield Row("which takes to compile", quantity(seconds, "s"))
    if errors:
        raise SystemExit("\n".join(errors))


def check(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises RuntimeError where they are others."""
    error = float((logits - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"logits are off by {error:.1%} of the largest")


def compile_step(step: Step, *, toy: bool) -> tuple[float, Step]:
    """Seconds of the first call, with nothing kept from before, and the step. A toy is traced, and then run as it is."""
    import torch._inductor.config as inductor  # takes seconds, which are not counted

    torch.compiler.reset()
    compiled: Step = torch.compile(step, backend="eager") if toy else torch.compile(step, fullgraph=True, dynamic=False)
    began = time.perf_counter()
    with inductor.patch(force_disable_caches=True):
        compiled()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, compiled


def decoder(config: ModelConfig, device: torch.device, *, own: bool = True) -> Decoder:
    """Of random weights, with the engine's choice of kernels; without `own` norms and gates are torch's."""
    choice = elementwise_kernels if own else lambda *_: "torch"
    with mock.patch.object(norm, "elementwise_kernels", choice), mock.patch.object(activation, "elementwise_kernels", choice):
        model = Decoder(config, BF16, device, select_linear_method(BF16, device), _attention(device), max_position=2 * CONTEXT)
    load_dummy(model, 0, device)
    return model


def _attention(device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        from starling_engine.attention.torch_paged import TorchPagedAttention

        return TorchPagedAttention()
    from starling_engine.attention.triton_paged import TritonAttention

    return TritonAttention()


def step(model: Decoder, batch: int, context: int, device: torch.device) -> Step:
    """The last token of `batch` sequences, whose pages lie in random order."""
    config, each = model.config, -(-context // BLOCK)
    torch.manual_seed(0)
    tables = torch.randperm(batch * each, device=device).int().view(batch, each)
    page = (batch * each, 2, config.num_kv_heads, BLOCK, config.head_dim)
    kv = [torch.randn(page, dtype=BF16, device=device) for _ in range(config.num_layers)]
    metadata = AttentionMetadata(
        positions=torch.full((batch,), context - 1, device=device),
        slot_mapping=tables[:, -1].long() * BLOCK + (context - 1) % BLOCK,
        query_start=torch.arange(batch + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query_len=1,
    )
    ids = torch.randint(config.vocab_size, (batch,), device=device)

    @torch.no_grad()
    def run() -> torch.Tensor:
        hidden = model.forward(ids, ForwardContext(kv, [metadata] * config.num_layers))
        return model.logits(hidden)

    return run
