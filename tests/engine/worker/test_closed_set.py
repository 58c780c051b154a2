"""No request of any kind meets a kernel that was not met when the rank got ready.

Whole engines run with tensors on the CPU, which have addresses as on a GPU, and with kernels that are noted in place of run: so
every launch asks for the variant that it would ask for there, and all tokens are 0.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from starling_engine import kernels
from starling_engine.config import SpeculativeConfig
from starling_engine.kernels.ahead import pretend
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InterpretedPlatform
from starling_engine.platforms.triton_support import H200, INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.worker import worker
from starling_engine.worker.device.device_runner import DeviceRunner

from tests.engine.checkpoints import FAMILIES, VARIANTS, Variant, write_checkpoint
from tests.engine.cores import core_for, run
from tests.engine.kernels.compiled import forget_compiled, in_compiler
from tests.engine.mixed_requests import random_traffic

pytestmark = pytest.mark.timeout(200)

OTHERS: dict[str, Variant] = {
    "qwen3-mixed": VARIANTS["qwen3-mixed"],
    "qwen3-moe": VARIANTS["qwen3-moe"],
    "deepseek-v3": VARIANTS["deepseek-v3"],
    "gpt-oss": VARIANTS["gpt-oss"],
    "gemma3": FAMILIES["gemma3"],
    "qwen3-next": FAMILIES["qwen3-next"],
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


class Met:
    """Variants that are asked for, in all before the runner is ready; `late` are others, asked for later."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._ready = False
        self.late: list[str] = []

    def note(self, *, key: str, fn: Any, **_: object) -> bool:
        variant = f"{fn.module}.{fn.name}", key
        if not self._ready:
            self._known.add(variant)
        elif variant not in self._known:
            self.late.append(": ".join(variant))
        return True  # nothing is compiled, nor launched

    def begins(self, of: Callable[..., None], *, ready: bool) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            self._ready = ready
            of(*args, **options)

        return call

    @property
    def known(self) -> int:
        return len(self._known)


@contextmanager
def noted() -> Iterator[Met]:
    """Has engines of the device "interpreter" note their kernels, for a process in which they are not interpreted."""
    from triton import knobs

    pretend(H200)
    forget_compiled()
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)  # before the variable is set that would have them interpreted
    met = Met()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {INTERPRETED: "1"}))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", met.note))
        stack.enter_context(mock.patch.object(InterpretedPlatform, "compile_target", lambda _: H200))
        nothing = SimpleNamespace(wait=lambda _: None)
        stack.enter_context(mock.patch.object(worker, "KernelCompilation", lambda *_: nothing))
        for name, ready in (("__init__", False), ("on_ready", True)):
            stack.enter_context(mock.patch.object(DeviceRunner, name, met.begins(getattr(DeviceRunner, name), ready=ready)))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, _zeroed(getattr(owner, name))))
        yield met


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Memory that no kernel has written is 0, so that torch finds indices in it."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        return make(*args, **options).zero_()

    return call


def met_by_requests(folder: Path, settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Returns how many variants are known, and those that requests of every kind ask for besides. Runs in the compiler."""
    with noted() as met:
        random_traffic(folder, kv_blocks=24, device="interpreter", **settings)
        known, late = met.known, list(met.late)
    return known, late


def met_by_a_common_prefix(folder: Path) -> tuple[int, list[str]]:
    """Has as many requests as have their common blocks read once; returns in how many layers they had, and late variants."""
    from starling_engine.attention import triton_paged
    from starling_engine.kernels import attention_plan

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    cascade = mock.Mock(wraps=triton_paged.cascade_attention)
    pays = mock.patch.object(attention_plan, "CASCADE_BYTES", -(1 << 30))  # nothing of a model this small would
    with pays, noted() as met, core_for(folder, device="interpreter", enforce_eager=True) as core:
        with mock.patch.object(triton_paged, "cascade_attention", cascade):
            for count in (1, 8):
                run(core, [EngineRequest(id=f"{count}.{n}", prompt_ids=[*range(60), n], params=params) for n in range(count)])
        late = list(met.late)
    return cascade.call_count, late


def launch_after_ready() -> list[str]:
    """Asks for a variant that was not met before. Nothing else in this process has such heads."""
    from starling_engine.kernels.split_attention import Partial, merge

    with noted() as met:
        for ready, dim in ((False, 24), (True, 24), (True, 40)):
            met._ready = ready
            merge(Partial(torch.zeros(3, 1, 2, dim), torch.zeros(3, 1, 2)), torch.float32)
    return [each.partition(":")[0] for each in met.late]


def test_a_variant_that_comes_late_is_told() -> None:
    (name,) = in_compiler(launch_after_ready)
    assert "merge" in name


def _named(name: str, *, eager: bool, drafts: bool) -> Any:
    """Marks cases so that, in a run that is not whole, one model has drafts in recorded steps, and none in others."""
    case = f"{name}-{'eager' if eager else 'recorded'}-{'drafts' if drafts else 'plain'}"
    return pytest.param(name, eager, drafts, id=case, marks=[pytest.mark.whole] if name in OTHERS or eager == drafts else [])


@pytest.mark.parametrize(
    ("name", "eager", "drafts"),
    [
        _named(name, eager=eager, drafts=drafts)
        for name in ("llama3.1", *OTHERS)
        for eager in (False, True)
        for drafts in (False, True)
    ],
)
def test_requests_of_every_kind_ask_for_no_other_kernel(name: str, eager: bool, drafts: bool, tmp_path: Path) -> None:
    """Penalties, biases, filters, log probabilities of samples and prompts, and vectors; prompts beside decodes; preemption."""
    write_checkpoint(tmp_path, (OTHERS | VARIANTS)[name])
    settings = {"enforce_eager": eager} | ({"speculative": NGRAM} if drafts else {})
    known, late = in_compiler(met_by_requests, tmp_path, settings)
    assert known > 10 and late == []


def test_a_common_prefix_asks_for_no_other_kernel(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    shared, late = in_compiler(met_by_a_common_prefix, tmp_path)
    assert shared > 0 and late == []
