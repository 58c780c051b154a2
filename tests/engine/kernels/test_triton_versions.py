"""The table in docs/gpu.md of what each version of Triton makes of the kernels that count most.

In a run of the whole each test is repeated with the versions that `conftest` names.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from starling_engine.kernels.attention_plan import prefill_tiles
from triton import __version__ as pinned

from tests.engine.kernels import moe_launches, test_few_rows
from tests.engine.kernels.compiled import Compiled, compiled
from tests.engine.kernels.test_attention_compiled import launch_attention, launch_decode

pytestmark = [pytest.mark.whole, pytest.mark.timeout(200)]

DOCUMENTED = Path(__file__).parents[3] / "docs" / "gpu.md"
HEAD = "| Llama-3-8B where no other model is named |"
LOOP = "instructions of a turn of the prompt's loop"

KERNELS: dict[str, tuple[str, Callable[..., object], tuple[object, ...]]] = {
    "attention of a prompt": ("attention_kernel", launch_attention, (8192, 1, 8192)),
    "attention of a decode, split": ("attention_kernel", launch_decode, (1,)),
    "attention of a decode of 64 rows": ("attention_kernel", launch_decode, (64,)),
    "head, 1 row": ("_few_rows", test_few_rows.launch_head, ()),
    "experts' gates, 1 token of 30B-A3B": ("_gate_up", moe_launches.experts, (1,)),
    "experts' gates, 8,192 tokens of 30B-A3B": ("_gate_up", moe_launches.experts, (8192,)),
    "latent attention of a decode, DeepSeek-V3": ("_attend", moe_launches.absorbed, (1, 1, 128)),
}
"""The kernel of each row, and what launches it."""


def cells(row: str) -> dict[str, str]:
    """Returns what the table says in a row, by version."""
    lines = DOCUMENTED.read_text().splitlines()
    versions = next(line for line in lines if line.startswith(HEAD))
    values = next(line for line in lines if line.startswith(f"| {row} |"))
    split = [[part.strip() for part in line.strip("|").split("|")[1:]] for line in (versions, values)]
    return dict(zip(*split, strict=True))


def written(kernel: Compiled) -> str:
    at_once = f"{kernel.registers} registers, {kernel.blocks} blocks, {kernel.in_flight >> 10} KiB"
    return f"{at_once}, spills" if kernel.spills else at_once


def column(triton: str | None) -> str:
    return f"Triton {'.'.join((triton or pinned).split('.')[:2])}"


@pytest.mark.parametrize("row", KERNELS)
def test_machine_code_is_as_documented(row: str, triton: str | None) -> None:
    name, launch, args = KERNELS[row]
    kernel = next(each for each in compiled(launch, *args) if each.name == name)
    assert cells(row)[column(triton)] == written(kernel)


def test_the_prompts_loop_is_as_long_as_documented(triton: str | None) -> None:
    """Its instructions take this many turns of a scheduler, and its products that many cycles of the tensor cores."""
    (kernel,) = compiled(launch_attention, 8192, 1, 8192)
    assert cells(LOOP)[column(triton)] == f"{kernel.loop}: {share_of_loop(kernel):.0%}"


def share_of_loop(kernel: Compiled) -> float:
    """Returns the share of a loop's turns in which tensor cores would multiply if nothing else held instructions up.

    A processor multiplies 2,048 pairs of bf16 in a cycle, and each of its four schedulers issues one instruction of a warp.
    """
    tiles = prefill_tiles(128, 2)
    cycles = 2 * tiles.rows * tiles.keys * 128 / 2048
    return cycles / max(cycles, kernel.loop * tiles.warps / 4)
