"""The sections of the benchmark: what runs each, and how long it may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """`module`.rows(toy) yields `table.Row`s; `seconds` is when it is given up."""

    module: str
    seconds: float


SECTIONS: dict[str, Section] = {
    "limits": Section("bench.gpu.limits", 120),
    "tests": Section("bench.gpu.gpu_tests", 300),
    "kernels": Section("bench.gpu.kernels", 180),
    "decode": Section("bench.gpu.decode", 420),
    "prefill": Section("bench.gpu.prefill", 150),
    "serve": Section("bench.gpu.serve", 300),
    "start": Section("bench.gpu.start", 270),
    "sleep": Section("bench.gpu.rest", 270),
    "compile": Section("bench.gpu.compiling", 300),
}
"""In the order in which they run and are listed."""
