"""CPU kernels in C++ (AVX-512 with bf16), built at first use and called through ctypes.

`load()` says whether this machine has them. `ops` are the kernels on torch tensors; `reference` has the same
functions in plain torch: it defines what they compute, and stands in where `load()` gives None.
"""

from starling_engine.native.build import load

__all__ = ["load"]
