"""The runner for a device with its own queue gives the same results as the one on the host, for any step."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.kernels.kv_cache import KVCache
from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec, StateGroup, StateSpec, WindowSpec
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder, ForwardContext
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.request import EngineRequest
from starling_engine.step import StepPlan
from starling_engine.worker.device import device_runner
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.device.device_tables import DeviceTables, NewBlocks
from starling_engine.worker.device.graphs import LARGEST, Graphs, decode_sizes, draft_sizes, launched_tokens, mixed_sizes
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.device.step_writer import StepWriter
from starling_engine.worker.host.batch import FlatBatch, InputBatch
from starling_engine.worker.host.kv_pages import KVPages

from bench.gpu.shapes import model_config
from tests.engine.checkpoints import VARIANTS, make_reference, write_checkpoint
from tests.engine.cores import assert_greedy, core_for, greedy, run
from tests.engine.late_device import Broken, LateQueue, Launching, use_late_device
from tests.engine.mixed_requests import assert_same, random_traffic
from tests.engine.real_engine import running
from tests.engine.written import write_tokenizer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=[True, False], ids=["recorded", "eager"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function after whose call workers use a late device. Recordings run the work again, and so may read the host."""

    def take() -> None:
        use_late_device(monkeypatch.setattr, recorded=request.param)

    return take


@pytest.mark.parametrize("name", ["llama3.1", "qwen3-mixed", "qwen3-moe", "deepseek-v3"])
@pytest.mark.matrix
def test_greedy_tokens_equal_the_reference(name: str, device: Callable[[], None], tmp_path: Path) -> None:
    reference = make_reference(tmp_path, VARIANTS[name])
    device()
    with core_for(tmp_path, budget=24) as core:
        assert core.depth == 2
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(3)])
    for tokens, error in answers.values():
        assert error is None
        assert_greedy(tokens, reference)


def test_every_kind_of_request_is_answered_as_on_the_host(device: Callable[[], None], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-mixed"])
    expected = random_traffic(tmp_path)
    device()
    assert_same(random_traffic(tmp_path), expected)


def test_steps_that_meet_kernels_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are compiled, steps of padding run before any is recorded."""
    reference = make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    use_late_device(monkeypatch.setattr, recorded=True)
    warmed: list[DeviceRunner] = []
    record = DeviceRunner.record

    def warm_and_record(runner: DeviceRunner) -> None:
        runner.warm()
        warmed.append(runner)
        record(runner)

    monkeypatch.setattr(DeviceRunner, "record", warm_and_record)
    with core_for(tmp_path) as core:
        tokens, error = run(core, [greedy("1", reference.prompt)])["1"]
    assert warmed and error is None
    assert_greedy(tokens, reference)


def test_a_long_decode_beside_a_prompt_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode would be split less. Beside prompts alone, and among decodes, it is recorded."""
    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr, recorded=True)
    monkeypatch.setattr(device_runner, "LONG_CONTEXT", len(reference.prompt))
    monkeypatch.setattr(device_runner, "keys_saved", lambda context, *_, **__: context)
    find, found = DeviceRunner._recorded, set()

    def note(runner: DeviceRunner, step: FlatBatch, *, decode: bool) -> StepShape | None:
        shape, rows = find(runner, step, decode=decode), zip(step.starts, step.ends, strict=True)
        long = any(end - start == 1 and end > len(reference.prompt) for start, end in rows)
        found.add(("decodes" if step.longest == 1 else "prompt", long, shape is not None))
        return shape

    monkeypatch.setattr(DeviceRunner, "_recorded", note)
    with core_for(tmp_path, budget=32) as core:
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(4)])
    assert found == {("prompt", False, True), ("prompt", True, False), ("decodes", True, True), ("decodes", False, True)}
    for tokens, error in answers.values():
        assert error is None
        assert_greedy(tokens, reference)


def test_the_next_block_of_a_decode_comes_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more blocks than their step has room for are told of by a copy of their own, and decodes never."""
    reference = make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    use_late_device(monkeypatch.setattr, recorded=True)
    added, upload = DeviceTables.added, DeviceTables.upload
    told, uploaded = [], []

    def note(tables: DeviceTables, plan: StepPlan, lengths: np.ndarray) -> NewBlocks:
        new = added(tables, plan, lengths)
        told.append((max(plan.num_tokens) == 1, len(new) > 0))
        return new

    def note_upload(tables: DeviceTables, new: NewBlocks) -> None:
        uploaded.append(told[-1])
        upload(tables, new)

    monkeypatch.setattr(DeviceTables, "added", note)
    monkeypatch.setattr(DeviceTables, "upload", note_upload)
    with core_for(tmp_path) as core:
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(2)])
    for tokens, error in answers.values():
        assert error is None
        assert_greedy(tokens, reference)
    assert told.count((True, True)) >= 8 and (True, True) not in uploaded


def test_query_blocks_of_prompts_are_listed_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has those of every sequence that is no decode, padding's too, in recorded steps and in others."""
    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr, recorded=True)
    listing, forward, seen = QueryBlocks(16, 2), Decoder.forward, []

    def check(model: Decoder, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None) -> torch.Tensor:
        meta = ctx.attention[0]
        lengths = np.diff(meta.query_start.numpy())
        if meta.query_blocks is None:
            seen.append(0)
            assert max(lengths) <= 1
        else:
            expected = listing.listed(lengths)
            seen.append(len(meta.query_blocks))
            assert meta.query_blocks[: len(expected)].tolist() == expected.tolist()
            assert set(meta.query_blocks[len(expected) :].flatten().tolist()) <= {-1}
        return forward(model, ids, ctx, arrived)

    monkeypatch.setattr(Decoder, "query_blocks", listing)
    monkeypatch.setattr(Decoder, "forward", Launching.during(False, check))
    with core_for(tmp_path, budget=40) as core:
        answers = run(core, [greedy(str(n), reference.prompt) for n in range(3)])
    for tokens, error in answers.values():
        assert error is None
        assert_greedy(tokens, reference)
    recorded = {shape.tokens: listing.most(shape.tokens, shape.rows) for shape in Graphs(InlineQueue(), 8, 40, 8, 0)._mixed}
    assert set(recorded.values()) & set(seen) and 0 in seen
    assert set(seen) - {0, *recorded.values()}, "steps that are not recorded, too"


LAYERS = tuple(range(32))
FULL = KVSpec(16, 8, 128, 2)


def pages_of(groups: list[KVGroup], state: StateGroup | None = None) -> KVPages:
    return KVPages(KVCache(torch.zeros(1, 1), []), groups, lambda: None, state)


def prompt_beside_decodes(rows: int, context: int) -> FlatBatch:
    """Returns a prompt of 500 tokens and decodes of such a context, `rows` in all."""
    lengths = np.array([500] + [1] * (rows - 1))
    ends = np.array([500] + [context] * (rows - 1))
    starts = ends - lengths
    return FlatBatch(np.arange(rows), starts, 0 * ends, lengths.astype(np.int32), starts, lengths.cumsum(), ends, 500)


@pytest.mark.parametrize(
    ("spec", "context", "rows", "room", "pays"),
    [
        (FULL, 1 << 15, 2, 257, False),
        (FULL, (1 << 15) + 2000, 2, 257, True),
        (FULL, 1 << 17, 33, 257, True),
        (FULL, 1 << 17, 34, 257, False),
        (FULL, 1 << 17, 2, 17, True),
        (FULL, 1 << 17, 2, 5, False),
        (KVSpec(16, 1, 128, 2), 1 << 16, 2, 257, False),
        (KVSpec(16, 1, 128, 2), 1 << 17, 2, 257, True),
        (KVSpec(16, 1, 128, 2), 1 << 17, 2, 33, False),
        (WindowSpec(16, 8, 128, 2, sliding_window=4096), 1 << 17, 2, 257, False),
        (LatentSpec(16, 1, 576, 2), 1 << 16, 2, 257, True),
    ],
)
def test_a_step_with_a_prompt_comes_as_it_is_where_a_long_context_is_split_further(
    spec: KVSpec, context: int, rows: int, room: int, pays: bool
) -> None:
    """Llama-3-8B and 132 SMs: alone and on eight ranks, of up to 256 requests and of fewer."""
    pages, step = pages_of([KVGroup(spec, LAYERS)]), prompt_beside_decodes(rows, context)
    assert device_runner._splitting_pays(pages, step, (1 << 17) + 16, room, 132) == pays


def test_layers_with_recurrent_state_are_launched_too_and_split_nothing() -> None:
    step, full = prompt_beside_decodes(2, 1 << 17), [KVGroup(FULL, LAYERS[:8])]
    state = StateGroup(StateSpec(()), LAYERS[8:], 1, 16)
    args = step, (1 << 17) + 16, 257, 132
    assert device_runner._splitting_pays(pages_of(full), *args)
    assert not device_runner._splitting_pays(pages_of(full, state), *args)


@pytest.mark.parametrize(
    ("same", "recorded", "shared"),
    [(0, False, 0), (1, False, 1), (32, True, 0), (33, True, 33), (62, True, 62)],
)
def test_tables_are_compared_only_where_rows_may_share_enough(
    same: int, recorded: bool, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 256 rows of Llama-3-8B, whose blocks are 2 MiB each: a recorded step is worth 32 that are read once."""
    groups, rows = [KVGroup(FULL, tuple(range(32)))], 256
    batch = InputBatch(groups, max_num_seqs=rows, max_model_len=1024, block_size=16)
    batch.tables[0][:, :same] = 1 + np.arange(same)
    batch.tables[0][:, same:63] = 100 + np.arange(rows * (63 - same)).reshape(rows, -1)
    pages, ones, starts = (
        pages_of(groups),
        np.ones(rows, np.int64),
        np.full(rows, 1008),
    )
    step = FlatBatch(np.arange(rows), starts, 0 * ones, ones.astype(np.int32), starts, ones.cumsum(), starts + 1, 1)
    if not shared:
        monkeypatch.setattr(device_runner, "common_prefix", None)
    assert device_runner._shared_blocks(pages, batch, step, recorded=recorded) == shared


def test_a_stage_of_window_layers_alone_shares_nothing() -> None:
    groups = [KVGroup(FULL, ()), KVGroup(WindowSpec(16, 8, 128, 2, sliding_window=64), (0, 1))]
    rows, zeros = 256, np.zeros(256, np.int64)
    batch = InputBatch(groups, max_num_seqs=rows, max_model_len=1024, block_size=16)
    pages, starts = pages_of(groups), np.full(rows, 1008)
    step = FlatBatch(np.arange(rows), starts, zeros, (zeros + 1).astype(np.int32), starts, (zeros + 1).cumsum(), starts + 1, 1)
    assert device_runner._shared_blocks(pages, batch, step, recorded=True) == 0


def test_a_step_is_padded_to_the_next_size() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert decode_sizes(256)[-3:] == [224, 240, 256]
    assert mixed_sizes(100) == [32, 64] and mixed_sizes(1500)[-3:] == [512, 768, 1024]
    assert draft_sizes(1) == []
    assert draft_sizes(40) == [2, 4, 8, 16, 32, 40]
    assert draft_sizes(256) == [2, 4, 8, 16, 32, 64, 128, 192, 256]
    graphs = Graphs(InlineQueue(), 16, 100, 40, 4)
    assert graphs.decode(3, 1) == (4, 4, 4, 1) and graphs.decode(16, 1) == (16, 16, 16, 1) and graphs.decode(17, 1) is None
    assert graphs.decode(5, 2) == graphs.decode(8, 5) == (8, 8, 8, 5)
    assert graphs.decode(41, 5) is None and graphs.decode(6, 6) is None
    assert Graphs(InlineQueue(), 16, 100, 16, 20).decode(9, 8) == (16, 16, 16, 8)
    assert graphs.mixed(33, 16) == (64, 17, 40, 0)
    assert graphs.mixed(65, 2) is None and graphs.mixed(10, 17) is None


@pytest.mark.parametrize(
    ("shape", "ranks", "capability", "expected"),
    [
        ("Qwen3-0.6B", 1, 90, (1500, 3200)),
        ("Llama-3-8B", 1, 90, (512, 512)),
        ("Llama-3-8B", 8, 90, (1500, 3200)),
        ("Qwen3-0.6B", 1, 89, (512, 512)),
        ("30B-A3B", 1, 90, (512, 512)),
    ],
)
def test_steps_are_recorded_as_long_as_launching_them_takes_longer(
    shape: str, ranks: int, capability: int, expected: tuple[int, int]
) -> None:
    """Launching the 28 layers of 0.6B takes 4.2 ms, in which an H200 computes some 2,800 tokens."""
    found = launched_tokens(model_config(shape, toy=False), ranks, capability, 132)
    assert expected[0] <= found <= expected[1]


def test_a_model_of_a_state_alone_is_recorded_as_any_other(tmp_path: Path) -> None:
    """The config has neither heads nor an MLP whose operations could be counted."""
    fields = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64}
    sizes = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "vocab_size": 32768}
    (tmp_path / "config.json").write_text(json.dumps(fields | sizes))
    assert launched_tokens(load_model_config(tmp_path), 1, 90, 132) == LARGEST


def test_padding_fits_tables_of_the_longest_sequence() -> None:
    """Padding is prompts of at most that length, one after the other, whatever else is in the step."""
    groups = [KVGroup(KVSpec(8, 1, 16, 4), (0,))]
    batch = InputBatch(groups, max_num_seqs=4, max_model_len=24, block_size=8)
    writer = StepWriter(batch, InlineQueue(), torch.device("cpu"), max_tokens=64, max_samples=4)
    fields = writer.padding(StepShape(64, 3, 1))
    DevicePositions(4, 8, torch.device("cpu")).locate(fields, [torch.zeros(5, 4, dtype=torch.int32)])
    assert fields.query_start.tolist() == [0, 24, 48, 64] and fields.context_lens.tolist() == [24, 24, 16]
    assert fields.positions.tolist() == [*range(24), *range(24), *range(16)]
    assert set(fields.slots.tolist()) == {4} and set(fields.targets.flatten().tolist()) == {-1}


def test_a_size_that_cannot_be_recorded_runs_eagerly() -> None:
    ran: list[str] = []

    class Refuses(InlineQueue):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            work()
            raise torch.OutOfMemoryError("no memory for another recording")

    graphs = Graphs(Refuses(), 4, 4, 4, 0)
    shape = graphs.decode(2, 1)
    assert shape is not None
    for _ in range(2):
        graphs.run(shape, lambda: ran.append("work"))
    assert len(ran) == 3, "tried once"


def test_a_size_is_recorded_once_and_again_after_memory_has_moved() -> None:
    ran: list[str] = []

    class Recorder(InlineQueue):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
            ran.append("record")
            return lambda: ran.append("replay")

    graphs = Graphs(Recorder(), 4, 4, 4, 0)
    shape = graphs.decode(2, 1)
    assert shape is not None
    for _ in range(3):
        graphs.run(shape, lambda: ran.append("work"))
    assert ran == ["work", "record", "replay", "replay"]
    graphs.forget()
    graphs.run(shape, lambda: ran.append("work"))
    assert ran[4:] == ["work", "record"]


def test_a_fault_of_the_device_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later step could run on it, so a supervisor has to start the engine again."""
    from starling_engine.errors import RankLost

    reference = make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr)

    with core_for(tmp_path) as core:
        run(core, [greedy("before", reference.prompt)])
        monkeypatch.setattr(LateQueue, "record_event", lambda _: Broken())
        core.add(greedy("after", reference.prompt))
        with pytest.raises(RankLost, match="illegal memory access"):
            for _ in range(100):
                core.step()
                core.executor.check()


def test_the_runner_is_the_one_for_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would compare the host with itself."""
    make_reference(tmp_path, VARIANTS["llama3.1"])
    use_late_device(monkeypatch.setattr)
    launched: list[object] = []
    launch = DeviceRunner.launch
    monkeypatch.setattr(DeviceRunner, "launch", lambda self, plan: launched.append(plan) or launch(self, plan))
    with core_for(tmp_path) as core:
        run(core, [greedy("one", [1, 2, 3])])
    assert len(launched) > 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here; the tests of the kernels run on the GPU")
async def test_the_engine_runs_on_tritons_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work of a GPU except its graphs, in the interpreter, chosen by an argument of the engine; drafts among it."""
    reference = make_reference(tmp_path, VARIANTS["qwen3-mixed"])
    repeats = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, allowed_token_ids=[5, 6])
    with core_for(tmp_path) as core:
        expected, _ = run(core, [EngineRequest(id="a", prompt_ids=[5, 6, 7] * 3, params=repeats)])["a"]
    write_tokenizer(tmp_path)
    monkeypatch.setenv(INTERPRETED, "1")
    banned = next(token for token in range(512) if token not in reference.tokens[:4])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, banned_token_ids=[banned], logprobs=1)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "spec_method": "ngram", "spec_tokens": 2}
    async with running(model=str(tmp_path), device="interpreter", **settings) as engine:
        output = await engine.complete(reference.prompt, params)
        repeated = await engine.complete([5, 6, 7] * 3, repeats)
        assert 0 < repeated.drafts.accepted <= repeated.drafts.proposed
    assert list(repeated.outputs[0].token_ids) == expected
    assert list(output.outputs[0].token_ids) == reference.tokens[:4]
    assert [next(iter(at)) for at in output.outputs[0].logprobs or ()] == reference.tokens[:4]


def test_layers_that_read_another_one_s_cache_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "keys_saved", lambda context, *_, **__: context)
    context = 2 * device_runner.LONG_CONTEXT
    step = SimpleNamespace(starts=np.array([context - 1]), ends=np.array([context]), slots=[0])
    for readers, pays in ((((1, 0), (2, 0)), True), ((), False)):
        pages = SimpleNamespace(groups=[KVGroup(KVSpec(16, 1, 64, 2), (0,), readers)], num_layers=3)
        assert device_runner._splitting_pays(pages, step, context, room=1, num_sms=132) == pays
