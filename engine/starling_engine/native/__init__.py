"""CPU kernels in C++, one library for each instruction set, built at first use and called through ctypes.

`load()` returns the library, or None where this machine cannot have it. `ops` are the kernels on torch tensors. `reference` has the
same functions in plain torch: it defines their results, and replaces them where `load()` returns None.
"""

from starling_engine.native.build import instruction_set_name, load

__all__ = ["instruction_set_name", "load"]
