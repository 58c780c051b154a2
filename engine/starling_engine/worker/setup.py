"""A rank's choices before it has a model: dtype, backends, communicators; and how its model is built and loaded from them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from starling_engine.attention.bidirectional import BidirectionalAttention
from starling_engine.attention.prompt_trial import Offer, PromptTrial, gathered_elements, offer_of, tried_layers
from starling_engine.attention.prompts import TakesLibraries
from starling_engine.attention.select import Backend, select_attention
from starling_engine.config import WorkerConfig
from starling_engine.errors import ConfigError
from starling_engine.expert_parallel.load import LoadWindow
from starling_engine.expert_parallel.ranks import ExpertRanks, spread_over_tensor
from starling_engine.kernels.kv_cache import KVCache
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.layers.experts import ExpertsSelector
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear import MethodSelector
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.native.group_quantized import Format
from starling_engine.parallel.ranks import RankCommunicators
from starling_engine.platforms.base import Platform
from starling_engine.weights.cache_scales import load_kv_scales
from starling_engine.weights.checkpoint import check_counts, stored_formats
from starling_engine.weights.dummy import DummyWeights, load_dummy
from starling_engine.weights.loader import Checkpoint, load_weights
from starling_engine.weights.weight_slot import WeightSource
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.memory_plan import kv_dtype
from starling_engine.worker.runner_factory import RunnerFactory
from starling_engine.worker.stage import StageLink


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Chosen once; a model that is built again, after a sleep, is the same."""

    config: WorkerConfig
    platform: Platform
    dtype: torch.dtype
    model: ModelConfig
    attention: Backend
    linear: MethodSelector
    experts: ExpertsSelector
    ranks: RankCommunicators

    @classmethod
    def choose(cls, config: WorkerConfig, platform: Platform, join: Callable[[torch.device], RankCommunicators]) -> Self:
        """`join` meets the other ranks of the core, last of all. Raises ConfigError, ModelError, or RankLost."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        platform.check_dtype(dtype)
        platform.check_kv_dtype(kv_dtype(config))
        model = load_model_config(Path(config.model_path))
        attention: Backend = BidirectionalAttention()  # which a model of a state alone never calls
        if model.causal and model.attends:
            attention = _causal_attention(config, platform, dtype, model)
        elif not model.causal and config.attention_backend not in ("auto", attention.name):
            raise ConfigError(f"{config.attention_backend!r} is not possible for an encoder; possible: auto", "attention_backend")
        stored = {} if config.load_format == "dummy" else _read_formats(config, model)
        linear = select_linear_method(dtype, platform.device, config.quantization, stored, causal=model.causal)
        experts = select_experts_method(dtype, platform.device, config.quantization, stored)
        return cls(config, platform, dtype, model, attention, linear, experts, join(platform.device))

    def expert_ranks(self) -> ExpertRanks | None:
        """Returns the ranks among which a model's experts are placed; None where all ranks have a part of each."""
        config, tensor, device = self.config, self.ranks.tensor, self.platform.device
        if not config.dp_sync:
            return spread_over_tensor(self.model, tensor, device) if config.expert_parallel else None
        moe, eplb = self.model.moe, config.eplb
        assert moe is not None, "cores share experts alone"
        window = LoadWindow(len(moe.layers), moe.num_experts, eplb.window) if eplb is not None else None
        slots = config.expert_slots + (eplb.spare if eplb is not None else 0)
        return ExpertRanks(moe.num_experts, slots, tensor, device=device, window=window)

    def build_model(self, expert_ranks: ExpertRanks | None) -> Decoder:
        """Builds a model without weights."""
        return Decoder(
            self.model,
            self.dtype,
            self.platform.device,
            self.linear,
            self.attention,
            max_position=self.config.max_model_len,
            experts_method_selector=self.experts,
            tensor=self.ranks.tensor,
            stage=self.ranks.pipeline.shard,
            expert_ranks=expert_ranks,
        )

    def runner_factory(
        self, model: Decoder, groups: list[KVGroup], state: StateGroup | None, tick: Callable[[], None], masking: StepMasking
    ) -> RunnerFactory:
        """Makes the parts of the model's runner that are there before its KV cache."""
        config, shape = self.config, self.model
        batch = InputBatch(groups, config.max_num_seqs, config.max_model_len, config.block_size, shape.eos_token_ids, state)
        link = StageLink(self.ranks.pipeline, shape.stream_size, self.dtype, self.platform.device)
        gathered = gathered_elements(model.attention_weights.values(), config.block_size, config.max_model_len, self._offer)
        return RunnerFactory(config, self.platform, model, groups, state, batch, link, tick, masking, gathered)

    @property
    def _offer(self) -> Offer:
        """Libraries for prompts' attention. A backend that was asked for by name computes all itself."""
        takes = self.config.attention_backend == "auto" and isinstance(self.attention, TakesLibraries)
        return offer_of(self.platform.device if takes else torch.device("cpu"), self.dtype)

    def choose_libraries(self, factory: RunnerFactory, kv: KVCache) -> None:
        """Tries the libraries for prompts' attention that are installed, in the cache, which is empty."""
        if not isinstance(self.attention, TakesLibraries):
            return
        model = factory.model
        layers = ((weights, kv.layers[at]) for at, weights in model.attention_weights.items())
        trial = PromptTrial(
            *(self.attention, self.dtype, factory.tick),
            width=factory.batch.tables[0].shape[1],
            tokens=self.config.max_num_batched_tokens,
            query_blocks=model.query_blocks,
        )
        for tried in tried_layers(((own, cache) for own, cache in layers if isinstance(cache, torch.Tensor)), self.dtype):
            trial.choose(tried, self._offer)

    def load(self, model: Decoder, on_progress: Callable[[int, int], None]) -> None:
        """Fills a model with its weights; `on_progress` gets the bytes that are done, and all."""
        with torch.inference_mode():
            if self.config.load_format == "dummy":
                load_dummy(model, self.config.seed, self.platform.device)
                model.projections.fill()
                if model.token_heads is not None:
                    model.token_heads.fill()
                return
            folder, pickles = Path(self.config.model_path), self.config.load_format == "pt"
            load_weights(model, folder, on_progress, pickles=pickles)
            model.projections.load(folder, pickles=pickles)
            if model.token_heads is not None and pickles:
                model.token_heads.load(folder)
            if self.config.kv_cache == "fp8":
                load_kv_scales(model.kv_scaled, folder, pickles=pickles)
                model.share_kv_scales()


def _read_formats(config: WorkerConfig, model: ModelConfig) -> dict[str, Format]:
    """Returns the formats of the checkpoint's quantized matrices. Raises WeightError, also as `check_counts`."""
    path, pickles = Path(config.model_path), config.load_format == "pt"
    check_counts(path, model, pickles=pickles)
    return stored_formats(path, pickles=pickles)


def _causal_attention(config: WorkerConfig, platform: Platform, dtype: torch.dtype, model: ModelConfig) -> Backend:
    """Returns the backend that reads a cache. Raises ConfigError."""
    heads, tensor = model.num_heads // config.layout.tensor, config.layout.tensor
    attention, _ = select_attention(
        config.attention_backend,
        platform,
        dtype,
        max(own.dim for own in model.kv_heads),
        group=max(heads // max(1, own.count // tensor) for own in model.kv_heads),
        latent=model.mla is not None,
        indexed=model.mla is not None and model.mla.index is not None,
        compressed=model.compressed is not None,
        sinks=model.traits.attention_sinks,
        cache=config.kv_cache,
    )
    return attention


def weight_source(config: WorkerConfig) -> WeightSource:
    """Opens the source of experts that are loaded later."""
    if config.load_format == "dummy":
        return DummyWeights(config.seed)
    return Checkpoint(Path(config.model_path), pickles=config.load_format == "pt")
