"""A core that sleeps and wakes answers as it did before, and its memory was free meanwhile."""

import gc
import threading
import time
from pathlib import Path

import pytest
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.core.sleeper import CoreSleeper
from starling_engine.delta import Delta
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.kv_offload.secondary.folder.tier import FolderTier
from starling_engine.models.decoder import Decoder
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.sleep import Mode, Sleep, SleepOrder, SleepState, Slept, Tag, WakeUp
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, Reference, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run

ALL: list[Tag] = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["qwen3-tied"])


class Bed:
    """A core and who has it sleep, stepped by hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.sleeper = CoreSleeper(core)
        self.deltas: list[Delta] = []

    def ask(self, order: SleepOrder, by: bytes = b"me") -> None:
        self.deltas += self.sleeper.take(order, by)

    def answer(self) -> Slept:
        """Steps until the oldest order has one."""
        deadline = time.monotonic() + 60
        while not (answers := self.sleeper.step()):
            assert time.monotonic() < deadline
            self.deltas += self.core.step()
            time.sleep(0.001)
        ((_, slept),) = answers
        return slept

    def sleep(self, level: int, mode: Mode = "refuse") -> Slept:
        self.ask(Sleep(1, level, mode))
        return self.answer()

    def wake(self, tags: list[Tag] = ALL) -> Slept:
        self.ask(WakeUp(2, tags))
        return self.answer()


def ask_again(core: EngineCore, reference: Reference, name: str) -> None:
    results = run(core, [greedy(name, reference.prompt)])
    assert_greedy(results[name][0], reference)


@pytest.mark.parametrize("variant", ["llama3.1", "qwen3-moe", "deepseek-v3"])
def test_every_kind_of_model_is_made_anew(variant: str, tmp_path: Path) -> None:
    """Untied matrices, experts and latents."""
    reference = make_reference(tmp_path, VARIANTS[variant])
    with core_for(reference.folder) as core:
        bed = Bed(core)
        ask_again(core, reference, "before")
        assert bed.sleep(2) == Slept(1) and bed.wake() == Slept(2)
        ask_again(core, reference, "after")


def test_what_the_tags_name_wakes_by_itself(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        bed = Bed(core)
        ask_again(core, reference, "before")
        assert bed.sleep(2) == Slept(1) == bed.sleep(2), "to sleep twice is to sleep"
        assert bed.sleeper.state == SleepState(("weights", "kv_cache"), taking=False, level=2)
        assert bed.wake(["weights"]) == Slept(2)
        assert bed.sleeper.state == SleepState(("kv_cache",), taking=False, level=2)
        assert bed.wake(["weights"]) == Slept(2) and bed.wake(["kv_cache"]) == Slept(2)
        assert bed.sleeper.state == SleepState()
        assert bed.wake() == Slept(2), "to wake twice is to wake"
        ask_again(core, reference, "after")
        assert core.scheduler.stats.prefix_hits_total == 0, "the cache was dropped"
        levels = []
        for level in (1, 2, 1):
            assert bed.sleep(level) == Slept(1)
            levels.append(bed.sleeper.state.level)
        assert levels == [1, 2, 2], "deeper, and never lighter"
        assert bed.wake(["kv_cache"]) == bed.wake(["weights"]) == Slept(2)
        ask_again(core, reference, "again")


def models_here() -> int:
    return sum(type(thing) is Decoder for thing in gc.get_objects())


def test_a_sleeping_core_has_no_model(reference: Reference) -> None:
    """Nothing of it: what has no storage that can be given back, as oneDNN's weights, goes with it."""
    gc.collect()
    others = models_here()
    with core_for(reference.folder) as core:
        assert isinstance(core.executor, ThreadExecutor), "its worker is in this process"
        bed = Bed(core)
        assert models_here() == others + 1
        assert bed.sleep(2) == Slept(1)
        assert models_here() == others
        results = run(core, [greedy("asleep", reference.prompt)])
        assert "no step is planned for a core that sleeps" in (results["asleep"][1] or "")


@pytest.mark.parametrize("layout", [ParallelLayout(1, 1, 2), ParallelLayout(1, 2, 1)], ids=["tensor", "pipeline"])
def test_ranks_sleep_together(layout: ParallelLayout, reference: Reference) -> None:
    """And each that cannot wake is named, while the others wait for it."""
    with core_for(reference.folder, layout=layout) as core:
        bed = Bed(core)
        assert bed.sleep(1) == Slept(1) and bed.wake() == Slept(2)
        ask_again(core, reference, "first")
        assert bed.sleep(2) == Slept(1)
        with absent(reference.folder / "model.safetensors"):
            error = bed.wake().error or ""
            assert "rank 0: WeightError" in error and "rank 1: WeightError" in error
        assert bed.wake() == Slept(2)
        ask_again(core, reference, "second")


class absent:
    """A file that is not there for a while."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_name("aside")

    def __enter__(self) -> None:
        self.path.rename(self.aside)

    def __exit__(self, *_: object) -> None:
        self.aside.rename(self.path)


def test_a_wake_that_fails_can_be_tried_again(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        bed = Bed(core)
        assert bed.sleep(2) == Slept(1)
        with absent(reference.folder / "model.safetensors"):
            for _ in range(2):
                assert "model.safetensors" in (bed.wake().error or "")
                assert bed.sleeper.state == SleepState(("weights", "kv_cache"), taking=False, level=2)
        assert bed.wake() == Slept(2)
        ask_again(core, reference, "after")


def test_requests_stand_against_it_unless_they_may_end(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        bed = Bed(core)
        ask_again(core, reference, "alone")
        assert core.add(greedy("first", reference.prompt)) is None
        bed.deltas += core.step()
        refused = bed.sleep(1).refused or ""
        assert "1 requests" in refused and "mode=wait" in refused and "mode=abort" in refused
        assert bed.sleeper.state == SleepState(), "nothing was changed"
        bed.ask(Sleep(7, 1, "wait"))
        assert bed.sleeper.state == SleepState((), taking=False), "from now on no request is taken"
        assert bed.answer() == Slept(7)
        assert_greedy([token for delta in bed.deltas for token in delta.tokens], reference)
        assert bed.deltas[-1].finish_reason == "length"
        assert bed.wake() == Slept(2)
        bed.deltas = []
        endless = SamplingParams(temperature=0.0, ignore_eos=True)
        for name in ("runs", "waits"):
            assert core.add(EngineRequest(id=name, prompt_ids=reference.prompt, params=endless)) is None
        bed.deltas += core.step()
        assert bed.sleep(2, "abort") == Slept(1)
        assert {delta.id: delta.finish_reason for delta in bed.deltas if delta.finish_reason} == {"runs": "abort", "waits": "abort"}
        assert not core.has_work and bed.wake() == Slept(2)
        ask_again(core, reference, "after")


def test_orders_are_carried_out_one_after_another(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        bed = Bed(core)
        for number, by in ((1, b"a"), (3, b"b")):
            bed.ask(Sleep(number, 2, "refuse"), by)
            bed.ask(WakeUp(number + 1, ALL), by)
        answers = []
        while bed.sleeper.busy:
            answers += bed.sleeper.step()
            time.sleep(0.001)
        assert answers == [(b"a", Slept(1)), (b"a", Slept(2)), (b"b", Slept(3)), (b"b", Slept(4))]
        ask_again(core, reference, "after")


def test_the_tiers_keep_what_they_have(reference: Reference, tmp_path: Path) -> None:
    tiers = TiersConfig(cpu_bytes=1 << 20, fs_path=str(tmp_path), fs_bytes=1 << 20)
    with core_for(reference.folder, tiers=tiers, max_model_len=256) as core:
        bed, long = Bed(core), [*reference.prompt, *reference.tokens]
        before = run(core, [greedy("before", long)])["before"]
        for level in (1, 2):
            assert bed.sleep(level) == Slept(1) and bed.wake() == Slept(2)
            hits = core.scheduler.stats.external_hits_total
            assert run(core, [greedy(f"after {level}", long)])[f"after {level}"] == before
            assert core.scheduler.stats.external_hits_total == hits + 64
        assert core.scheduler.stats.prefix_hits_total == 0


def test_a_folder_that_hangs_keeps_nobody_awake(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = TiersConfig(cpu_bytes=1 << 20, fs_path=str(tmp_path), fs_bytes=1 << 20)
    goes_on = threading.Event()
    with core_for(reference.folder, tiers=tiers, max_model_len=256) as core:
        with monkeypatch.context() as patch:
            patch.setattr(FolderTier, "write", lambda *_: goes_on.wait(60))
            assert core.add(greedy("before", [*reference.prompt, *reference.tokens])) is None
            while core.has_work:
                core.step()
            assert Bed(core).sleep(1) == Slept(1)
            assert core.moving, "it is still being written"
            goes_on.set()
        bed = Bed(core)
        assert bed.wake() == Slept(2)
        ask_again(core, reference, "after")
