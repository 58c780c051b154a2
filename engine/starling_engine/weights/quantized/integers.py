"""Whole numbers in a checkpoint: of GPTQ, AWQ, compressed-tensors and TorchAO."""

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.weights.quantized.matrix import Endings, IntegerMatrix, Read, unpack

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight columns among the nibbles of a word."""


class GptqMatrix(IntegerMatrix):
    """GPTQ's tensors, which AutoRound writes, too: codes packed along columns, zero points along rows, all transposed.

    qweight [K bits / 32, N] int32, scales [G, N], qzeros [G, N bits / 32] int32, g_idx [K] int32 (the group of each column).
    """

    _order = "g_idx"

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        words, n = self._shape_of("qweight", 2)
        bits, k = scheme.bits, words * 32 // scheme.bits
        group = k if scheme.group is None else scheme.group
        groups = -(-k // group)
        if words % (bits if bits == 3 else 1):
            raise WeightError(f"checkpoint: {module}.qweight {[words, n]} does not hold whole codes of {bits} bits")
        self._describe(f"{bits} bits of GPTQ", (n, k), bits, groups)
        self._check("scales", (groups, n))
        self._check("qzeros", (groups, n * bits // 32))
        if scheme.ordered or "g_idx" in tensors:
            self._check("g_idx", (k,))
        self._set_form(group)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        is_denied = "g_idx" in self.tensors and not self.scheme.ordered
        if is_denied and not torch.equal(read("g_idx", ()).long(), self._group_of_columns(read)):
            raise WeightError(f"checkpoint: {self.module}.g_idx has columns in another order, but the config says desc_act: false")
        bits = self.scheme.bits
        codes = unpack(read("qweight", (slice(None), rows)).T, bits)
        scales = read("scales", (slice(None), rows)).T
        zeros = self._zeros(read)[:, rows].T
        if not self.scheme.symmetric:
            return self._matrix(codes, scales, zeros)
        if not bool((zeros == 1 << bits - 1).all()):
            raise WeightError(f"checkpoint: {self.module}.qzeros has zero points, but the config says sym: true")
        return self._matrix(codes, scales, None)

    def _zeros(self, read: Read) -> Tensor:
        """Returns the zero points [G, N] uint8.

        Version 1 has them less 1. A tool takes 1 off all zeros of a word at once, so one of 0 borrows from its neighbour
        (GPTQModel's `convert_gptq_v2_to_v1_format_module`): adding 1 to all gives it back. With 3 bits it is taken
        off each zero by itself.
        """
        bits, words = self.scheme.bits, read("qzeros", ())
        if not self.scheme.zero_shift:
            return unpack(words, bits)
        if bits == 3:
            return unpack(words, bits) + 1 & (1 << bits) - 1
        return unpack(words + sum(1 << place for place in range(0, 32, bits)), bits)


class AwqMatrix(IntegerMatrix):
    """AWQ's tensors ("gemm"): codes and zero points packed along rows in an order of their own, all transposed.

    qweight [K, N / 8] int32, scales [G, N], qzeros [G, N / 8] int32
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        k, words = self._shape_of("qweight", 2)
        groups = self._shape_of("scales", 2)[0]
        self._describe("4 bits of AWQ", (8 * words, k), 4, groups)
        self._check("scales", (groups, 8 * words))
        self._check("qzeros", (groups, words))
        self._set_form(self._group_of("scales", groups))

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        start, stop, _ = rows.indices(self.shape[0])
        words = slice(start // 8, -(-stop // 8))
        inner = slice(start - 8 * words.start, stop - 8 * words.start)
        codes, zeros = (_awq_codes(read(ending, (slice(None), words)))[inner] for ending in ("qweight", "qzeros"))
        return self._matrix(codes.contiguous(), read("scales", (slice(None), rows)).T, zeros)


def _awq_codes(words: Tensor) -> Tensor:
    """[R, W] int32 -> [8 W, R] uint8."""
    turned = words.T.contiguous()
    codes = torch.empty(turned.shape[0], 8, turned.shape[1], dtype=torch.uint8)
    for column, place in enumerate(_AWQ_ORDER):
        codes[:, column] = turned >> 4 * place & 15
    return codes.flatten(0, 1)


class PackedMatrix(IntegerMatrix):
    """pack-quantized of compressed-tensors: weight_packed [N, K bits / 32] int32, weight_zero_point packed along rows, or int8."""

    _order = "weight_g_idx"

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        n, words = self._shape_of("weight_packed", 2)
        if words % (1 if scheme.bits in (2, 4, 8) else scheme.bits):
            raise WeightError(f"checkpoint: {module}.weight_packed {[n, words]} does not hold whole codes of {scheme.bits} bits")
        groups = scales_in(self._shape_of("weight_scale"))
        self._describe(f"{scheme.bits} bits", (n, words * 32 // scheme.bits), scheme.bits, groups)
        self._check("weight_scale", (n, groups), (1,))
        if not scheme.symmetric:
            is_packed = "weight_zero_point" not in tensors or tensors["weight_zero_point"].dtype == "I32"
            self._check("weight_zero_point", (-(-n * scheme.bits // 32), groups) if is_packed else (n, groups))
        self._set_form(self._group_of("weight_scale", groups))
        if scheme.ordered:
            self._check("weight_g_idx", (self.shape[1],))

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        bits, zeros = self.scheme.bits, None
        if not self.scheme.symmetric:
            zeros = read("weight_zero_point", ())
            zeros = (
                unpack(zeros.T, bits)[:, rows].T if zeros.dtype == torch.int32 else zeros[rows].to(torch.int16) + (1 << bits - 1)
            )
        codes = unpack(read("weight_packed", (rows,)), bits)
        return self._matrix(codes, scales_of(read, "weight_scale", rows, codes.shape[0]), zeros)


class PlainMatrix(IntegerMatrix):
    """int-quantized of compressed-tensors, and TorchAO's: weight [N, K] int8, weight_zero_point like the scales.

    Activations are rounded to 8 bits by groups, whatever the config says: that is finer than for a whole row, or for all.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        n, k = self._shape_of("weight", 2)
        groups = scales_in(self._shape_of("weight_scale"))
        self._describe("int8", (n, k), 8, groups)
        self._check("weight_scale", (n, groups), (1,), (1, 1))
        if not scheme.symmetric:
            self._check("weight_zero_point", self._shape_of("weight_scale"))
        self._set_form(self._group_of("weight_scale", groups))

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        # Codes of fewer bits lie around 0 in a byte, too.
        middle = 1 << self.scheme.bits - 1
        codes = read("weight", (rows,)).contiguous().view(torch.uint8) + middle
        n, zeros = codes.shape[0], None
        if not self.scheme.symmetric:
            zeros = scales_of(read, "weight_zero_point", rows, n).float() + middle
        return self._matrix(codes, scales_of(read, "weight_scale", rows, n), zeros)


def scales_in(shape: tuple[int, ...]) -> int:
    """Returns the scales of a row, by the shape of all."""
    return shape[1] if len(shape) == 2 else 1


def scales_of(read: Read, ending: str, rows: slice, n: int) -> Tensor:
    """Returns [n, groups] of a tensor that has a scale, or one for each row, or for each group of each row."""
    whole = read(ending, ())
    return whole.reshape(1, -1).expand(n, -1) if whole.numel() == 1 else whole.reshape(whole.shape[0], -1)[rows]
