"""Models whose layers have a state of fixed size, beside those that attend or alone: what a sequence's state is, and whose."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import WeightError
from starling_engine.kernels.state_replay import StateReplay
from starling_engine.kv.layer_specs import state_specs
from starling_engine.ledger import replay_bytes
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder, ForwardContext
from starling_engine.models.gated_delta_net import GatedDeltaNet
from starling_engine.weights.dummy import load_dummy

from tests.engine.checkpoints import PROMPT
from tests.engine.models.conftest import ReferenceOf
from tests.engine.models.test_decoder import TOLERANCE, build
from tests.engine.models.test_families import driver_of
from tests.engine.paged_driver import PagedDriver

HYBRIDS = (
    "qwen3-next",
    "qwen3-next-some-plain",
    "qwen3.5",
    "qwen3.5-moe",
    "olmo-hybrid",
    "lfm2",
    "lfm2-biases",
    "lfm2-moe",
    "kimi-linear",
    "granite-hybrid",
    "granite-hybrid-experts",
    "bamba",
    "nemotron-h",
    "falcon-h1",
    "falcon-h1-normed",
    "jamba",
    "jamba-without-experts",
    "mamba",
    "falcon-mamba",
    "mamba2",
)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.matrix
def test_sequences_in_one_step_have_states_of_their_own(name: str, backend: AttentionBackend, reference_of: ReferenceOf) -> None:
    """Decoding rows beside prefill chunks of other lengths; one sequence begins where another has left its state."""
    reference = reference_of(name)
    whole = reference.prompt + reference.tokens
    driver = driver_of(name, reference, backend)
    plan = [[(0, 33)], [(0, 1), (1, 5)], [(1, 40), (0, 1)], [(1, 1), (0, 7)], [(0, 2), (1, 3)]]
    for restarted in (False, True):
        for step in plan:
            starts = {row: driver.lengths[row] for row, _ in step}
            found = driver.run([(row, whole[starts[row] : starts[row] + count]) for row, count in step])
            for (row, count), logits in zip(step, found, strict=True):
                expected = reference.logits[starts[row] : starts[row] + count]
                torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        if not restarted:
            driver.lengths = [0, 0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_depend_on_the_state(name: str, reference_of: ReferenceOf) -> None:
    """Without its memory, if it has one, or without the last inputs of its convolution, the model gives others."""
    reference = reference_of(name)
    (spec,) = set(state_specs(load_model_config(reference.folder)).values())
    for part in range(len(spec.parts)):
        driver = driver_of(name, reference, TorchPagedAttention())
        driver.run([(0, reference.prompt)])
        driver.clear_state(0, part)
        (logits,) = driver.run([(0, reference.tokens[:1])])
        assert (logits[0] - reference.logits[PROMPT]).abs().max() > 100 * TOLERANCE


def test_a_device_does_not_record_such_a_model(reference_of: ReferenceOf) -> None:
    model = build(reference_of("qwen3.5"), TorchPagedAttention())
    assert model.eager_reason == "layers with a recurrent state are not recorded"


@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear", "granite-hybrid", "jamba", "lfm2"])
def test_bytes_that_are_kept_of_rows_with_drafts(name: str, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, replays = driver_of(name, reference_of(name), TorchPagedAttention()), list[StateReplay]()

    def forward(self: Decoder, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None = None) -> torch.Tensor:
        assert ctx.state is not None
        ctx.state.replay = StateReplay(torch.arange(1, 5), ctx.state)
        replays.append(ctx.state.replay)
        return whole(self, ids, ctx, arrived)

    whole = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    driver.run([(0, [1, 2, 3, 4, 5])])
    config = load_model_config(reference_of(name).folder)
    kept = sum(each.nbytes for _, inputs in replays[0]._calls for each in inputs)
    assert 0 < kept == replay_bytes(config, 4, len(state_specs(config)), 4)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_bytes_of_a_gated_delta_net(name: str, reference_of: ReferenceOf) -> None:
    """Convolution and decays are kept in fp32, all else in the model's dtype."""
    model = build(reference_of(name), TorchPagedAttention(), torch.bfloat16)
    layer = model._layers[0].attention
    assert isinstance(layer, GatedDeltaNet)
    hidden, channels, values, heads = 64, 2 * 32 + 32, 32, 4
    matrices = (channels + values) * hidden + 2 * heads * hidden + hidden * values
    assert sum(slot.held_bytes(2) for slot in layer.weight_slots().values()) == 2 * (matrices + 8) + 4 * (4 * channels + 2 * heads)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3-next", "linear_attn.in_proj_qkvz"),
        ("qwen3.5", "linear_attn.in_proj_qkv"),
        ("qwen3.5", "linear_attn.conv1d"),
        ("lfm2", "conv.in_proj"),
        ("lfm2", "conv.conv"),
        ("jamba", "mamba.in_proj"),
        ("jamba", "mamba.x_proj"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(name: str, tensor: str, reference_of: ReferenceOf, tmp_path: Path) -> None:
    reference = reference_of(name)
    shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = f"model.layers.0.{tensor}.weight"
    save_file({**tensors, whole: tensors[whole][1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{tensor}\.weight \[.*has the wrong shape"):
        driver_of(name, type(reference)(tmp_path, [], [], reference.logits), TorchPagedAttention())


def test_dummy_weights_remember(reference_of: ReferenceOf) -> None:
    """In tests of speed, greedy output should depend on all that is read."""
    model = build(reference_of("qwen3.5"), TorchPagedAttention())
    load_dummy(model, 1)
    driver = PagedDriver(model, torch.float32, block_size=8, sequences=2)
    driver.run([(0, [1, 2, 3, 4]), (1, [1, 2, 3, 4])])
    driver.clear_state(1, 0)
    kept, lost = driver.run([(0, [5]), (1, [5])])
    assert (kept - lost).abs().max() > 0.1 * kept.abs().max()
