"""Some cases of each kernel on the instruction sets that are not in use; `make test-all` runs all of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from starling_engine.gguf.reader import BLOCK_TYPES
from starling_engine.layers.experts_packed import NativeExperts
from starling_engine.layers.experts_quantized import QuantizedExperts
from starling_engine.native import build, elementwise_ops, load, recurrent_ops
from starling_engine.native.group_quantized import INT8 as CODES
from starling_engine.params import SamplingParams

from tests.engine import recurrent_steps as recurrent
from tests.engine import test_native as kernels
from tests.engine import test_native_cache_rows as cache_rows
from tests.engine import test_native_elementwise as elementwise
from tests.engine import test_quantized_ops as quantized
from tests.engine.instruction_sets import BETWEEN, EMULATED, TILES, other_sets, using
from tests.engine.kernels import test_encoder_kernels as encoders
from tests.engine.layers import test_experts_with_biases as with_biases

pytestmark = [
    pytest.mark.skipif(load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

CPU = torch.device("cpu")
BF16, FP32, FP8, INT8, INT4 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8
SAMPLED = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)
CASES: dict[str, Callable[[], None]] = {
    **{f"linear of {m}": partial(kernels.test_linear, m, 100, 70, True, BF16) for m in (1, 2, 3, 5, 9, 130)},
    "a row of many": kernels.test_without_tiles_a_row_of_a_linear_does_not_depend_on_others,
    "linear of many rows, columns and blocks": partial(kernels.test_linear, 530, 600, 1120, True, FP32),
    "gated linear of many rows": partial(kernels.test_a_gated_linear, 40, 112, 1088, True, BF16),
    "experts of whole tiles": partial(kernels.test_a_grouped_linear, 112, 64, [3, 0, 1, 600], True),
    "linear with long rows": partial(kernels.test_linear, 9, 16, 4098, False, FP32),
    "gated linear": partial(kernels.test_a_gated_linear, 9, 112, 4098, True, BF16),
    "exact linear": partial(kernels.test_an_exact_linear, 19, 40, 70, True),
    "strided rows": kernels.test_linear_reads_strided_rows,
    "experts": partial(kernels.test_a_grouped_linear, 112, 70, [3, 0, 1, 600], True),
    "experts' sum": partial(kernels.test_a_grouped_sum, 100, 70, [3, 0, 1, 600]),
    "experts with biases and a clamped gate": partial(
        with_biases.test_gives_what_the_reference_gives, NativeExperts, BF16, 0.03, 9
    ),
    "experts in codes with biases and a clamped gate": partial(
        with_biases.test_gives_what_the_reference_gives,
        partial(QuantizedExperts, CODES, CODES, online=True),
        BF16,
        0.06,
        9,
    ),
    "strided experts": kernels.test_a_grouped_linear_reads_strided_rows,
    "embedding": partial(kernels.test_embedding_is_the_weight_row, 33, 130),
    "long context": kernels.test_paged_attention_splits_a_lone_long_context,
    **{f"sinks over {cache}": partial(kernels.test_paged_attention_with_sinks, 37, 3.0, cache) for cache in (FP32, FP8)},
    "window": kernels.test_paged_attention_skips_blocks_before_the_window,
    "drafts": partial(kernels.test_attention_of_a_token_is_the_same_whatever_drafts_follow, 64, 2500),
    "not a number": partial(kernels.test_rows_that_read_what_is_not_a_number_show_it, 0, 5.0, FP8),
    **{
        f"codes of fp8, {tokens}": partial(kernels.test_each_code_of_fp8_reads_as_in_torch, tokens, 16, 16, BF16)
        for tokens in (1, 9)
    },
    **{
        f"to {cache}": partial(cache_rows.test_what_is_stored_is_the_reference_s_to_the_bit, 64, 16, BF16, cache)
        for cache in (INT8, INT4)
    },
    **{
        f"drafts over {cache}": partial(cache_rows.test_paged_attention, (kernels.DRAFTS, 6, 2, 96, 32, 37, 0.0), cache, BF16, 1)
        for cache in (INT8, INT4)
    },
    "to fp8": partial(kernels.test_what_goes_to_an_fp8_cache_is_rounded_as_torch_does, BF16),
    **{f"norm in {dtype}": partial(kernels.test_rms_norm, 3, 100, dtype == BF16, dtype) for dtype in (BF16, FP32)},
    "short convolution": partial(recurrent.check_short_convolution, recurrent_ops, CPU, channels=50, taps=4),
    "gated delta rule": partial(recurrent.check_gated_delta_rule, recurrent_ops, CPU, heads=(1, 2), dims=(36, 50)),
    "decays of rows": partial(recurrent.check_gated_delta_rule, recurrent_ops, CPU, heads=(2, 2), dims=(36, 50), row_decays=True),
    "gated norm by a sigmoid": partial(
        recurrent.check_gated_rms_norm, recurrent_ops, CPU, dim=24, dtype=BF16, weight_dtype=BF16, sigmoid=True
    ),
    "scan": partial(recurrent.check_ssd_scan, recurrent_ops, CPU, heads=(1, 2), dims=(36, 50)),
    "scan of drafts": partial(recurrent.check_drafts, recurrent_ops, CPU, "scan", dims=(36, 50)),
    "selective scan of drafts": partial(recurrent.check_drafts, recurrent_ops, CPU, "selective scan"),
    "selective scan": partial(recurrent.check_selective_scan, recurrent_ops, CPU, channels=50, size=5),
    "norm of groups": partial(recurrent.check_grouped_norm, recurrent_ops, CPU, dim=24, dtype=BF16),
    "gated norm": partial(recurrent.check_gated_rms_norm, recurrent_ops, CPU, dim=24, dtype=BF16, weight_dtype=BF16),
    **{f"gated by {name}": partial(elementwise.test_gated_activations, name, 3, 50, BF16) for name in elementwise_ops.ACTIVATIONS},
    "xIELU": partial(elementwise.test_xielu, 3, 50, BF16),
    "xIELU near nothing": elementwise.test_xielu_is_exact_near_nothing,
    "gates": partial(kernels.test_gates_multiply_strided_rows, BF16),
    "norm behind the rotation": partial(kernels.test_heads_are_rotated_and_then_normalised, 50, BF16),
    "rows of a table": partial(kernels.test_rows_of_a_table_are_copied, BF16),
    "layer norm": partial(encoders.test_layer_norm_adds_the_residual_first, BF16),
    "sums": partial(elementwise.test_sums_and_multiples_of_strided_rows, 3, 50, BF16),
    **{
        f"rows by {what}": partial(elementwise.test_rows_are_multiplied_by_numbers_of_their_own, what == "sigmoids", BF16)
        for what in ("numbers", "sigmoids")
    },
    "temperatures": partial(elementwise.test_temperatures_of_queries, BF16),
    "caps of logits": partial(elementwise.test_logits_are_divided_and_then_capped, 30.0, (3, 5001)),
    "sampling": partial(kernels.test_sample_draws_the_reference_tokens, 32003, 4.0),
    "greedy": kernels.test_greedy_takes_the_first_of_equals,
    "broken logits": partial(kernels.test_a_broken_row_gives_a_token_that_shows_it, SAMPLED),
    "broken logits, greedy": kernels.test_greedy_sees_what_is_not_a_number_wherever_it_lies,
    **{name: partial(quantized.test_a_linear, 9, 50, 96, form, bias=True, out_dtype=FP32) for name, form in quantized.KEPT.items()},
    **{
        f"many rows of {name}": partial(quantized.test_a_linear, 40, 300, 1152, form, bias=True, out_dtype=FP32)
        for name, form in quantized.KEPT.items()
    },
    **{
        f"{name}, by 128": partial(quantized.test_in_groups_of_128_a_row_does_not_depend_on_others, form)
        for name, form in quantized.BY_128.items()
    },
    "experts in 4 bits by 128": partial(quantized.test_experts, 112, [3, 0, 1, 530], quantized.KEPT["4 bits by 128"], gated=True),
    "sum of experts in 4 bits by 128": partial(quantized.test_a_sum_of_experts, [3, 0, 1, 70], quantized.KEPT["4 bits by 128"]),
    "gated in 4 bits of many rows": partial(quantized.test_a_gated_linear, 40, 112, 1152, quantized.KEPT["4 bits and minima"]),
    "gated in 4 bits": partial(quantized.test_a_gated_linear, 9, 112, 320, quantized.KEPT["4 bits and minima"]),
    "experts in 4 bits": partial(quantized.test_experts, 112, [3, 0, 1, 70], quantized.KEPT["4 bits and minima"], gated=True),
    "sum of experts in 6 bits": partial(quantized.test_a_sum_of_experts, [3, 0, 1, 70], quantized.KEPT["6 bits by 16"]),
    "embedding in 6 bits": partial(quantized.test_an_embedding_is_the_row, quantized.KEPT["6 bits by 16"]),
    "rows of Q5_K": partial(quantized.test_rows_of_a_gguf_file, BLOCK_TYPES[13]),
    "rows of Q3_K": partial(quantized.test_rows_of_a_gguf_file, BLOCK_TYPES[11]),
    "masks": partial(kernels.test_a_mask_forbids_what_it_does_not_allow, 20_011, 2),
}


LONG_WHEN_EMULATED = ("linear of many rows, columns and blocks", "sampling")
"""Without --whole, of all emulated sets the last one runs them: their loops are the same in each."""


def _run_of(name: str, case: str) -> Any:
    emulated = [other for other in other_sets() if other.startswith(EMULATED)]
    is_long = case in LONG_WHEN_EMULATED and name in emulated[:-1]
    return pytest.param(name, case, marks=[pytest.mark.whole] if is_long or name == BETWEEN else [])


@pytest.fixture(scope="module")
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


@pytest.mark.skipif(TILES.name not in other_sets(), reason="this CPU cannot run the model of tiles")
def test_tiles_are_compared_with_registers_before_they_are_used() -> None:
    with using(TILES.name):
        library = build.load()
        assert library is not None and library.starling_tiles_work() == 1


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("_kernels", "case"), [_run_of(name, case) for name in other_sets() for case in CASES], indirect=["_kernels"]
)
def test_a_kernel(case: str) -> None:
    torch.manual_seed(0)
    CASES[case]()
