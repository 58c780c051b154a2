"""Engine cores as processes: several frontends, several cores, and what happens when one of them dies or hangs."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from starling_engine import LLM, AsyncEngine, PoolingParams, SamplingParams
from starling_engine.core import client, launcher
from starling_engine.core.launcher import AHEAD, CoreStart
from starling_engine.errors import ConfigError, EngineDead, InvalidRequest, ModelError, PromptTooLong, QueueFull
from starling_engine.frontend.resolve import resolve
from starling_engine.ipc.log_lines import parse_line

from tests.engine.real_engine import MODEL, engine_args, idle, running, wait_until

PROMPT = list(range(300, 340))
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def test_a_core_that_cannot_start_says_why_whatever_it_is(tmp_path: Path) -> None:
    """Also what is no error of ours: here the folder of its socket is missing."""
    _, _, config = resolve(engine_args())
    start = CoreStart(f"ipc://{tmp_path}/nowhere/core", None, config, logging.INFO)
    command = [sys.executable, "-m", "starling_engine.core"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as core:
        assert core.stdin is not None and core.stderr is not None
        core.stdin.write(msgspec.json.encode(start) + b"\n")
        core.stdin.flush()  # and left open: its end would end the core
        *_, last = core.stderr
        assert core.wait(20) == 3
    assert "ZMQError: No such file" in parse_line(last).message


def test_a_core_that_is_started_ahead_serves_the_next_engine_and_ends_with_its_parent() -> None:
    launcher.start_ahead()
    (ahead,) = launcher._ahead
    with LLM(MODEL, kv_cache_memory_bytes=16 << 20, max_model_len=512) as llm:
        assert not launcher._ahead and ahead.poll() is None
        assert llm.generate(["The os module"], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert ahead.wait(20) == 0
    unused = subprocess.run([sys.executable, "-m", "starling_engine.core", AHEAD], stdin=subprocess.DEVNULL, timeout=60)
    assert unused.returncode == 0


async def first_delta(engine: AsyncEngine, params: SamplingParams = LONG) -> tuple[object, object]:
    stream = engine.stream(PROMPT, params)
    return stream, await anext(stream)


async def test_several_frontends_share_a_core() -> None:
    async with running() as engine:
        other = await AsyncEngine.attach(engine_args(), engine.cores.addresses)
        short = SamplingParams(temperature=0.0, max_tokens=8)
        one, two = await asyncio.gather(engine.complete(PROMPT, short), other.complete(PROMPT, short))
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        await other.shutdown()
        assert (await engine.complete(PROMPT, short)).outputs[0].token_ids == one.outputs[0].token_ids


async def test_one_frontend_spreads_over_several_cores() -> None:
    async with running() as first, running() as second:
        both = await AsyncEngine.attach(engine_args(), [*first.cores.addresses, *second.cores.addresses])
        await asyncio.gather(*(both.complete(PROMPT, SamplingParams(max_tokens=20)) for _ in range(8)))
        await wait_until(lambda: first.stats.generated_tokens_total > 0 and second.stats.generated_tokens_total > 0)
        await both.shutdown()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_core_is_noticed_within_seconds(how: signal.Signals) -> None:
    async with running() as engine:
        stream, _ = await first_delta(engine)
        pid = engine.cores.processes[0].pid
        os.kill(pid, how)
        began = time.monotonic()
        with pytest.raises(EngineDead):
            async for _ in stream:  # type: ignore[attr-defined]
                pass
        assert time.monotonic() - began < 30
        with pytest.raises(EngineDead):
            engine.check_health()
        with pytest.raises(EngineDead):
            await engine.complete(PROMPT, LONG)
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)


async def test_a_frontend_that_is_gone_leaves_nothing_behind() -> None:
    async with running() as engine:
        other = await AsyncEngine.attach(engine_args(), engine.cores.addresses)
        await first_delta(other)
        for client in other.cores.node_clients:  # as if killed: no abort, no farewell
            await client.close()
        other.cores._context.destroy(linger=0)
        for _ in range(60):
            await asyncio.sleep(0.1)
            if not engine.stats.running:
                break
        assert await idle(engine)


async def test_closing_a_stream_frees_its_blocks() -> None:
    async with running() as engine:
        stream, delta = await first_delta(engine)
        assert delta.outputs[0].token_ids  # type: ignore[attr-defined]
        await stream.aclose()  # type: ignore[attr-defined]
        assert await idle(engine)


PARENT = """
import asyncio
from starling_engine import AsyncEngine
from starling_engine.frontend.resolve import resolve

from tests.engine.real_engine import engine_args

async def main():
    engine = await AsyncEngine.start(engine_args())
    print(engine.cores.processes[0].pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_core_ends_with_its_parent() -> None:
    root = Path(MODEL).parents[1]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=pipe, stderr=null, cwd=root)
    assert parent.stdout is not None
    core = Path("/proc") / (await parent.stdout.readline()).decode().strip()
    assert core.exists()
    parent.kill()
    await parent.communicate()
    await wait_until(lambda: not core.exists())


@pytest.mark.usefixtures("programs")
async def test_ctrl_c_at_the_terminal_leaves_the_core_to_its_frontend() -> None:
    """A terminal signals the whole process group; the core must be out of it, to let the frontend drain."""
    async with running() as engine:
        pid = engine.cores.processes[0].pid
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGTERM)  # as a service manager does that ends a whole control group
        assert (await engine.complete(PROMPT, SamplingParams(max_tokens=2))).finished


async def test_a_frontend_that_was_held_up_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own stall is not the core's silence."""
    async with running() as engine:
        monkeypatch.setattr(client, "PING_SECONDS", 0.05)
        monkeypatch.setattr(client, "SILENCE_SECONDS", 0.5)
        time.sleep(1)  # noqa: ASYNC251 - the event loop is what stalls
        monkeypatch.setattr(client, "SILENCE_SECONDS", 5.0)  # from here on the core may be slow
        await asyncio.sleep(0.3)
        engine.check_health()
        assert (await engine.complete(PROMPT, SamplingParams(max_tokens=2))).finished


async def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on() -> None:
    async with running() as engine:
        first = engine.stream(PROMPT, LONG, request_id="x")
        await anext(first)
        with pytest.raises(InvalidRequest, match="running already"):
            await engine.complete(PROMPT, SamplingParams(max_tokens=2), request_id="x")
        rest = [delta async for delta in first]
        assert rest[-1].finished


async def test_bad_requests_change_nothing() -> None:
    async with running(max_num_waiting=1, max_num_seqs=1) as engine:
        for prompt, params, kind in (
            ([], LONG, InvalidRequest),
            ([10**6], LONG, InvalidRequest),
            (PROMPT * 20, LONG, PromptTooLong),
            (PROMPT, SamplingParams(temperature=float("nan")), InvalidRequest),
            (PROMPT, SamplingParams(n=10**6), InvalidRequest),
            (PROMPT, SamplingParams(logit_bias={10**7: 1.0}), InvalidRequest),
            (PROMPT, SamplingParams(max_tokens=16.0), InvalidRequest),  # type: ignore[arg-type]
            (PROMPT, SamplingParams(logprobs=True), InvalidRequest),
            (PROMPT, SamplingParams(stop_token_ids=["a"]), InvalidRequest),  # type: ignore[list-item]
            (PROMPT, SamplingParams(banned_token_ids=[1] * 10_000), InvalidRequest),
            (PROMPT, SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2), InvalidRequest),
        ):
            with pytest.raises(kind):
                await engine.complete(prompt, params)
        outcomes = await asyncio.gather(*(engine.complete(PROMPT, LONG) for _ in range(4)), return_exceptions=True)
        assert any(isinstance(o, QueueFull) for o in outcomes)
        assert any(not isinstance(o, BaseException) for o in outcomes)
        assert await idle(engine)


async def test_embeddings_of_each_kind() -> None:
    async with running(max_num_batched_tokens=16) as engine:
        vectors = {}
        for kind in ("mean", "last", "cls"):
            params = PoolingParams(pooling=kind, normalize=True)  # type: ignore[arg-type]
            vectors[kind] = (await engine.embed(PROMPT, params)).outputs.embedding
            again = (await engine.embed(PROMPT, params)).outputs.embedding
            assert max(abs(a - b) for a, b in zip(vectors[kind], again, strict=True)) < 1e-5, "cached blocks change nothing"
            assert abs(sum(v * v for v in vectors[kind]) - 1) < 1e-4
        assert vectors["mean"] != vectors["last"] != vectors["cls"]


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        ({"model": "/nowhere/at/all"}, ModelError, "/nowhere"),
        ({"max_model_len": 10**9}, ConfigError, "max_model_len"),
        ({"kv_cache_memory_bytes": 1000}, ConfigError, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1 << 60}, ConfigError, "kv_cache_memory_bytes"),
        ({"attention_backend": "nothing"}, ConfigError, "attention_backend"),
        ({"device": "cuda"}, ConfigError, "cuda"),
    ],
)
async def test_what_cannot_start_says_why(args: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        await AsyncEngine.start(engine_args(**args))
