"""To launch a step never waits for the device, whether the step is recorded or not.

Steps with every kind of request are launched on torch's meta device. There a tensor has no values, so that no call can read one on
the host. What is copied to it or from it can be told from all other calls: it has to be pinned, and the copy asynchronous.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from starling_engine.config import SpeculativeConfig, WorkerConfig
from starling_engine.kernels.ahead import note_launches, pretend
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import H200
from starling_engine.step import FOLLOWS, OWN, BlockAppend, NewRequest, StepMasks, StepPlan
from starling_engine.token_packing import pack_tokens
from starling_engine.worker import warm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.kernels.compiled import forget_compiled, in_compiler
from tests.engine.mixed_requests import KINDS, POOLED
from tests.engine.worker.test_warm import config_of

pytestmark = pytest.mark.timeout(200)

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
"""Operations whose result the host has to know, or at least its size."""

BLOCK, ROOM = 16, 64
"""Tokens of a block, and blocks of each request from the start."""


class HostTraffic(TorchDispatchMode):
    """Counts copies between the host's memory and the device's, and refuses those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()
        self.copies: Counter[str] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        pinned = InlineQueue.pinned

        def noted(queue: InlineQueue, num_bytes: int) -> torch.Tensor:
            memory = pinned(queue, num_bytes)
            self._pinned.add(memory.untyped_storage()._cdata)
            self._kept.append(memory)
            return memory

        self._kept: list[torch.Tensor] = []
        with mock.patch.object(InlineQueue, "pinned", noted):
            yield

    @contextmanager
    def launching(self) -> Iterator[None]:
        make = torch.tensor

        def checked(data: object, **options: Any) -> torch.Tensor:
            made = make(data, **options)
            assert not made.is_meta, "a new tensor of the host's numbers waits until it is copied"
            return made

        with mock.patch.object(torch, "tensor", checked), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        if name == "copy_" and args[0].device != args[1].device:
            self._check(name, args[1] if args[0].is_meta else args[0], args[2] if len(args) > 2 else options.get("non_blocking"))
            self.copies["to the device" if args[0].is_meta else "to the host"] += 1
            return args[0]
        if any(each.is_meta for each in given):
            assert name not in WAITING, f"{name} waits for the device"
            # A number in a tensor without dimensions is an argument of a kernel, as a Python number is.
            assert all(each.is_meta or not each.dim() for each in given), f"{name} of the host's and the device's tensors"
        out = func(*args, **options)
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if given and any(each.is_meta for each in made) and not any(each.is_meta for each in given):
            self._check(name, given[0], options.get("non_blocking"))
            self.copies["to the device"] += 1
        assert not any(each.is_meta for each in given) or all(each.is_meta for each in made), f"{name} waits for a tensor"
        return out

    def _check(self, name: str, memory: torch.Tensor, non_blocking: object) -> None:
        assert memory.untyped_storage()._cdata in self._pinned, f"{name} copies from or to memory that is not pinned"
        assert non_blocking, f"{name} waits until it has copied"


class Plans:
    """Plans of steps, in which requests of every kind take a slot each and go on."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._count = 0
        self._lengths: list[int] = []

    def begin(self, lengths: list[int]) -> StepPlan:
        """Has so many requests enter, with prompts of such lengths; those that are there decode beside them."""
        rows, new = range(len(self._lengths)), []
        for slot, length in enumerate(lengths, len(self._lengths)):
            blocks = [[1 + slot] * -(-length // BLOCK)] * self._groups
            pooling = POOLED[slot % len(POOLED)] if slot % 3 == 2 else None
            kind = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **KINDS[slot % len(KINDS)]}
            sampling = SamplingParams(**kind) if pooling is None else SamplingParams(max_tokens=1)
            new.append(NewRequest(slot, pack_tokens([slot + 3] * length), length, blocks, slot, sampling, pooling))
        going = [row for row in rows if row % 3 != 2]
        return self._plan([*going, *range(len(rows), len(rows) + len(lengths))], lengths, new)

    def decode(self, drafts: int = 0, own: bool = False, masked: int = 0) -> StepPlan:
        """Has each request decode, with so many drafts; the first `masked` of them have masks."""
        return self._plan([row for row in range(len(self._lengths)) if row % 3 != 2], [], [], drafts, own, masked)

    def _plan(
        self, slots: list[int], lengths: list[int], new: list[NewRequest], drafts: int = 0, own: bool = False, masked: int = 0
    ) -> StepPlan:
        before, step = len(self._lengths), self._count
        self._lengths += [0] * len(lengths)
        counts = [lengths[slot - before] if slot >= before else 1 + drafts for slot in slots]
        appends = []
        for slot, count in zip(slots, counts, strict=True):
            had, self._lengths[slot] = self._lengths[slot], self._lengths[slot] + count
            missing = -(-self._lengths[slot] // BLOCK) - -(-had // BLOCK)
            if slot < before and missing:
                appends += [BlockAppend(slot, group, [9] * missing) for group in range(self._groups)]
        self._count += 1
        return StepPlan(
            step,
            0,
            slots,
            [0 if slot >= before else FOLLOWS for slot in slots],
            counts,
            [True] * len(slots),
            new,
            appends,
            num_drafts=[drafts if slot < before else 0 for slot in slots] if drafts else [],
            drafts=pack_tokens([OWN if own else 5] * drafts * sum(slot < before for slot in slots)),
            masked=list(range(masked)),
        )


def traffic(config: WorkerConfig) -> dict[str, int]:
    """Launches steps of all kinds; returns how many copies there were to the device, and to the host. Runs in the compiler."""
    pretend(H200)
    forget_compiled()
    watch = HostTraffic()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(watch.watched())
        runner = warm.shapes_only_runner(config)
        plans = Plans(len(runner._pages.groups))
        vocabulary = runner._sampler.vocab_size

        def launch(plan: StepPlan) -> None:
            if plan.masked:
                samples = sum(1 + plan.num_drafts[row] if plan.num_drafts else 1 for row in plan.masked)
                masks = StepMasks(plan.step_id, plan.masked, bytes(4 * -(-vocabulary // 32) * samples))
                runner._extra_outputs._masking._source.put(masks)  # type: ignore[attr-defined] # a MaskQueue
            with watch.launching():
                runner.launch(plan)

        def launch_all() -> None:
            launch(plans.begin([5, 17, 40, 1, 64, 3, 9]))
            launch(plans.decode())
            launch(plans.decode(masked=3))
            launch(plans.begin([700, 33]))
            launch(plans.decode(drafts=3, masked=2))
            launch(plans.decode(drafts=3, own=True))
            launch(plans.begin([900]))

        note_launches(launch_all)
    return dict(watch.copies)


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("shape", ["Llama-3-8B", "30B-A3B"])
def test_a_step_of_any_request_is_launched_without_waiting(shape: str, eager: bool, tmp_path: Path) -> None:
    own = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config = config_of(tmp_path, shape, enforce_eager=eager, num_speculative_tokens=3, own_drafts=own)
    found = in_compiler(traffic, config)
    assert found["to the device"] >= 14 and found["to the host"] >= 7, "each step sends its fields, and reads its tokens"


def refused(work: str) -> str:
    """Returns what is said of a call that waits. Runs in the compiler."""
    watch = HostTraffic()
    device, host = torch.empty(3, device="meta"), torch.ones(3)
    with watch.watched():
        pinned = InlineQueue().pinned(12).view(torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "pageable": lambda: host.to("meta", non_blocking=True),
            "into": lambda: device.copy_(host, non_blocking=True),
            "blocking": lambda: device.copy_(pinned),
            "back": lambda: host.copy_(device, non_blocking=True),
            "new": lambda: torch.tensor([1.0, 2.0], device="meta"),
            "mask": lambda: device[device > 0],
            "item": lambda: device[0].item(),
            "bool": lambda: bool(device[0] > 0),
            "cpu": lambda: device.cpu(),
            "list": lambda: device.tolist(),
            "mixed": lambda: device + host,
            "fine": lambda: pinned.to("meta", non_blocking=True) + device,
        }
        try:
            with watch.launching():
                calls[work]()
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize(
    "work", ["pageable", "into", "blocking", "back", "new", "mask", "item", "bool", "cpu", "list", "mixed", "fine"]
)
def test_a_call_that_waits_is_refused(work: str) -> None:
    assert bool(in_compiler(refused, work)) == (work != "fine")
