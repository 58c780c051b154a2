"""Tokens on their way: small, and the same at the other end."""

import msgspec
import pytest
from starling_engine.core.messages import Add, FromFrontend
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.token_packing import pack_tokens, unpack_tokens
from starling_engine.worker.messages import Execute, ToWorker

from tests.engine.toy_engine import ToyEngine

LONG = [number * 7919 % 150_000 for number in range(131_072)]
encode = msgspec.msgpack.encode


def decoded(message: bytes) -> Add:
    add = msgspec.msgpack.decode(message, type=FromFrontend)
    assert isinstance(add, Add)
    return add


@pytest.mark.parametrize("output", [[], [3, 2**31 - 1]])
def test_a_request_takes_four_bytes_a_token(output: list[int]) -> None:
    params = SamplingParams(max_tokens=5)
    request = EngineRequest(id="a", prompt_ids=LONG, output_ids=output, prediction_ids=LONG, params=params, seed=3)
    message = encode(Add.of(request))
    assert len(message) < 8 * len(LONG) + 200
    came = decoded(message).unpacked()
    lists = {"prompt_ids": list(came.prompt_ids), "prediction_ids": list(came.prediction_ids)}
    assert msgspec.structs.replace(came, **lists) == request
    assert request.prompt_ids is LONG, "the sender keeps its own"


def test_half_a_token_is_refused_where_it_comes_in() -> None:
    add = Add.of(EngineRequest(id="a", prompt_ids=[1]))
    with pytest.raises(msgspec.DecodeError, match="whole number of tokens"):
        decoded(encode({"type": "add", "request": add.request, "prompt": b"123", "output": b""}))


def test_so_does_a_plan_for_a_rank_in_a_process() -> None:
    engine = ToyEngine(max_model_len=2**18, num_blocks=20_000, budget=64)
    engine.add("a", LONG)
    plan = None
    while plan is None:
        plan = engine.scheduler.schedule()
    assert len(plan.new[0].token_ids) == 4 * len(LONG)
    message = encode(Execute(plan))
    came = msgspec.msgpack.decode(message, type=ToWorker)
    assert isinstance(came, Execute) and unpack_tokens(came.plan.new[0].token_ids).tolist() == LONG


def test_the_bytes_are_little_endian() -> None:
    assert pack_tokens([1, 256]) == b"\1\0\0\0\0\1\0\0"
