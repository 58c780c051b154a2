"""A core that sleeps and wakes answers as it did before, and its memory was free meanwhile."""

import gc
import threading
import time
from pathlib import Path

import pytest
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.core.messages import Answer, FrontendCall
from starling_engine.delta import Delta
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.ipc.collection import collect_everything
from starling_engine.kv_offload.secondary.folder.tier import FolderTier
from starling_engine.models.decoder import Decoder
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.sleep import Mode, Sleep, SleepCommand, SleepState, Slept, Tag, WakeUp
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, Reference, make_reference
from tests.engine.cores import assert_greedy, core_for, greedy, run

ALL: list[Tag] = ["weights", "kv_cache"]
CALLER = FrontendCall(b"me", 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["qwen3-tied"])


class SleepDriver:
    """Gives a core the commands of a frontend, and steps it by hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.deltas: list[Delta] = []

    @property
    def state(self) -> SleepState:
        return self.core.sleeper.state

    def command(self, command: SleepCommand, caller: FrontendCall = CALLER) -> None:
        self.deltas += self.core.handle(command, caller)

    def answers(self) -> list[Answer]:
        """Steps until a command has an answer."""
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            self.deltas += self.core.step()
            if answers := [message for _, message in self.core.outbox.take() if isinstance(message, Answer)]:
                return answers
            time.sleep(0.001)

    def answer(self) -> Slept:
        (answer,) = self.answers()
        assert isinstance(answer.reply, Slept)
        return answer.reply

    def sleep(self, level: int, mode: Mode = "refuse") -> Slept:
        self.command(Sleep(level, mode))
        return self.answer()

    def wake(self, tags: list[Tag] = ALL) -> Slept:
        self.command(WakeUp(tags))
        return self.answer()


def ask_again(core: EngineCore, reference: Reference, name: str) -> None:
    results = run(core, [greedy(name, reference.prompt)])
    assert_greedy(results[name][0], reference)


@pytest.mark.parametrize("variant", ["llama3.1", "qwen3-moe", "deepseek-v3"])
def test_every_kind_of_model_is_made_anew(variant: str, tmp_path: Path) -> None:
    """Untied matrices, experts and latents."""
    reference = make_reference(tmp_path, VARIANTS[variant])
    with core_for(reference.folder) as core:
        driver = SleepDriver(core)
        ask_again(core, reference, "before")
        assert driver.sleep(2) == Slept() and driver.wake() == Slept()
        ask_again(core, reference, "after")


def test_what_the_tags_name_wakes_by_itself(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        driver = SleepDriver(core)
        ask_again(core, reference, "before")
        assert driver.sleep(2) == Slept() == driver.sleep(2), "to sleep twice is to sleep"
        assert driver.state == SleepState(("weights", "kv_cache"), taking=False, level=2)
        assert driver.wake(["weights"]) == Slept()
        assert driver.state == SleepState(("kv_cache",), taking=False, level=2)
        assert driver.wake(["weights"]) == Slept() and driver.wake(["kv_cache"]) == Slept()
        assert driver.state == SleepState()
        assert driver.wake() == Slept(), "to wake twice is to wake"
        ask_again(core, reference, "after")
        assert core.scheduler.stats.prefix_hits_total == 0, "the cache was dropped"
        levels = []
        for level in (1, 2, 1):
            assert driver.sleep(level) == Slept()
            levels.append(driver.state.level)
        assert levels == [1, 2, 2], "deeper, and never lighter"
        assert driver.wake(["kv_cache"]) == driver.wake(["weights"]) == Slept()
        ask_again(core, reference, "again")


def test_a_model_that_is_made_again_is_frozen_as_the_first_one_was(reference: Reference) -> None:
    """A collection in service would look through it, for ever after the first sleep."""
    with core_for(reference.folder) as core:
        gc.freeze()  # as when a process is ready
        driver = SleepDriver(core)
        assert driver.sleep(2) == driver.wake() == Slept()
        assert not any(type(thing) is Decoder for thing in gc.get_objects()), "what is frozen is not listed"


def models_here() -> int:
    """Counts models. What is frozen is not listed, so all is thawed for it; and frozen then, as by a core that gets ready."""
    gc.unfreeze()
    count = sum(type(thing) is Decoder for thing in gc.get_objects())
    gc.freeze()
    return count


@pytest.mark.usefixtures("whole_collections")
def test_a_sleeping_core_has_no_model(reference: Reference) -> None:
    """Nothing of it: what has no storage that can be given back, as oneDNN's weights, goes with it."""
    collect_everything()
    others = models_here()
    with core_for(reference.folder) as core:
        assert isinstance(core.executor, ThreadExecutor), "its worker is in this process"
        driver = SleepDriver(core)
        assert models_here() == others + 1
        assert driver.sleep(2) == Slept()
        assert models_here() == others
        results = run(core, [greedy("asleep", reference.prompt)])
        assert "no step is planned for a core that sleeps" in (results["asleep"][1] or "")


@pytest.mark.parametrize("layout", [ParallelLayout(1, 1, 2), ParallelLayout(1, 2, 1)], ids=["tensor", "pipeline"])
def test_all_ranks_sleep(layout: ParallelLayout, reference: Reference) -> None:
    """Each rank that cannot wake is named, while the others wait for it."""
    with core_for(reference.folder, layout=layout) as core:
        driver = SleepDriver(core)
        assert driver.sleep(1) == Slept() and driver.wake() == Slept()
        ask_again(core, reference, "first")
        assert driver.sleep(2) == Slept()
        with absent(reference.folder / "model.safetensors"):
            error = driver.wake().error or ""
            assert "rank 0: WeightError" in error and "rank 1: WeightError" in error
        assert driver.wake() == Slept()
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
        driver = SleepDriver(core)
        assert driver.sleep(2) == Slept()
        with absent(reference.folder / "model.safetensors"):
            for _ in range(2):
                assert "model.safetensors" in (driver.wake().error or "")
                assert driver.state == SleepState(("weights", "kv_cache"), taking=False, level=2)
        assert driver.wake() == Slept()
        ask_again(core, reference, "after")


def test_requests_stand_against_it_unless_they_may_end(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        driver = SleepDriver(core)
        ask_again(core, reference, "alone")
        assert core.add(greedy("first", reference.prompt)) is None
        driver.deltas += core.step()
        refused = driver.sleep(1).refused or ""
        assert "1 requests" in refused and "mode=wait" in refused and "mode=abort" in refused
        assert driver.state == SleepState(), "nothing was changed"
        driver.command(Sleep(1, "wait"))
        assert driver.state == SleepState((), taking=False), "from now on no request is taken"
        assert driver.answer() == Slept()
        assert_greedy([token for delta in driver.deltas for token in delta.tokens], reference)
        assert driver.deltas[-1].finish_reason == "length"
        assert driver.wake() == Slept()
        driver.deltas = []
        endless = SamplingParams(temperature=0.0, ignore_eos=True)
        for name in ("runs", "waits"):
            assert core.add(EngineRequest(id=name, prompt_ids=reference.prompt, params=endless)) is None
        driver.deltas += core.step()
        assert driver.sleep(2, "abort") == Slept()
        reasons = {delta.id: delta.finish_reason for delta in driver.deltas if delta.finish_reason}
        assert reasons == {"runs": "abort", "waits": "abort"}
        assert not core.has_work and driver.wake() == Slept()
        ask_again(core, reference, "after")


def test_commands_are_carried_out_one_after_another(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        driver = SleepDriver(core)
        for number, frontend in ((1, b"a"), (3, b"b")):
            driver.command(Sleep(2, "refuse"), FrontendCall(frontend, number))
            driver.command(WakeUp(ALL), FrontendCall(frontend, number + 1))
        sent: list[tuple[bytes | None, object]] = []
        while core.sleeper.busy:
            driver.deltas += core.step()
            sent += core.outbox.take()
            time.sleep(0.001)
        answers = [each for each in sent if isinstance(each[1], Answer)]
        frontends = [(b"a", 1), (b"a", 2), (b"b", 3), (b"b", 4)]
        assert answers == [(frontend, Answer(number, Slept())) for frontend, number in frontends]
        ask_again(core, reference, "after")


def test_all_know_of_a_sleep_before_its_caller_has_the_answer(reference: Reference) -> None:
    with core_for(reference.folder) as core:
        core.handle(Sleep(1, "refuse"), FrontendCall(b"a", 5))
        sent: list[tuple[bytes | None, object]] = []
        while core.sleeper.busy:
            core.step()
            sent += core.outbox.take()
            time.sleep(0.001)
        falling, asleep = SleepState((), taking=False), SleepState(("weights", "kv_cache"), taking=False, level=1)
        assert sent == [(None, falling), (None, asleep), (b"a", Answer(5, Slept()))]


def test_the_tiers_keep_what_they_have(reference: Reference, tmp_path: Path) -> None:
    tiers = TiersConfig(cpu_bytes=1 << 20, fs_path=str(tmp_path), fs_bytes=1 << 20)
    with core_for(reference.folder, tiers=tiers, max_model_len=256) as core:
        driver, long = SleepDriver(core), [*reference.prompt, *reference.tokens]
        before = run(core, [greedy("before", long)])["before"]
        for level in (1, 2):
            assert driver.sleep(level) == Slept() and driver.wake() == Slept()
            hits = core.scheduler.stats.external_hits_total
            assert run(core, [greedy(f"after {level}", long)])[f"after {level}"] == before
            assert core.scheduler.stats.external_hits_total == hits + 64
        assert core.scheduler.stats.prefix_hits_total == 0


def test_a_folder_that_hangs_does_not_prevent_sleep(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = TiersConfig(cpu_bytes=1 << 20, fs_path=str(tmp_path), fs_bytes=1 << 20)
    goes_on = threading.Event()
    with core_for(reference.folder, tiers=tiers, max_model_len=256) as core:
        with monkeypatch.context() as patch:
            patch.setattr(FolderTier, "write", lambda *_: goes_on.wait(60))
            assert core.add(greedy("before", [*reference.prompt, *reference.tokens])) is None
            while core.has_work:
                core.step()
            assert SleepDriver(core).sleep(1) == Slept()
            assert core.has_pending_transfers, "it is still being written"
            goes_on.set()
        driver = SleepDriver(core)
        assert driver.wake() == Slept()
        ask_again(core, reference, "after")
