"""Several engine cores behind one frontend: who takes a request, and what the death of one costs."""

import asyncio
import itertools
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.errors import ConfigError, EngineDead
from starling_engine.frontend.load_balancer import FIRST_PREFIX, LOAD_TOLERANCE, MAX_PREFIXES, LoadBalancer
from starling_engine.topology.layout import NodePlacement, ParallelLayout

from tests.engine.checkpoints import FAMILIES, write_servable
from tests.engine.real_engine import engine_args, running, wait_until

PROMPT = list(range(300, 300 + 2 * FIRST_PREFIX))
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
numbers = itertools.count()


@dataclass
class Core:
    load: int = 0
    failure: str | None = None
    name: str = field(default_factory=lambda: f"core {next(numbers)}")


def test_the_least_loaded_core_takes_a_new_prompt() -> None:
    assert LoadBalancer().choose([Core(4), Core(1), Core(2)], PROMPT) == 1


def test_a_prompt_goes_where_its_beginning_went() -> None:
    cores, balancer = [Core(), Core()], LoadBalancer()
    first = balancer.choose(cores, PROMPT)
    cores[first].load = LOAD_TOLERANCE
    assert balancer.choose(cores, [*PROMPT, 1, 2, 3]) == first
    assert balancer.choose(cores, [*PROMPT[:FIRST_PREFIX], *range(FIRST_PREFIX)]) == first
    assert balancer.choose(cores, PROMPT, salt="another tenant") != first
    cores[first].load += 1
    assert balancer.choose(cores, PROMPT) != first, "too busy to be worth it"


def test_prompts_without_a_common_beginning_spread() -> None:
    cores, balancer = [Core(), Core()], LoadBalancer()
    for number in range(20):
        chosen = balancer.choose(cores, [number, *PROMPT])
        cores[chosen].load += 1
    assert [core.load for core in cores] == [10, 10]


def test_a_core_that_failed_gets_nothing_while_another_lives() -> None:
    cores, balancer = [Core(), Core(5)], LoadBalancer()
    assert balancer.choose(cores, PROMPT) == 0
    cores[0].failure = "it died"
    assert balancer.choose(cores, PROMPT) == 1


def test_the_first_of_equal_cores_is_taken_and_a_core_that_left_is_forgotten() -> None:
    local, other, balancer = Core(), Core(), LoadBalancer()
    assert balancer.choose([local, other], PROMPT) == 0
    assert balancer.choose([other, local], PROMPT) == 1, "remembered by name, whatever its place"
    assert balancer.choose([other, Core()], PROMPT) == 0


def test_what_is_remembered_is_bounded() -> None:
    balancer, cores = LoadBalancer(), [Core(), Core()]
    for number in range(MAX_PREFIXES + 10):
        balancer.choose(cores, [number] * FIRST_PREFIX)
    assert len(balancer._chosen) == MAX_PREFIXES


def spread(engine: AsyncEngine) -> list[int]:
    """Tokens that each core has generated; their counters come a while later."""
    return [client.stats.generated_tokens_total for client in engine.cores.local.clients]


@pytest.mark.whole
async def test_ranks_of_a_state_alone_keep_what_prompts_share(tmp_path: Path) -> None:
    """Chats that began at once, on both cores, go on where their snapshots are; both are idle then."""
    write_servable(tmp_path, FAMILIES["falcon-mamba"])
    chats = [[*range(300 * chat, 300 * chat + 280)] for chat in range(4)]
    async with running(model=str(tmp_path), data_parallel_size=2) as engine:
        answers = await asyncio.gather(*(engine.complete(chat, SHORT) for chat in chats))
        await wait_until(lambda: sum(spread(engine)) == 16)
        assert spread(engine) == [8, 8]
        for chat, answer in zip(chats, answers, strict=True):
            turn = [*chat, *answer.outputs[0].token_ids, *range(3900, 3920)]
            assert (await engine.complete(turn, SHORT)).num_cached_tokens == 272


async def test_ranks_share_the_work_and_keep_what_prompts_share() -> None:
    async with running(data_parallel_size=2) as engine:
        assert engine.cores.membership.layout == ParallelLayout(data=2)
        assert len(engine.cores.membership.workers) == 2
        await asyncio.gather(*(engine.complete([number, *PROMPT], SHORT) for number in range(300, 308)))
        await wait_until(lambda: min(spread(engine)) >= 4)
        hits = engine.stats.prefix_hits_total
        alone = [(await engine.complete([7, *PROMPT], SHORT)).outputs[0].token_ids for _ in range(3)]
        assert alone[0] == alone[1] == alone[2]
        await wait_until(lambda: engine.stats.prefix_hits_total - hits >= 2 * FIRST_PREFIX)


async def test_the_death_of_one_core_ends_its_requests_alone() -> None:
    async with running(data_parallel_size=2) as engine:
        streams = [engine.stream([number, *PROMPT], LONG) for number in range(300, 302)]
        for stream in streams:
            await anext(stream)
        os.kill(engine.cores.local.processes[1].pid, signal.SIGKILL)

        async def outcome(index: int) -> str:
            try:
                async for _ in streams[index]:
                    pass
            except EngineDead as error:
                return str(error)
            return "whole"

        assert await asyncio.gather(outcome(0), outcome(1)) == ["whole", "engine core 1 died: it was ended by SIGKILL"]
        assert (await engine.complete(PROMPT, SHORT)).outputs[0].token_ids
        with pytest.raises(EngineDead, match="engine core 1 died"):
            engine.check_health()


async def test_frontends_of_two_nodes_use_each_others_cores() -> None:
    """Each node starts one of the group's two cores; the second node's leaves while it works, and later dies."""
    args = engine_args(data_parallel_size=2)
    nodes = [NodePlacement("127.0.0.1", (rank,), ranks=1) for rank in range(2)]
    first, second = [await AsyncEngine.start(args, node=node) for node in nodes]
    try:
        (address,) = second.cores.advertised_addresses
        await first.cores.add("engine core 1", address)
        assert first.cores.membership.layout == ParallelLayout(data=2) and first.cores.remote == {"engine core 1": None}
        streams = [first.stream([number, *PROMPT], LONG) for number in range(300, 302)]
        for stream in streams:
            await anext(stream)
        first.cores.remove("engine core 1")
        assert first.cores.membership.layout == ParallelLayout(data=1)
        assert [[item async for item in stream][-1].finished for stream in streams] == [True, True], "what is there goes on"
        await first.cores.add("engine core 1", address)
        await wait_until(lambda: min(engine.stats.generated_tokens_total for engine in (first, second)) >= 300)
        os.kill(second.cores.local.processes[0].pid, signal.SIGKILL)
        await wait_until(lambda: first.cores.remote["engine core 1"] is not None)
        assert "not answered" in (first.cores.remote["engine core 1"] or "")
        first.check_health()
        assert first.cores.membership.layout == ParallelLayout(data=1)
        assert (await first.complete(PROMPT, SHORT)).outputs[0].token_ids
        with pytest.raises(EngineDead, match="no engine core answers"):
            await first.cores.add("engine core 1 again", address)
    finally:
        await first.shutdown()
        await second.shutdown()


async def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host: cannot listen on 192\.0\.2\.1"):
        await AsyncEngine.start(engine_args(), node=NodePlacement("192.0.2.1", (0,), ranks=1))
