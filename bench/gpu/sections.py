"""The sections of the benchmark: what runs each, and how long it may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """`module`.rows(toy) yields `table.Row`s; `seconds` is when it is given up."""

    module: str
    seconds: float


SECTIONS: dict[str, Section] = {
    "limits": Section("bench.gpu.limits", 40),
    "tests": Section("bench.gpu.gpu_tests", 300),
    "kernels": Section("bench.gpu.kernels", 180),
    "decode": Section("bench.gpu.decode", 240),
    "prefill": Section("bench.gpu.prefill", 90),
    "serve": Section("bench.gpu.serve", 180),
    "start": Section("bench.gpu.start", 180),
    "sleep": Section("bench.gpu.rest", 180),
    "compile": Section("bench.gpu.compiling", 300),
}
"""In the order in which they run and are listed."""
