"""The kernels of encoders against torch's own functions in float64."""

import itertools

import pytest
import torch
from starling_engine import native
from starling_engine.native import encoder_ops, instruction_set_name, routing_ops
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(native.load() is None, reason="there are no native kernels here")

ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 0.03}
DTYPES = pytest.mark.parametrize("dtype", ROUNDED)


def test_they_are_taken_where_torchs_threads_have_no_part() -> None:
    cpu = torch.device("cpu")
    assert encoder_ops.are_fastest(torch.bfloat16, cpu) and not encoder_ops.are_fastest(torch.bfloat16, torch.device("meta"))
    assert encoder_ops.are_fastest(torch.float32, cpu) == (instruction_set_name() == "avx2"), "otherwise products are oneDNN's"
    assert not encoder_ops.are_fastest(torch.float16, cpu)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 8), (37, 45, 70), (13, 48, 4100), (600, 16, 33)])
def test_products_have_every_row_column_and_bias(rows: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, k + 3)[:, :k], torch.randn(n, k), torch.randn(n)
    product = routing_ops.exact_linear(x, routing_ops.pack_exact(weight), n, bias)
    torch.testing.assert_close(product.double(), F.linear(x.double(), weight.double(), bias.double()), atol=3e-7 * k, rtol=1e-5)


@DTYPES
def test_layer_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = (torch.randn(*size).to(dtype) for size in ((9, 100), (9, 100), (100,), (100,)))
    total = (x + 3).add(residual)
    stream, out = residual.clone(), torch.empty_like(x)
    encoder_ops.layer_norm(x + 3, stream, weight, bias, 1e-5, out)
    assert torch.equal(stream, total)
    _assert_norm(out, total, weight, bias)
    encoder_ops.layer_norm(total, None, weight, None, 1e-5, out)
    _assert_norm(out, total, weight, None)


def _assert_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    wanted = F.layer_norm(x.double(), (x.shape[1],), weight.double(), None if bias is None else bias.double(), 1e-5)
    torch.testing.assert_close(out.double(), wanted, atol=ROUNDED[out.dtype], rtol=ROUNDED[out.dtype])


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "unseen"),
    [(4, 4, 64, 0, 0), (4, 2, 32, 0, 2), (2, 1, 48, 20, 0), (2, 2, 16, 1, 0), (3, 1, 32, 3, 4)],
)
def test_tokens_attend_to_those_of_their_sequence(
    heads: int, kv_heads: int, dim: int, window: int, unseen: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    starts = [0, 5, 43, 300]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    seen = [length - unseen for length in lengths]
    q, k, v = torch.randn(300, heads + 2 * kv_heads, dim).to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    found = encoder_ops.bidirectional_attention(q, k, v, starts, seen, 0.1, window)
    parts = []
    for start, length, keys in zip(starts, lengths, seen, strict=False):
        of_queries, of_keys = slice(start, start + length), slice(start, start + keys)
        one = [part[at].double().transpose(0, 1) for part, at in ((q, of_queries), (k, of_keys), (v, of_keys))]
        near = (torch.arange(length).unsqueeze(1) - torch.arange(keys)).abs() < (window or length)
        parts.append(F.scaled_dot_product_attention(*one, near, scale=0.1, enable_gqa=True).transpose(0, 1))
    torch.testing.assert_close(found.double(), torch.cat(parts), atol=ROUNDED[dtype], rtol=ROUNDED[dtype])
