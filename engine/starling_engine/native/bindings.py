"""The library of kernels in Python: the arguments of its functions, and what a thread calls in its place."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from typing import Any, Protocol

from starling_engine.native.build import load
from starling_engine.native.sampling_metadata import SAMPLING_COLUMNS

_TYPES = {"p": c_void_p, "n": c_int64, "i": c_int, "f": c_float, "d": c_double}
SIGNATURES = {
    "starling_pack_linear": "pnnpii",
    "starling_linear": "pnnpnnpipii",
    "starling_exact_linear": "pnnpnnppi",
    "starling_fp32_linear": "pnnpnnppi",
    "starling_layer_norm": "ppppfpnnii",
    "starling_bidirectional_attention": "pnpnpn" + "nnnppnnfpii",
    "starling_grouped_linear": "pnppnpnnpifffpi",
    "starling_grouped_sum": "ppppnpnnppni",
    "starling_embedding": "pnpnpi",
    "starling_embedding_packed": "pnpnpi",
    "starling_read_gguf": "pnnnipnppni",
    "starling_pack_quantized": "ppppnnnnniipppi",
    "starling_quantized_linear": "pnnppppnnnnniipipnii",
    "starling_grouped_quantized_linear": "pnppnppppnnnnniipifffpi",
    "starling_grouped_quantized_sum": "ppppnppppnnnnniippni",
    "starling_embedding_quantized": "pnppppnnnnniipi",
    "starling_gather_columns": "pnnpnpi",
    "starling_gather_columns_of_pairs": "pnppnpnppi",
    "starling_pack_fp8": "ppnnnippi",
    "starling_fp8_linear": "pnnppnnnpipnii",
    "starling_grouped_fp8_linear": "pnppnppnnnpifffpi",
    "starling_grouped_fp8_sum": "ppppnppnnnppni",
    "starling_embedding_fp8": "pnppnnnpi",
    "starling_route": "ppnnnnniiifppi",
    "starling_look_up": "pnpnp",
    "starling_group_by_slot": "ppnnnppp",
    "starling_rms_norm": "pnppfpnnniii",
    "starling_activate": "ppnniiii",
    "starling_xielu": "ppnnppppii",
    "starling_add_multiple": "pnfipnnnii",
    "starling_multiply_rows": "pnpnpipnnniii",
    "starling_temper": "pnpfffnnii",
    "starling_finish_logits": "pnffi",
    "starling_gate_mul": "pnpnpnnniii",
    "starling_gated_rms_norm": "pnpnpnfpnnniiiii",
    "starling_short_convolution": "pnppnnipp" + "npnnnn" + "ppppnii",
    "starling_gated_delta_rule": "pppppnnnnnppfnnnnipp" + "npnnnn" + "ppppnii",
    "starling_ssd_scan": "ppppnnnnpppffnnnnpp" + "npnnnn" + "ppppnii",
    "starling_selective_scan": "pppppnnnnnpppnnpp" + "npnnnn" + "ppppnii",
    "starling_qk_norm_rope_store": "pnnnnnpipnppfpnnppffiiii",
    "starling_rotate_and_norm": "pnnnnnpppfii",
    "starling_paged_attention": "ppnpnppnnnnnfnfffppiii",
    "starling_decode_inputs": "ppnpnpn" + "pnppppp",
    "starling_take_tokens": "ppnppnp",
    "starling_sample": "pnn" + "p" * len(SAMPLING_COLUMNS) + "pppppi",
    "starling_apply_token_bitmask": "pnnpnpni",
    "starling_multiply_in_cache": "nii",
    "starling_replay": "pn",
    "starling_copy_chunk": "pnnnpnnnpi",
    "starling_exchange_bytes": "nn",
    "starling_exchange": "pnnnpnpd",
    "starling_exchange_parts": "pnnnppppd",
}
"""The arguments of each function, by the letters of `_TYPES`."""

_RETURNS_INT64 = ("starling_read_gguf", "starling_exchange_bytes", "starling_exchange", "starling_exchange_parts")
"""Functions that return a number. The others return nothing."""


class Library(Protocol):
    """The kernels' functions, with the arguments of SIGNATURES."""

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


_of_this_thread = threading.local()


def library() -> Library:
    """Returns the library, or what stands for it in this thread. Raises RuntimeError where there is none (see `load`)."""
    found: Library | None = getattr(_of_this_thread, "stand_in", None)
    return loaded() if found is None else found


@contextmanager
def standing_for(stand_in: Library) -> Iterator[None]:
    """Lets the calling thread call this in place of the loaded library."""
    before = getattr(_of_this_thread, "stand_in", None)
    _of_this_thread.stand_in = stand_in
    try:
        yield
    finally:
        _of_this_thread.stand_in = before


@functools.cache
def loaded() -> ctypes.CDLL:
    """Returns the loaded library with its signatures. Raises RuntimeError where there is none (see `load`)."""
    lib = load()
    if lib is None:
        raise RuntimeError("no native CPU kernels here; use starling_engine.native.reference")
    for name, letters in SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = c_int64 if name in _RETURNS_INT64 else None
    return lib
