"""A pod's process: restarts, termination message, grace, and that nothing outlives it."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from starling_cli.local.launch import Launch
from starling_cli.local.pod import LocalPod, PodRunner, _next_backoff
from starling_cli.local.volumes import LaunchError


async def until(holds, seconds=60.0):
    """Polls files and processes, whose changes cause no event."""

    def wait():
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    await asyncio.to_thread(wait)


def is_gone(pid):
    """Also a zombie is: it has no command line any more."""
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or not command.read_bytes()


class Running:
    """A runner of a shell script in place of an agent."""

    def __init__(self, folder, script, grace=5.0, prepare=None):
        log = folder / "log"
        self.pod = LocalPod(name="g-0", group="g", group_uid="u", revision="r", number=0, folder=folder, scratch=folder, log=log)
        launched = Launch(("/bin/sh", "-c", script), {"NAME": "value"}, grace)
        self.events = asyncio.Event()
        self.runner = PodRunner(self.pod, prepare or (lambda: launched), self.events.set)

    async def until(self, holds):
        async with asyncio.timeout(60):
            while not holds():
                self.events.clear()
                await self.events.wait()

    async def until_log(self, text):
        log = self.pod.log
        await until(lambda: log.exists() and text in log.read_text())


@pytest.fixture
async def run(tmp_path):
    started = []

    def start(script, **more):
        started.append(Running(tmp_path, script, **more))
        return started[-1]

    yield start
    for running in started:
        running.runner.kill()
        await running.runner.wait()


async def test_it_runs_with_its_variables(run):
    running = run("echo $NAME; sleep 60")
    await running.until_log("value")
    await until(lambda: running.pod.pid is not None)


async def test_an_end_is_reported_and_the_first_restart_comes_at_once(run):
    running = run("echo it broke >&2; exit 3")
    await running.until(lambda: running.pod.restarts == 2)
    assert running.pod.waiting.endswith("exit status 3: it broke")
    await running.until(lambda: "CrashLoopBackOff: next try in 10 s" in running.pod.waiting)
    assert running.pod.termination_message.endswith("it broke")


async def test_a_signal_is_named(run):
    running = run("kill -9 $$")
    await running.until(lambda: running.pod.restarts == 1)
    assert "ended by SIGKILL" in running.pod.waiting


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stopping_sends_the_signal_and_does_not_restart(run, number):
    running = run(
        f"trap 'echo drained; exit 0' {number.name[3:]}; (sleep 0.3; echo up; exec sleep 60) & wait"
    )  # it waits, then says so
    await running.until_log("up")
    running.runner.stop(number=number)
    await running.runner.wait()
    assert "drained" in running.pod.log.read_text()
    assert running.pod.deleted_at is not None
    assert running.runner.is_gone


async def test_who_ignores_sigterm_is_killed_after_the_grace(run):
    running = run("trap '' TERM; echo up; while true; do sleep 0.1; done", grace=0.3)
    await running.until_log("up")
    running.runner.stop()
    async with asyncio.timeout(30):
        await running.runner.wait()


async def test_who_is_being_started_is_killed_without_grace_too(run):
    running = run("trap 'sleep 60' TERM; sleep 60")
    while running.runner.pod.launch is None:  # noqa: ASYNC110 - it is no event
        await asyncio.sleep(0)
    running.runner.stop(grace_seconds=0)
    async with asyncio.timeout(30):
        await running.runner.wait()


async def test_no_grace_kills_at_once(run):
    running = run("trap 'sleep 60' TERM; echo up; sleep 60")
    await running.until_log("up")
    running.runner.stop(grace_seconds=0)
    async with asyncio.timeout(30):
        await running.runner.wait()


async def test_what_it_started_goes_with_it(run):
    running = run("sleep 987 & echo child $!; wait")
    await running.until_log("child")
    child = int(running.pod.log.read_text().split()[1])
    running.runner.kill()
    await running.runner.wait()
    await until(lambda: is_gone(child))


async def test_a_pod_that_cannot_be_prepared_waits_and_is_tried_again(run):
    tries = []

    def prepare():
        tries.append(1)
        raise LaunchError("env[X]: Secret 'a' is not in service.yaml")

    running = run("true", prepare=prepare)
    await running.until(lambda: len(tries) == 2)
    assert running.pod.waiting.startswith("CreateContainerConfigError: env[X]")
    assert running.pod.restarts == 0
    running.runner.stop()
    await running.runner.wait()


async def test_a_missing_command_is_reported(run, tmp_path):
    launched = Launch((str(tmp_path / "none"),), {}, 1.0)
    running = run("", prepare=lambda: launched)
    await running.until(lambda: "No such file" in running.pod.waiting)


def test_pauses_grow_to_their_limit_and_begin_again_after_a_calm_time():
    pauses, pause = [], None
    for _ in range(8):
        pause = _next_backoff(pause, ran=1.0)
        pauses.append(pause)
    assert pauses == [0, 10, 20, 40, 80, 160, 300, 300]
    assert _next_backoff(300.0, ran=601.0) == 0


async def test_an_agent_ends_with_its_parent(tmp_path):
    """Also when that is killed and can do nothing any more."""
    script = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from starling_cli.local.launch import Launch
from starling_cli.local.pod import LocalPod, PodRunner

async def main():
    folder = Path({str(tmp_path)!r})
    pod = LocalPod(name="g-0", group="g", group_uid="u", revision="r", number=0, folder=folder, scratch=folder, log=folder / "log")
    launched = Launch(("/bin/sh", "-c", "exec sleep 987"), {{}}, 5.0)
    runner = PodRunner(pod, lambda: launched, lambda: pod.pid and print(pod.pid, flush=True))
    await runner.wait()

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    os.kill(child, 0)
    parent.kill()
    await parent.wait()
    await until(lambda: is_gone(child))
