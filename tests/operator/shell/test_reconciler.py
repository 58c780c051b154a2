"""The queue of services: when each is reconciled."""

import asyncio
import time

from starling_operator.logs import Key
from starling_operator.reconciler import Reconciler

from tests.waiting import until

A, B = ("space", "a"), ("space", "b")


class Recorder:
    """Records what was reconciled, when, and how many at once."""

    def __init__(self, seconds: float = 0.0, answers: dict[Key, list[float | Exception | None]] | None = None) -> None:
        self.done: list[Key] = []
        self.at: list[float] = []
        self.at_once, self.most = 0, 0
        self.same_at_once = False
        self._running: set[Key] = set()
        self._seconds, self._answers = seconds, answers or {}

    async def __call__(self, key: Key) -> float | None:
        self.same_at_once |= key in self._running
        self._running.add(key)
        self.most = max(self.most, len(self._running))
        await asyncio.sleep(self._seconds)
        self._running.discard(key)
        self.done.append(key)
        self.at.append(time.monotonic())
        answer = self._answers[key].pop(0) if self._answers.get(key) else None
        if isinstance(answer, Exception):
            raise answer
        return answer


async def run_until(reconciler: Reconciler, recorder: Recorder, count: int, calm: float = 0.0) -> None:
    """Runs until `count` reconciles are done, and `calm` seconds longer, for others that should not come."""
    task = asyncio.create_task(reconciler.run())

    async def are_done() -> bool:
        return len(recorder.done) >= count

    await until(are_done, f"{count} reconciles")
    await asyncio.sleep(calm)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_wake_ups_that_come_together_are_one() -> None:
    recorder = Recorder()
    reconciler = Reconciler(recorder, 2)
    for _ in range(5):
        reconciler.wake(A)
    await run_until(reconciler, recorder, 1, calm=0.05)
    assert recorder.done == [A]


async def test_a_wake_up_during_a_run_leads_to_another_run_and_never_to_two_at_once() -> None:
    recorder = Recorder(seconds=0.02)

    async def reconcile(key: Key) -> float | None:
        for _ in range(0 if recorder.done else 2):
            reconciler.wake(key)
        return await recorder(key)

    reconciler = Reconciler(reconcile, 4)
    reconciler.wake(A)
    await run_until(reconciler, recorder, 2, calm=0.1)
    assert recorder.done == [A, A] and not recorder.same_at_once


async def test_only_so_many_services_at_once() -> None:
    recorder = Recorder(seconds=0.01)
    reconciler = Reconciler(recorder, 3)
    for number in range(12):
        reconciler.wake(("space", str(number)))
    await run_until(reconciler, recorder, 12)
    assert len(recorder.done) == 12 and recorder.most == 3


async def test_a_failure_is_retried_and_disturbs_no_other() -> None:
    recorder = Recorder(answers={A: [RuntimeError("no"), None]})
    reconciler = Reconciler(recorder, 2)
    reconciler.wake(A)
    reconciler.wake(B)
    await run_until(reconciler, recorder, 3)
    assert recorder.done == [A, B, A]


async def test_a_reconcile_runs_again_after_the_time_that_it_returns() -> None:
    recorder = Recorder(answers={A: [0.1, None]})
    reconciler = Reconciler(recorder, 2)
    reconciler.wake(A)
    await run_until(reconciler, recorder, 2)
    assert recorder.done == [A, A] and recorder.at[1] - recorder.at[0] >= 0.1


async def test_the_earliest_of_several_times_counts_and_a_run_voids_them() -> None:
    recorder = Recorder()
    reconciler = Reconciler(recorder, 2)
    for after in (300, 0.05, 0.2, 300):
        reconciler.wake(A, after)
    await run_until(reconciler, recorder, 1, calm=0.4)
    assert recorder.done == [A]


async def test_a_hanging_reconcile_is_stuck_and_a_busy_queue_is_not() -> None:
    reconciler = Reconciler(Recorder(seconds=10), 1)
    reconciler.wake(A)
    task = asyncio.create_task(reconciler.run())

    async def is_stuck() -> bool:
        return "space/a" in (reconciler.stuck(0.1) or "")

    await until(is_stuck, "the reconcile to be stuck")
    assert reconciler.stuck(60) is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_reconciles_that_await_nothing_let_others_run() -> None:
    """Otherwise a thousand services without work would keep the Lease from being renewed."""
    count = 0

    async def nothing_to_do(_: Key) -> None:
        nonlocal count
        count += 1

    reconciler = Reconciler(nothing_to_do, 1)
    for number in range(1000):
        reconciler.wake(("space", str(number)))
    task = asyncio.create_task(reconciler.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert 0 < count < 1000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
