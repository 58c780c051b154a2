"""The sections of the benchmark: what runs each, and how long it may take."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Section:
    """`module`.rows(toy=..., **options) yields `table.Row`s; `seconds` is when it is given up."""

    module: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)


SECTIONS: dict[str, Section] = {
    "limits": Section("bench.gpu.limits", 45),
    "smoke": Section("bench.gpu.smoke", 90),
    "8B": Section("bench.gpu.model", 180, {"shape": "Llama-3-8B", "batches": (1, 64, 256), "prompt": 8192, "profiled": 64}),
    "kernels": Section("bench.gpu.kernels", 180),
    "0.6B": Section("bench.gpu.model", 90, {"shape": "Qwen3-0.6B", "batches": (1, 64), "profiled": 1}),
    "A3B": Section("bench.gpu.model", 180, {"shape": "30B-A3B", "batches": (1, 64), "prompt": 8192, "profiled": 64}),
    "8B-fp8": Section("bench.gpu.model", 120, {"shape": "Llama-3-8B", "batches": (1, 64), "cache": "fp8"}),
    "8B-w8a8": Section("bench.gpu.model", 120, {"shape": "Llama-3-8B", "batches": (1, 64), "prompt": 8192, "quantization": "fp8"}),
    "serve": Section("bench.gpu.serve", 240),
    "start": Section("bench.gpu.start", 240),
    "sleep": Section("bench.gpu.rest", 240),
    "tests": Section("bench.gpu.gpu_tests", 300),
    "compile": Section("bench.gpu.compiling", 300),
}
"""They run and are listed in this order: what says most in a second comes first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sections that a word stands for, and the seconds that they have together unless the command says otherwise."""

    sections: tuple[str, ...]
    seconds: float


GROUPS: dict[str, Group] = {
    "first": Group(("limits", "smoke", "8B"), 235.0),
    "all": Group(tuple(name for name in SECTIONS if name != "compile"), 540.0),
}
"""`compile` runs by its name alone: it says nothing about the engine."""


def chosen(words: list[str], seconds: float | None) -> tuple[tuple[str, ...], float]:
    """The sections that the words of a command name, in their order and each once, and their seconds in all.

    Raises KeyError with the word that names nothing.
    """
    names: list[str] = []
    for word in words or ["all"]:
        names += GROUPS[word].sections if word in GROUPS else (word,)
        if names[-1] not in SECTIONS:
            raise KeyError(word)
    only = GROUPS.get(words[0] if len(words) == 1 else "all", GROUPS["all"])
    return tuple(dict.fromkeys(names)), only.seconds if seconds is None else seconds
