"""Each family against transformers: in chunks, and split over ranks, the same logits and the same greedy tokens."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.attention.base import AttentionBackend
from starling_engine.attention.compressed import CompressedAttention
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.attention.native_cpu import NativeAttention
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.errors import WeightError
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.placement import spread
from starling_engine.topology.shard import ALL, Shard
from starling_engine.weights.loader import load_weights

from tests.engine.checkpoints import FAMILIES, PROMPT, Reference
from tests.engine.models.conftest import FAMILY_STEPS, ReferenceOf
from tests.engine.models.test_decoder import TOLERANCE, assert_same_greedy
from tests.engine.paged_driver import PagedDriver
from tests.engine.parallel.threads import Join, on_ranks, on_threads

CPU, FP32 = torch.device("cpu"), torch.float32
LENGTHS = {"phi3-short": 512}
"""Longest sequences of engines, where it matters."""
CHUNKS = [7, 1, 20, 12]
WITH_EXPERTS = (
    "qwen2-moe",
    "qwen2-moe-some-plain",
    "granite-moe",
    "granite-moe-shared",
    "glm4-moe",
    "hunyuan-v3",
    "deepseek-v3.2",
    "deepseek-v4",
    "glm-5.2",
    "ernie-moe",
    "minimax-m2",
    "hunyuan-moe",
    "gemma4-moe",
    "llama4-every-second",
    "qwen3-next-some-plain",
    "qwen3.5-moe",
    "lfm2-moe",
    "kimi-linear",
    "granite-hybrid-experts",
    "nemotron-h-experts",
    "jamba",
    "olmoe",
    "afmoe",
    "dots1",
    "exaone-moe",
    "flex-olmo",
    "glm4-moe-lite",
    "mellum",
    "mistral4",
    "solar-open",
    "granite-moe-swa",
)


def driver_of(
    name: str,
    reference: Reference,
    backend: AttentionBackend,
    ranks: Communicator = ALONE,
    stages: int = 1,
    dtype: torch.dtype = FP32,
    experts: ExpertRanks | None = None,
) -> PagedDriver:
    config, methods = load_model_config(reference.folder), select_linear_method(dtype, CPU)
    shards = [ALL] if stages == 1 else [Shard(at, stages) for at in range(stages)]
    attention = CompressedAttention() if config.compressed else TorchMla() if config.mla else backend
    models = [Decoder(config, dtype, CPU, methods, attention, LENGTHS.get(name), None, ranks, shard, experts) for shard in shards]
    for model in models:
        load_weights(model, reference.folder)
    return PagedDriver(models[0], dtype, block_size=8, sequences=2, tensor=ranks.shard, later=models[1:])


def compare(driver: PagedDriver, reference: Reference) -> None:
    start = 0
    for size in CHUNKS:
        (logits,) = driver.run([(0, reference.prompt[start : start + size])])
        torch.testing.assert_close(logits, reference.logits[start : start + size], atol=TOLERANCE, rtol=0)
        start += size
    assert_same_greedy(driver.greedy(int(logits[-1].argmax()), FAMILY_STEPS), reference)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("split", ["alone", "two ranks", "two stages"])
@pytest.mark.matrix
def test_a_family_answers_as_transformers_does(
    name: str, split: str, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages run on torch alone, as on a machine without native kernels."""
    reference = reference_of(name)
    if split == "two ranks" and name == "falcon":
        pytest.skip("its one key-value head lies among its queries")
    if split == "two stages":
        if name == "gemma4-inputs":
            pytest.skip("later stages do not know token ids")
        monkeypatch.setattr(native, "load", lambda: None)
    backend: AttentionBackend = TorchPagedAttention() if native.load() is None else NativeAttention()
    if split == "two ranks":
        on_ranks(2, "gloo", lambda ranks: compare(driver_of(name, reference, backend, ranks), reference))
        return
    driver = driver_of(name, reference, backend, stages=2 if split == "two stages" else 1)
    compare(driver, reference)
    other = [*reference.prompt[:-6], 1, *reference.prompt[-5:]]
    (logits,) = driver.run([(1, other)])
    assert (logits[-1] - reference.logits[PROMPT - 1]).abs().max() > 100 * TOLERANCE, "attention decides what comes"


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.matrix
def test_ranks_with_whole_experts_answer_as_transformers_does(name: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    moe = load_model_config(reference.folder).moe
    assert moe is not None
    placement = spread(moe.num_experts, 2, len(moe.layers))

    def work(index: int, join: Join) -> None:
        ranks = join("tensor", index, 2)
        experts = ExpertRanks(placement.num_experts, placement.slots, ranks, "all_to_all")
        experts.set_placement(join("experts", index, 2), placement)
        compare(driver_of(name, reference, TorchPagedAttention(), ranks, experts=experts), reference)

    on_threads(2, "gloo", work)


@pytest.mark.parametrize("name", ["qwen2-moe", "gptj", "falcon-h1", "gemma4-moe"])
def test_ranks_in_bfloat16_are_as_near_as_one(name: str, reference_of: ReferenceOf) -> None:
    """Parts of sums are wider than the model: of experts beside a gated one, of attention beside an MLP, or beside Mamba-2."""
    reference, bf16 = reference_of(name), torch.bfloat16
    backend: AttentionBackend = TorchPagedAttention() if native.load() is None else NativeAttention()

    def error(ranks: Communicator) -> float:
        (logits,) = driver_of(name, reference, backend, ranks, dtype=bf16).run([(0, reference.prompt)])
        expected = reference.logits[: len(logits)]
        return ((logits - expected).norm(dim=1) / expected.norm(dim=1)).median().item()

    alone, (first, second) = error(ALONE), on_ranks(2, "gloo", error)
    assert first == second == pytest.approx(alone, rel=0.15)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4-moe", "model.layers.3.eh_proj.weight"),
        ("ernie-moe", "model.mtp_linear_proj.0.weight"),
        ("qwen3.5", "mtp.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_parts_for_drafts_are_not_loaded(name: str, tensor: str, reference_of: ReferenceOf, tmp_path: Path) -> None:
    source = reference_of(name).folder
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, tensor: torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    driver_of(name, replace(reference_of(name), folder=tmp_path), TorchPagedAttention())
    save_file({**tensors, "model.layers.9.eh_proj.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"layers\.9\.eh_proj"):
        driver_of(name, replace(reference_of(name), folder=tmp_path), TorchPagedAttention())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "olmo2", "nemotron", "hunyuan", "qwen3.5"])
def test_norms_of_bfloat16_rows_are_rounded_as_the_authors_do(
    name: str, kernels: bool, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights near 0, to which 1 is added, are finer than 1 + weight is in bfloat16."""
    if not kernels:
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("this machine has no native kernels")
    reference = reference_of(name, torch.bfloat16)
    driver = driver_of(name, reference, NativeAttention() if kernels else TorchPagedAttention(), dtype=torch.bfloat16)
    (logits,) = driver.run([(0, reference.prompt + reference.tokens)])
    error = (logits - reference.logits).norm(dim=1) / reference.logits.norm(dim=1)
    print(f"{name}: {error.median():.4f}, agreement {(logits.argmax(-1) == reference.logits.argmax(-1)).double().mean():.3f}")
    assert error.median() < 0.03


@pytest.mark.parametrize("name", ["gemma3", "gemma4-inputs", "olmo3", "cohere2", "phi", "qwen3-next", "qwen3.5"])
def test_tokens_that_nobody_samples_from_may_be_left_out(name: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(name)
    driver = driver_of(name, reference, TorchPagedAttention())
    found = driver.run_to_last([(0, reference.prompt), (1, reference.prompt[:11])])
    torch.testing.assert_close(found, reference.logits[[PROMPT - 1, 10]], atol=TOLERANCE, rtol=0)
