"""Recorded steps of a host: the same numbers as without, for any mix of sizes; what cannot be recorded runs as it comes."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from starling_engine import LLM, SamplingParams, native
from starling_engine.attention.native_cpu import NativeAttention
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.layer_specs import cache_readers, kv_specs, state_specs
from starling_engine.kv.spec import KVGroup, StateGroup, group_layers, slab_bytes
from starling_engine.layers import linear_packed
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.ledger import RECORDED_TOKENS, recorded_bytes
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native import ops, reference
from starling_engine.native.cache_rows import cached, columns
from starling_engine.parallel.communicator import ALONE
from starling_engine.step import BlockCopy, NewRequest, StepPlan
from starling_engine.token_packing import pack_tokens
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.loader import load_weights
from starling_engine.worker.host.batch import InputBatch, StepInputs
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.host.recorded_steps import RecordedSteps
from starling_engine.worker.host.runner import ModelRunner
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.masks import MaskQueue, StepMasking
from starling_engine.worker.memory_plan import allocate
from starling_engine.worker.stage import StageLink

from tests.engine.checkpoints import VOCAB, WHOLE_BLOCKS, Variant, write_checkpoint
from tests.engine.gguf_files import write_gguf
from tests.engine.models.conftest import ReferenceOf
from tests.engine.models.conftest import reference_of as reference_of
from tests.engine.models.test_decoder import build
from tests.engine.paged_driver import PagedDriver
from tests.engine.real_engine import MODEL

pytestmark = pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")

BLOCK, WIDTH = 8, 6
BF16 = torch.bfloat16


def state_of(config: ModelConfig, groups: Sequence[KVGroup]) -> StateGroup | None:
    """Returns the layers with a recurrent state, and the blocks of one."""
    specs = state_specs(config)
    if not specs:
        return None
    spec = next(iter(specs.values()))
    return StateGroup(spec, tuple(specs), spec.columns(len(specs), slab_bytes(groups, spec, len(specs)))[-1], BLOCK)


class Steps:
    """A model with two caches of equal numbers: one for recorded steps, one for those that run as they come."""

    def __init__(self, model: Decoder, cache: torch.dtype = BF16) -> None:
        config = model.config
        self.model = model
        self._groups = group_layers(kv_specs(config, BLOCK, str(cache).removeprefix("torch.")), readers=cache_readers(config))
        self._state = state_of(config, self._groups)
        state_blocks = 0 if self._state is None else self._state.num_blocks
        self._first = (RECORDED_TOKENS + 1) * WIDTH + 1
        """The first block of states, which are behind those of keys and values."""
        self._blocks, self._cache = self._first + (RECORDED_TOKENS + 1) * state_blocks, cache
        self.ticks = 0
        layers = range(config.num_layers)
        kv, other = (allocate(self._groups, self._blocks, cache, torch.device("cpu"), self._state, layers) for _ in range(2))
        for layer in kv.layers:
            if isinstance(layer, torch.Tensor):
                shape = (*layer.shape[:-1], columns(layer))
                layer.copy_(cached(torch.randn(*shape), cache, 1.0).to(cache))
        kv.storage[self._first :].view(torch.float32).normal_()
        other.storage.copy_(kv.storage)
        self._storages, self._before = (kv.storage, other.storage), kv.storage.clone()
        self.eager, self.pages = (KVPages(each, self._groups, self._tick, self._state, layers) for each in (kv, other))
        widths = [WIDTH for _ in self._groups] + ([state_blocks] if state_blocks else [])
        self.recorded = RecordedSteps(self.model, self.pages, widths, recorded_bytes(config, 2))

    def _tick(self) -> None:
        self.ticks += 1

    def inputs(self, counts: list[int]) -> StepInputs:
        """Makes a step of so many tokens a row, behind contexts of random lengths."""
        rows, tokens = len(counts), sum(counts)
        lengths = torch.randint(max(counts), BLOCK * WIDTH, (rows,))
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths.tolist(), counts, strict=True)])
        start = torch.tensor([0, *counts]).cumsum(0).int()
        row = torch.repeat_interleave(torch.arange(rows), torch.tensor(counts))
        metadata = []
        for _ in self._groups:
            table = torch.randperm((RECORDED_TOKENS + 1) * WIDTH)[: rows * WIDTH].view(rows, WIDTH).int() + 1
            slots = table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK
            width = -(-int(lengths.max()) // BLOCK)
            metadata.append(AttentionMetadata(positions, slots, start, lengths.int(), table[:, :width].contiguous(), max(counts)))
        if self._state is not None:
            tables = torch.arange(self._first, self._blocks).view(-1, self._state.num_blocks)
            table = tables[torch.randperm(RECORDED_TOKENS + 1)[:rows]]
            metadata.append(AttentionMetadata(positions, positions, start, lengths.int(), table.int(), max(counts)))
        return StepInputs(torch.randint(0, VOCAB, (tokens,)), metadata)

    @property
    def changed(self) -> bool:
        """Says whether steps that were recorded, or could have been, have written to their cache."""
        return not torch.equal(self._storages[1], self._before)

    def compare(self, counts: list[int]) -> bool:
        """Runs a step both ways; returns whether it was recorded, or could have been."""
        inputs = self.inputs(counts)
        found = self.recorded.run(inputs)
        hidden = self.model.forward(inputs.ids, self.eager.context(inputs.metadata, None))
        if found is not None:
            assert torch.equal(found[0], hidden) and torch.equal(found[1], self.model.logits(hidden))
            assert torch.equal(*self._storages)
        return found is not None

    def runner(self, slots: int) -> ModelRunner:
        """Makes a runner whose steps are recorded, if they can be."""
        batch = InputBatch(self._groups, slots, BLOCK * WIDTH, BLOCK, state=self._state)
        link = StageLink(ALONE, self.model.config.hidden_size, BF16, torch.device("cpu"))
        sampler, masking = Sampler(ops.sample, reference.apply_token_bitmask), StepMasking(MaskQueue())
        size = recorded_bytes(self.model.config, 2)
        return ModelRunner(self.model, self.pages, batch, sampler, link, masking, recorded_bytes=size)

    def block(self, number: int) -> torch.Tensor:
        """Returns the bytes of a block of the first group, in the cache for recorded steps."""
        return self._storages[1][number, : self._groups[0].block_bytes]


class Sampling:
    """It gives a token of each row, which takes memory."""

    def before(self, rows: int) -> None:
        """Leaves the inputs as they are."""

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(logits), dtype=torch.int64)


KINDS = [[1], [1] * 3, [4], [2, 1, 3], [4, 1, 1], [12, 1], [1, 12], [1] * 5]
"""Tokens of each row: decodes, drafts, and rows so long that they are no decodes. Some have one size, and share a recording."""


MODELS = [
    *(("qwen3", BF16), ("qwen3", torch.int8), ("qwen3", torch.uint8), ("ministral-mixed", BF16), ("llama-biases", BF16)),
    *(("qwen3-moe", BF16), ("mixtral", BF16), ("gpt-oss", BF16)),
    *(("qwen3.5", BF16), ("lfm2", BF16), ("mamba2", BF16)),
]


@pytest.mark.parametrize(("name", "cache"), MODELS)
def test_numbers_are_those_of_the_same_steps_without(
    name: str, cache: torch.dtype, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size comes several times, and all share the memory that is planned. So do states end up the same."""
    monkeypatch.setattr(linear_packed, "_in_bfloat16", lambda _: True)  # as they are in checkpoints of bfloat16
    with torch.inference_mode():
        steps = Steps(build(reference_of(name), NativeAttention(), BF16), cache)
        for counts in (*KINDS, *reversed(KINDS), *([1] * rows for rows in range(1, RECORDED_TOKENS + 1)), *KINDS):
            assert steps.compare(counts), counts
        before = steps.ticks
        steps.recorded.run(steps.inputs([1]))
        assert steps.ticks == before + 1, "a replay is progress"
        assert steps.recorded.run(steps.inputs([1] * RECORDED_TOKENS)) is not None
        largest = steps.recorded.replay(RECORDED_TOKENS, RECORDED_TOKENS, Sampling())
        assert largest is not None and largest.embeds and largest.sampled is not None, "there is room for all of it"
        assert not steps.compare([1] * (RECORDED_TOKENS + 1)) and not steps.compare([RECORDED_TOKENS, 1])


def test_a_step_that_cannot_be_recorded_copies_its_blocks_once(reference_of: ReferenceOf) -> None:
    """The second copy overwrites what the first one reads."""
    with torch.inference_mode():
        steps = Steps(build(reference_of("qwen3"), TorchPagedAttention(), BF16))
        runner = steps.runner(1)
        before = [steps.block(number).clone() for number in range(6)]
        new = NewRequest(0, pack_tokens([1, 2]), 2, [[1]], 0, SamplingParams(), None)
        copies = [BlockCopy(0, 2, 3), BlockCopy(0, 4, 2)]
        result = runner.launch(StepPlan(0, 0, [0], [1], [1], [True], new=[new], copies=copies)).finish()
    assert runner._recorded is not None and not runner._recorded.possible and result.counts == [1]
    assert torch.equal(steps.block(2), before[4]) and torch.equal(steps.block(3), before[2])


FAMILIES_BY_PARTS = [
    *("gpt2", "opt", "gpt-neox", "starcoder2", "phi", "cohere", "nemotron", "stablelm", "stablelm-parallel", "arcee"),
    *("gemma2", "gemma4-moe", "gemma4-inputs", "granite-moe-shared", "olmo2", "minimax-m2", "qwen2-moe", "ministral3"),
    *("apertus", "hunyuan", "hunyuan-moe", "lfm3", "falcon-h1", "nemotron-h-experts", "mamba", "falcon-mamba", "jamba"),
]
"""Together they have each norm, activation, gate, sum, multiplier and cap that comes from a kernel."""


@pytest.mark.parametrize("name", FAMILIES_BY_PARTS)
def test_steps_of_a_family_are_recorded(name: str, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_packed, "_in_bfloat16", lambda _: True)  # as they are in checkpoints of bfloat16
    with torch.inference_mode():
        steps = Steps(build(reference_of(name), NativeAttention(), BF16))
        assert all(steps.compare(counts) for counts in ([1], [2, 1, 3], [1], [1] * RECORDED_TOKENS))


OF_KERNELS = ["gemma4-inputs", "apertus", "hunyuan", "lfm3", "falcon-h1", "nemotron-h-experts", "falcon-mamba"]


@pytest.mark.parametrize("name", OF_KERNELS)
def test_decodes_are_as_near_to_transformers_as_bfloat16_allows(name: str, reference_of: ReferenceOf) -> None:
    """A token at a time, of models whose parts were torch's before there were kernels for them."""
    reference = reference_of(name, BF16)
    driver = PagedDriver(build(reference, NativeAttention(), BF16), BF16, block_size=BLOCK)
    driver.run([(0, reference.prompt)])
    logits = torch.cat([driver.run([(0, [token])])[0] for token in reference.tokens])
    expected = reference.logits[len(reference.prompt) :]
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 0.05


@pytest.mark.parametrize("variant", [None, WHOLE_BLOCKS], ids=["the repository's model", "experts"])
def test_matrices_of_several_forms_are_recorded(variant: Variant | None, tmp_path: Path) -> None:
    """Values and down have more bits, as in llama.cpp's mixes, so that queries, keys and values are no single matrix."""
    path, folder = tmp_path / "mixed.gguf", Path(MODEL) if variant is None else tmp_path
    if variant is not None:
        write_checkpoint(tmp_path, variant)
    write_gguf(path, folder, lambda name: "Q8_0" if "attn_v" in name or "ffn_down" in name else "Q4_0")
    with torch.inference_mode():
        cpu, stored = torch.device("cpu"), stored_formats(path)
        linear, experts = select_linear_method(BF16, cpu, None, stored), select_experts_method(BF16, cpu, None, stored)
        config = load_model_config(path)
        model = Decoder(config, BF16, cpu, linear, NativeAttention(), experts_method_selector=experts)
        load_weights(model, path)
        steps = Steps(model)
        assert all(steps.compare([1] * rows) for rows in (1, 3, 3, 1))


def test_what_computes_in_torch_runs_as_it_comes(reference_of: ReferenceOf, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with torch.inference_mode():
        steps = Steps(build(reference_of("qwen3"), NativeAttention(), torch.float32), torch.float32)
        assert not steps.compare([1]) and not steps.compare([1, 1])
    assert [record.message.split(":")[0] for record in caplog.records].count("steps of few tokens are not recorded") == 1


def test_what_is_found_out_late_has_not_changed_a_state(reference_of: ReferenceOf) -> None:
    """Kimi Linear's first layer takes inputs into its state before latents are in torch; the step runs once more, as it comes."""
    with torch.inference_mode():
        steps = Steps(build(reference_of("kimi-linear"), NativeAttention(), BF16))
        assert not steps.compare([1, 1])
        assert not steps.changed


def test_an_engine_answers_the_same_with_them_and_without() -> None:
    """Prompts, decodes with drafts, and what needs more than logits, many at once; also after weights have moved."""
    prompts = [{"prompt_token_ids": [(3 + 7 * i * (n + 1)) % 500 for i in range(5 + n)]} for n in range(20)]
    params = [
        SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=5 + n, logprobs=2 if n % 3 == 0 else None, ignore_eos=True)
        for n in range(20)
    ]
    answers = []
    for eager in (False, True):
        settings = {"dtype": "bfloat16", "spec_method": "ngram", "spec_tokens": 3, "kv_cache_memory_bytes": 32 << 20}
        with LLM(MODEL, enforce_eager=eager, **settings) as llm:
            outputs = [llm.generate(prompts[:n], params[:n], use_tqdm=False) for n in (1, 4, 20)]
            llm.sleep(level=2)
            llm.wake_up()
            outputs.append(llm.generate(prompts[:1], params[:1], use_tqdm=False))
        answers.append([each.outputs[0].token_ids for some in outputs for each in some])
    assert answers[0] == answers[1]
    assert all(len(each) for each in answers[0]) and any(a != b for a, b in pairwise(answers[0]))
