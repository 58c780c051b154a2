"""CPU kernels in C++ (AVX-512 with bf16), built at first use and called through ctypes.

`load()` returns the library, or None where this machine cannot have it. `ops` are the kernels on torch tensors. `reference` has the
same functions in plain torch: it defines their results, and replaces them where `load()` returns None.
"""

from starling_engine.native.build import load

__all__ = ["load"]
