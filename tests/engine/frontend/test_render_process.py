"""Templates that would never end, or take all memory, cost their own request and nothing else."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest, JobTooLarge, ModelError, PromptTooLong, QueueFull, RequestFailed
from starling_engine.frontend.chat import ChatTemplates
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.render_process import RENDER_LIMITS, ChatRendering, RenderProcess
from starling_engine.frontend.template import LARGEST_PROMPT
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.ipc.limited_child import ProcessLimits

ROW = "{% for a in range(99999) %}"
NESTED = ROW * 3 + "{% endfor %}" * 3
LIMITS = ProcessLimits(seconds=0.2, answer_seconds=60.0, memory_bytes=96 << 20)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def rendering(loaded: dict[str, Tokenizer]) -> Iterator[ChatRendering]:
    rendering = ChatRendering(loaded["byte_level"].renderer, LIMITS, max_waiting=lambda: 8)
    yield rendering
    rendering.close()


@pytest.fixture(scope="module")
def patient(loaded: dict[str, Tokenizer]) -> Iterator[ChatRendering]:
    """Has more processor time than a slow machine needs to fill the memory."""
    rendering = ChatRendering(loaded["byte_level"].renderer, replace(LIMITS, seconds=20.0), max_waiting=lambda: 8)
    yield rendering
    rendering.close()


async def render(rendering: ChatRendering, template: str | None = None, **more: Any) -> ChatPrompt:
    return await rendering.render(template=template, **({"messages": HELLO, "variables": {}} | more))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NESTED, "0.2 s of processor time"),
        (f"{ROW}{{{{ range(99999) | sum }}}}{{% endfor %}}", "0.2 s of processor time"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "refused the messages|processor time"),
        ("{{ 10 ** (10 ** 8) }}", "0.2 s of processor time"),
    ],
)
async def test_the_limit_of_time_is_named(template: str, words: str, rendering: ChatRendering) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await render(rendering, template)
    assert (await render(rendering, "{{ messages[0].content }}!")).text == "Hello!"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10 ** 10 }}", "96 MiB of memory"),
        ("{{ messages[0].content | center(10 ** 10) }}", "96 MiB of memory"),
        ("{{ '%010000000000d' % 1 }}", "96 MiB of memory|refused"),
        ("{% set x = namespace(a='xxxxxxxx') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}", "96 MiB of memory"),
        (f"{ROW}{{{{ 'x' * 999 }}}}{{% endfor %}}", "more than 16777216 characters"),
        ("{% if x %}" * 21 + "{% for a in b %}" * 21 + "{% endfor %}" * 21 + "{% endif %}" * 21, "not a chat template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not a chat template|nested too deeply"),
    ],
)
async def test_limits_of_size_are_named(template: str, words: str, patient: ChatRendering) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await render(patient, template)
    assert (await render(patient, "{{ messages[0].content }}!")).text == "Hello!"


@pytest.mark.parametrize("content", ["x" * LARGEST_PROMPT, [{"type": "text", "text": "x" * 2**23}] * 2], ids=["text", "parts"])
async def test_texts_that_no_prompt_holds_are_not_rendered(content: Any, rendering: ChatRendering) -> None:
    messages = [{"role": "user", "content": content}]
    with pytest.raises(PromptTooLong, match=f"{LARGEST_PROMPT + 5} characters in messages"):
        await render(rendering, "a", messages=[*HELLO, *messages])


async def test_a_call_that_nothing_interrupts_ends_with_the_process(loaded: dict[str, Tokenizer]) -> None:
    limits = replace(LIMITS, answer_seconds=1.0)
    process = RenderProcess(loaded["byte_level"].renderer, limits, max_waiting=lambda: 8)
    with pytest.raises(InvalidRequest, match="did not end within 1 s"):
        await process.render(messages=HELLO, variables={}, template="{{ ([10 ** 100000] * 4000000) | sum }}")
    assert process.pid is None
    process.close()


async def test_others_are_served_meanwhile(rendering: ChatRendering, loaded: dict[str, Tokenizer]) -> None:
    expected = loaded["byte_level"].render_chat(HELLO)
    assert await render(rendering) == expected
    await render(rendering, "{{ messages[0].content }}!")  # both run now
    own = rendering._request_process.pid
    assert own is not None
    os.kill(own, signal.SIGSTOP)  # it is in the middle of the first one, however fast the others are
    endless = [asyncio.create_task(render(rendering, NESTED)) for _ in range(3)]
    assert [await render(rendering) for _ in range(5)] == [expected] * 5
    assert not any(task.done() for task in endless)
    os.kill(own, signal.SIGCONT)
    assert all(isinstance(error, InvalidRequest) for error in await asyncio.gather(*endless, return_exceptions=True))


async def test_a_chat_that_takes_all_memory_is_too_long_and_a_template_that_does_is_not(patient: ChatRendering) -> None:
    messages = [{"role": "user", "content": "a"}] * 600_000
    with pytest.raises(PromptTooLong, match="96 MiB of memory"):
        await render(patient, messages=messages)
    with pytest.raises(JobTooLarge, match="96 MiB of memory"):
        await render(patient, "{{ 'x' * 10 ** 10 }}")
    assert await render(patient)


async def test_memory_left_by_earlier_chats_fails_no_later_one(loaded: dict[str, Tokenizer]) -> None:
    process = RenderProcess(
        loaded["byte_level"].renderer, replace(RENDER_LIMITS, seconds=20.0, memory_bytes=48 << 20), max_waiting=lambda: 8
    )
    pids = set()
    for number in range(40):  # each template is kept
        template = f"{{% set kept = '{number}{'x' * 1_000_000}' %}}{{{{ messages[0].content }}}}"
        assert (await process.render(messages=HELLO, variables={}, template=template)).text == "Hello"
        pids.add(process.pid)
        if len(pids) == 2:
            break
    assert len(pids) == 2
    process.close()


async def test_odd_values_come_through(rendering: ChatRendering, loaded: dict[str, Tokenizer]) -> None:
    messages = [{"role": "user", "content": "<s> \ud800 é", "n": 10**30, "x": float("inf")}]
    ours = loaded["byte_level"].render_chat(messages, template="{{ messages }}", add_generation_prompt=False)
    assert await render(rendering, "{{ messages }}", messages=messages, add_generation_prompt=False) == ours
    assert ours.control == ()


async def test_errors_are_as_without_a_process(rendering: ChatRendering, loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="at least one") as caught:
        await render(rendering, messages=[])
    assert caught.value.param == "messages"
    template = ChatTemplates({"default": "{%"})
    broken = ChatRendering(Tokenizer(loaded["byte_level"].backend, {}, template).renderer, LIMITS, max_waiting=lambda: 8)
    with pytest.raises(ModelError, match="cannot be read"):
        await render(broken)
    broken.close()


async def test_a_process_that_was_killed_is_replaced(loaded: dict[str, Tokenizer]) -> None:
    process = RenderProcess(loaded["byte_level"].renderer, LIMITS, max_waiting=lambda: 8)
    first = await process.render(messages=HELLO, variables={})
    killed = process.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert await process.render(messages=HELLO, variables={}) == first
    assert process.pid != killed
    process.close()


async def test_closing_ends_what_is_under_way(loaded: dict[str, Tokenizer]) -> None:
    process = RenderProcess(
        loaded["byte_level"].renderer, replace(RENDER_LIMITS, seconds=60.0, answer_seconds=60.0), max_waiting=lambda: 8
    )
    await process.render(messages=HELLO, variables={})
    pid = process.pid
    assert pid is not None
    tasks = [asyncio.create_task(process.render(messages=HELLO, template=NESTED, variables={})) for _ in range(2)]
    await asyncio.sleep(0)  # they have been given to the process's thread
    process.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, RequestFailed) for error in results), results
    with contextlib.suppress(ChildProcessError):  # it has been waited for already
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_chats_of_clients_that_left_count_as_waiting(loaded: dict[str, Tokenizer]) -> None:
    process = RenderProcess(loaded["byte_level"].renderer, LIMITS, max_waiting=lambda: 2)
    given = [asyncio.create_task(process.render(messages=HELLO, template=NESTED, variables={}))]
    given += [asyncio.create_task(process.render(messages=HELLO, variables={})) for _ in range(2)]
    await asyncio.sleep(0)  # they have been given to the process's thread
    given[1].cancel()
    with pytest.raises(QueueFull, match="2 chats are waiting") as caught:
        await process.render(messages=HELLO, variables={})
    assert caught.value.retry_after > 0
    await asyncio.gather(*given, return_exceptions=True)
    assert await process.render(messages=HELLO, variables={})
    process.close()
