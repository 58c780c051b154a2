"""The least that a step of a model takes, against numbers worked out by hand."""

import pytest
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields

from bench.gpu.roofline import Cost, Limits, StepRow, chosen_experts, serve_seconds, step_cost
from bench.gpu.shapes import SHAPES, TOYS, model_config

LLAMA_8B_MATRICES = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
LLAMA_8B_HEAD = 4096 * 128256


def config(**fields):
    return parse_model_config(Fields({**SHAPES["Llama-3-8B"], **fields}, "config.json"), Fields({}, "none"))


def test_a_token_of_llama_reads_every_matrix_and_its_cache_once():
    cost = step_cost(model_config("Llama-3-8B", toy=False), [StepRow(1, 1024)])
    # 7.5 billion weights; 131,072 bytes of keys and values for each of 1,024 tokens, and written for one; a row of the embedding.
    assert cost.bytes == 2 * (LLAMA_8B_MATRICES + LLAMA_8B_HEAD) + 131_072 * 1025 + 2 * 4096
    assert cost.flops == 2 * (LLAMA_8B_MATRICES + LLAMA_8B_HEAD) + 32 * 4 * 4096 * 1024


def test_a_cache_of_one_byte_an_element_halves_what_is_read_of_it():
    model = model_config("Llama-3-8B", toy=False)
    wide, narrow = step_cost(model, [StepRow(1, 1024)] * 64), step_cost(model, [StepRow(1, 1024)] * 64, 1)
    assert wide.bytes - narrow.bytes == 64 * 65_536 * 1025 and wide.flops == narrow.flops


def test_a_batch_reads_weights_once_and_each_cache():
    model = model_config("Llama-3-8B", toy=False)
    one, many = step_cost(model, [StepRow(1, 1024)]), step_cost(model, [StepRow(1, 1024)] * 64)
    assert many.bytes - one.bytes == 63 * (131_072 * 1025 + 2 * 4096)
    assert many.flops == 64 * one.flops


def test_a_prompt_by_hand():
    model = config(
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        intermediate_size=3,
        vocab_size=10,
    )
    # Three tokens. qkv is 4 x 8, o 4 x 4, the MLP 3 x 12; in the second layer only the last token goes past attention.
    products = 2 * (3 * 32 + 3 * (16 + 36)) + 2 * (3 * 32 + 1 * (16 + 36)) + 2 * 1 * 40
    attention = 2 * 4 * 4 * (1 + 2 + 3)
    cost = step_cost(model, [StepRow(3, 3)])
    assert cost.flops == products + attention
    # Per layer 84 weights, 4 elements a token written and read again; the head, and three rows of the embedding.
    assert cost.bytes == 2 * (2 * (84 + 2 * 3 * 4) + 40 + 12)


def test_a_later_piece_of_a_prompt_sees_what_came_before():
    assert StepRow(2, 5).seen() == 4 + 5
    assert StepRow(5, 5).seen() == StepRow(2, 5).seen() + StepRow(3, 3).seen()


@pytest.mark.parametrize(
    ("row", "seen", "read"), [((1, 10), 4, 4), ((3, 10), 12, 6), ((3, 3), 6, 3), ((2, 5), 8, 5), ((5, 5), 14, 5)]
)
def test_a_window_of_four(row, seen, read):
    assert (StepRow(*row).seen(4), StepRow(*row).read(4)) == (seen, read)


def test_experts_count_as_far_as_tokens_choose_them():
    assert chosen_experts(128, 8, 1) == pytest.approx(8)
    assert chosen_experts(4, 2, 2) == pytest.approx(3)
    assert chosen_experts(8, 8, 5) == 8
    model = model_config("30B-A3B", toy=False)
    one = step_cost(model, [StepRow(1, 1)])
    attention, router, expert = 2048 * 5120 + 4096 * 2048, 2048 * 128, 3 * 2048 * 768
    active = 48 * (attention + router + 8 * expert) + 2048 * 151936
    assert one.flops == 2 * active + 48 * 4 * 4096
    assert 3.0e9 < active < 3.1e9, "3 billion are active"
    all_read = step_cost(model, [StepRow(1, 1)] * 2000)
    assert all_read.bytes == pytest.approx(2 * (48 * (attention + router + 128 * expert) + 2048 * 151936), rel=0.02)


def test_the_slower_of_the_two_limits_counts():
    limits = Limits(bandwidth=100.0, rate=1000.0)
    assert limits.seconds(Cost(bytes=50, flops=100)) == 0.5
    assert limits.seconds(Cost(bytes=50, flops=2000)) == 2.0


def test_serving_is_prompts_and_then_steps():
    model, limits = model_config("Qwen3-0.6B", toy=True), Limits(1e6, 1e9)
    prompt = limits.seconds(step_cost(model, [StepRow(5, 5)]))
    steps = [limits.seconds(step_cost(model, [StepRow(1, context)] * 3)) for context in (6, 7)]
    assert serve_seconds(model, limits, 3, 5, 3) == pytest.approx(3 * prompt + sum(steps))


def test_toys_are_of_the_same_kinds():
    for name, shape in SHAPES.items():
        assert TOYS[name].keys() == shape.keys()
        assert TOYS[name]["architectures"] == shape["architectures"]
