"""The plan of a rank's memory has all that its model holds."""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starling_engine.args import EngineArgs
from starling_engine.errors import ConfigError
from starling_engine.frontend.resolve import resolve
from starling_engine.kv.layer_specs import kv_groups, state_group
from starling_engine.ledger import Ledger, MemoryRequest, plan_memory, replay_bytes
from starling_engine.parallel.communicator import no_tick
from starling_engine.parallel.ranks import join_ranks
from starling_engine.platforms.cuda import CudaQueue
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.select import select_platform
from starling_engine.topology.layout import ParallelLayout
from starling_engine.weights.dummy import load_dummy
from starling_engine.worker import worker
from starling_engine.worker.device.graphs import decode_sizes, mixed_sizes
from starling_engine.worker.masks import MaskQueue, StepMasking
from starling_engine.worker.memory_plan import plan
from starling_engine.worker.setup import RankSetup

from tests.engine.checkpoints import FAMILIES, VARIANTS, write_checkpoint
from tests.engine.encoder_checkpoints import ENCODERS, write_encoder
from tests.engine.late_device import use_late_device


def planned_weights(folder: Path) -> int:
    config = resolve(EngineArgs(model=str(folder), load_format="dummy", device="cpu", dtype="float32"))[2].worker
    setup = RankSetup.choose(config, select_platform("cpu", 0), lambda device: join_ranks(config, no_tick, device))
    model = setup.build_model(None)
    return plan(setup.runner_factory(model, [], None, no_tick, StepMasking(MaskQueue())), setup.dtype, 0).weights


def test_recordings_are_planned_for_as_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes beyond tensors are in the ledger, and the KV cache is smaller by them; without recordings there are none."""
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr, recorded=True)
    platform, asked = worker.select_platform("cpu", 0), []

    def measure(_queue: InlineQueue, work: Callable[[], None], count: int) -> int:
        assert not gc.isenabled()
        work()
        asked.append(count)
        return 8 << 20

    monkeypatch.setattr(InlineQueue, "recording_bytes", measure)

    def ledger(*, eager: bool) -> Ledger:
        args = EngineArgs(model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=8, max_model_len=64, enforce_eager=eager)
        config = resolve(args)[2].worker
        setup = RankSetup.choose(config, platform, lambda device: join_ranks(config, no_tick, device))
        model, groups = setup.build_model(None), kv_groups(setup.model, config)
        load_dummy(model, 0, platform.device)
        return plan(setup.runner_factory(model, groups, None, no_tick, StepMasking(MaskQueue())), setup.dtype, 0)

    recorded, eager = ledger(eager=False), ledger(eager=True)
    (count,) = asked
    assert count >= len(decode_sizes(8)) + len(mixed_sizes(64)), "of one engine's sizes; the other records none"
    assert recorded.recordings == 8 << 20 and "recordings" in str(recorded)
    assert eager.recordings == 0 and "recordings" not in str(eager)


def test_each_step_in_a_pipeline_keeps_its_rows_with_drafts(tmp_path: Path) -> None:
    """A stage holds rows of as many steps as there are stages: what was accepted is known when their sequences go on."""
    write_checkpoint(tmp_path, FAMILIES["lfm2"])
    config = resolve(EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", max_model_len=64))[
        2
    ].worker
    setup = RankSetup.choose(config, select_platform("cpu", 0), lambda device: join_ranks(config, no_tick, device))
    model, groups, state = setup.build_model(None), kv_groups(setup.model, config), state_group(setup.model, config)
    assert state is not None
    alone = setup.runner_factory(model, groups, state, no_tick, StepMasking(MaskQueue()))
    stage = replace(alone, config=replace(config, layout=ParallelLayout(pipeline=3)))
    kept = replay_bytes(setup.model, 4, len(state.layers), config.max_num_samples)
    assert plan(stage, setup.dtype, 0).activations - plan(alone, setup.dtype, 0).activations == 2 * kept > 0


def test_the_kv_cache_gets_what_recordings_leave() -> None:
    request = MemoryRequest(
        total=1 << 30, available=1 << 30, fraction=0.5, weights=1 << 28, activations=1 << 20, kv_bytes=None, slab_bytes=1 << 16,
        block_size=16, useful_blocks=1 << 20, needed_blocks=2,
    )  # fmt: skip
    with_them = plan_memory(replace(request, recordings=64 << 20))
    assert plan_memory(request).kv - with_them.kv == 64 << 20 and with_them.left < 1 << 16
    with pytest.raises(ConfigError, match="recordings"):
        plan_memory(replace(request, recordings=1 << 29))


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_recordings_is_measured_by_a_few(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes 36 MB, for it brings workspaces; the others 2 MB now and then, in pages, and what it had left."""
    free, made, released = [1 << 30], [], []
    taken = iter([36 << 20, 0, 2 << 20, 0, 2 << 20])

    def capture(_queue: CudaQueue, work: Callable[[], None]) -> Callable[[], None]:
        if fails:
            raise torch.OutOfMemoryError("out of memory")
        free.append(free[-1] - next(taken))
        made.append(work)
        return work

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 1 << 31))
    monkeypatch.setattr(CudaQueue, "capture", capture)
    monkeypatch.setattr(CudaQueue, "release_captures", lambda _: released.append(1))
    queue = CudaQueue.__new__(CudaQueue)
    queue._device = torch.device("cuda", 0)
    assert queue.recording_bytes(lambda: None, 41) == (0 if fails else (36 << 20) + 40 * (6 << 20) // 4)
    assert len(made) == (0 if fails else 5) and released


def test_dense_modules_are_weights(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"])
    alone = planned_weights(tmp_path)
    module = {"in_features": 64, "out_features": 48, "activation_function": "torch.nn.modules.activation.Tanh"}
    for name, fields in (("1_Pooling", {"pooling_mode_mean_tokens": True}), ("2_Dense", module)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert planned_weights(tmp_path) - alone == (64 * 48 + 48) * torch.float32.itemsize
