"""Experts from the ranks that hold them: the same experts as from the files, and the files where that fails."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from starling_engine.errors import ConfigError, WeightError
from starling_engine.expert_parallel import peers as peers_module
from starling_engine.expert_parallel import sources as sources_module
from starling_engine.expert_parallel.peers import ExpertPeer, ExpertServer, FindPeers, PeerDirectory, ReadExpert
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.expert_parallel.sources import FastestSource, SourceSpeeds
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsShape
from starling_engine.layers.experts_dense import DenseExperts
from starling_engine.parallel.communicator import ALONE
from starling_engine.parallel.gloo import serve_store
from starling_engine.topology.epoch import CHECKPOINT, PEERS
from starling_engine.topology.placement import spread
from starling_engine.topology.shard import Share
from starling_engine.weights.loader import Checkpoint
from starling_engine.weights.weight_slot import WeightSlot

from tests.engine.checkpoints import PROMPT, VARIANTS, Reference, make_reference
from tests.engine.expert_parallel.test_ranks import Rank, build, wait

HOST = "127.0.0.1"
ALL = spread(8, 1, 3)
EXPERTS = 8 * 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("checkpoint"), VARIANTS["qwen3-moe"])


class Away:
    """A checkpoint that cannot be read any more."""

    def fill(self, _slots: Mapping[str, WeightSlot]) -> None:
        raise WeightError("model.safetensors is away")


def server_rank(reference: Reference, dtype: torch.dtype = torch.float32) -> Rank:
    """Makes a rank with all experts."""
    ranks = ExpertRanks(8, 8)
    ranks.set_placement(ALONE, ALL)
    return build(reference.folder, ranks, dtype=dtype)


def joining_rank(reference: Reference, dtype: torch.dtype = torch.float32) -> Rank:
    """Makes a rank without experts."""
    return build(reference.folder, ExpertRanks(8, 8), dtype=dtype)


def moves_of(rank: Rank, source: Any) -> Rearrangement:
    return Rearrangement(rank.ranks, rank.model.experts, source)


def served_by(server: ExpertServer) -> FindPeers:
    return lambda _: [ExpertPeer(server.address, server.holds())]


def contents(rank: Rank) -> list[np.ndarray[Any, Any]]:
    """Returns all bytes of all experts."""
    found = []
    for experts in rank.model.experts.values():
        for expert in range(8):
            parts = [experts.read(expert, part, 0, experts.bytes_each) for part in range(2)]
            found += [part for part in parts if part is not None]
    assert len(found) == 2 * EXPERTS
    return found


@pytest.fixture
def server(reference: Reference) -> Iterator[ExpertServer]:
    made = ExpertServer(server_rank(reference).model.experts, HOST)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_without_files_loads_from_one_that_holds_them(
    reference: Reference, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "PIECE", 1000)
    monkeypatch.setattr(sources_module, "PIECE", 1000)
    giver, taker = server_rank(reference, dtype), joining_rank(reference, dtype)
    server = ExpertServer(giver.model.experts, HOST)
    moves = moves_of(taker, Away())
    moves.start(ALL, 0, find_peers=served_by(server))
    wait(moves)
    each = giver.model.experts[0].bytes_each
    assert (moves.loaded[PEERS].experts, moves.loaded[PEERS].bytes) == (EXPERTS, EXPERTS * each)
    assert server.sent == EXPERTS * each and moves.loaded[CHECKPOINT].experts == 0
    server.close()
    moves.commit(ALONE)
    assert all(np.array_equal(a, b) for a, b in zip(contents(taker), contents(giver), strict=True))
    taker.step(reference.prompt, PROMPT)
    if dtype == torch.float32:
        torch.testing.assert_close(torch.cat(taker.logits), reference.logits[:PROMPT], atol=1e-4, rtol=0)


def test_both_sources_are_measured(reference: Reference, server: ExpertServer) -> None:
    taker = joining_rank(reference)
    moves = moves_of(taker, Checkpoint(reference.folder))
    moves.start(ALL, 0, find_peers=served_by(server))
    wait(moves)
    loaded = moves.loaded
    assert loaded[PEERS].experts >= 2 and loaded[CHECKPOINT].experts >= 2
    assert loaded[PEERS].experts + loaded[CHECKPOINT].experts == EXPERTS
    assert loaded[PEERS].rate > 0 and loaded[CHECKPOINT].rate > 0


class Dying(ExpertServer):
    """Ends after some pieces, in the middle of an expert."""

    left = 9

    def _answer(self, socket: Any, identity: bytes, payload: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            raise zmq.ContextTerminated
        super()._answer(socket, identity, payload)


def test_a_rank_that_dies_in_the_middle(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker = server_rank(reference), joining_rank(reference)
    server = Dying(giver.model.experts, HOST)
    monkeypatch.setattr(sources_module, "PROBES", 20)  # so that it is asked again and again
    moves = moves_of(taker, Checkpoint(reference.folder))
    moves.start(ALL, 0, find_peers=served_by(server))
    wait(moves)
    assert moves.loaded[PEERS].experts == 4 and moves.loaded[CHECKPOINT].experts == EXPERTS - 4
    server.close()
    assert caplog.text.count("does not come from peers") == 1 and "nothing came for 2 s" in caplog.text
    moves.commit(ALONE)
    taker.step(reference.prompt, PROMPT)
    torch.testing.assert_close(torch.cat(taker.logits), reference.logits[:PROMPT], atol=1e-4, rtol=0)


def test_a_rank_of_another_layout_is_refused(reference: Reference, server: ExpertServer, caplog: pytest.LogCaptureFixture) -> None:
    taker = joining_rank(reference, torch.bfloat16)
    moves = moves_of(taker, Checkpoint(reference.folder))
    moves.start(ALL, 0, find_peers=served_by(server))
    wait(moves)
    assert moves.loaded[CHECKPOINT].experts == EXPERTS and server.sent == 0
    assert "experts are kept as dense: torch.float32 [96, 64], torch.float32 [64, 48]; 0 to 48 of 48" in caplog.text


def test_without_files_and_ranks_the_last_error_is_raised(reference: Reference, server: ExpertServer) -> None:
    taker = joining_rank(reference)
    moves = moves_of(taker, Away())
    moves.start(ALL, 0, find_peers=lambda _: [ExpertPeer(server.address, {0: (0,)})])
    with pytest.raises(WeightError, match="is away"):
        wait(moves)
    moves.cancel()
    assert not any(experts.reserved for experts in taker.model.experts.values())


def test_no_slot_is_no_fault_of_a_source(reference: Reference, server: ExpertServer) -> None:
    taker = build(reference.folder, ExpertRanks(8, 5))
    moves = moves_of(taker, Checkpoint(reference.folder))
    moves.start(ALL, 0, find_peers=served_by(server))
    with pytest.raises(ConfigError, match="no free slot for expert 5: all 5"):
        wait(moves)
    moves.cancel()


def test_who_gives_up_does_not_wait_for_a_silent_rank(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PIECE_TIMEOUT", 30.0)
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    peer = ExpertPeer(f"tcp://{HOST}:{silent.bind_to_random_port(f'tcp://{HOST}')}", ALL_HELD)
    taker = joining_rank(reference)
    moves = moves_of(taker, Away())
    moves.start(ALL, 0, find_peers=lambda _: [peer])
    assert silent.poll(20_000)
    began = time.monotonic()
    moves.cancel()
    assert time.monotonic() - began < 10
    assert not any(experts.reserved for experts in taker.model.experts.values())
    context.destroy(0)


ALL_HELD = dict(enumerate(ALL.held(0)))


# ---- what is sent ----


class Hooked(DenseExperts):
    """Calls back when the memory of a slot is looked up."""

    hook: Callable[[], None] | None = None

    def memory(self, slot: int) -> list[torch.Tensor]:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return super().memory(slot)


def one_slot(method: DenseExperts) -> Experts:
    shape = ExpertsShape(num_experts=3, num_slots=1, hidden_size=8, intermediate=Share.all(8))
    names = ExpertNames(
        "mlp.experts", ("gate_proj", "up_proj", "down_proj"), (("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",))
    )
    return Experts(names, shape, method, torch.float32, torch.device("cpu"))


def load(experts: Experts, expert: int) -> None:
    for slot in experts.reserve(expert).values():
        slot.load(torch.full(slot.shape, float(expert)))


def test_what_is_overwritten_while_it_is_read_is_not_sent() -> None:
    method = Hooked()
    experts = one_slot(method)

    def replace(by: int) -> Callable[[], None]:
        def hook() -> None:
            experts.drop(0)
            load(experts, by)

        return hook

    for by in (1, 0):  # by another expert, and by the same one again
        load(experts, 0)
        assert experts.read(0, 1, 0, 16) is not None
        method.hook = replace(by)
        assert experts.read(0, 1, 0, 16) is None
        experts.drop(by)


def test_what_is_not_here_with_all_its_parts_is_not_sent() -> None:
    experts = one_slot(DenseExperts())
    assert experts.read(0, 0, 0, 16) is None
    parts = [*experts.reserve(0).values()]
    for slot in parts[:2]:
        slot.load(torch.zeros(slot.shape))
        assert experts.read(0, 0, 0, 16) is None and not experts.loaded
    parts[2].load(torch.zeros(parts[2].shape))
    assert experts.read(0, 0, 0, 16) is not None and experts.loaded == {0}
    with pytest.raises(IndexError):
        experts.read(0, 2, 0, 16)
    experts.drop(0)
    assert experts.read(0, 0, 0, 16) is None


def test_slots_that_change_all_the_time_are_read_whole_or_not_at_all() -> None:
    experts = one_slot(DenseExperts())
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for expert in range(3):
                load(experts, expert)
                experts.drop(expert)

    thread = threading.Thread(target=change)
    thread.start()
    seen, end = 0, time.monotonic() + 0.5
    while time.monotonic() < end or seen < 20:
        for expert in range(3):
            piece = experts.read(expert, 1, 0, experts.bytes_each)
            if piece is not None:
                seen += 1
                assert (piece.view(np.float32) == expert).all()
    stop.set()
    thread.join()


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        (ReadExpert(7, 0, 0, 0, ""), "layer 7 is not here"),
        (ReadExpert(0, 9, 0, 0, "layout"), "expert 9 of layer 0 is not here"),
        (ReadExpert(0, 0, 5, 0, "layout"), "an expert has no tensor 5"),
        (ReadExpert(0, 0, 0, 0, "other"), "experts are kept as dense"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_said(server: ExpertServer, wanted: ReadExpert, refusal: str) -> None:
    if wanted.layout == "layout":
        wanted.layout = server._layouts[0]
    assert server._read(wanted)[0].startswith(refusal)


def test_noise_does_not_end_it(reference: Reference, server: ExpertServer) -> None:
    context = zmq.Context()
    noise = context.socket(zmq.DEALER)
    noise.connect(server.address)
    for message in ([b"noise"], [b"one", b"two", b"three"], [b""]):
        noise.send_multipart(message)
    taker = joining_rank(reference)
    moves = moves_of(taker, Away())
    moves.start(ALL, 0, find_peers=served_by(server))
    wait(moves)
    context.destroy(0)


# ---- which source ----


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Source:
    """Takes these seconds for each expert; None: it fails."""

    def __init__(self, name: str, clock: Clock, seconds: list[float | None]) -> None:
        self.name, self._clock, self._seconds, self.calls = name, clock, seconds, 0

    def has(self, *_: Any) -> bool:
        return True

    def fill(self, *_: Any) -> None:
        seconds = self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1
        if seconds is None:
            raise WeightError(f"{self.name} is gone")
        self._clock.now += seconds

    def close(self) -> None:
        pass


class Sized:
    bytes_each = 100


@pytest.mark.parametrize(
    ("a", "b", "calls"),
    [
        ([1.0], [0.5], (2, 10)),
        ([0.5], [1.0], (10, 2)),
        ([9.0, 0.2], [0.5], (10, 2)),  # one slow expert is none
        ([0.2, 0.2, 0.2, 9.0], [0.5], (5, 7)),  # slow from then on
        ([0.2, 0.2, 0.2, None], [0.5], (4, 9)),  # gone from then on
        ([None], [0.5], (1, 12)),
        ([0.5], [0.2, 0.2, 0.2, None], (9, 4)),
    ],
    ids=str,
)
def test_the_faster_one_is_taken(
    a: list[float | None], b: list[float | None], calls: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sources_module, "time", clock)
    sources = [Source("a", clock, a), Source("b", clock, b)]
    fastest, sized = FastestSource(sources), Sized()
    for expert in range(12):
        fastest.fill(sized, 0, expert, lambda: False)  # type: ignore[arg-type]
    assert (sources[0].calls, sources[1].calls) == calls
    assert sum(part.experts for part in fastest.loaded.values()) == 12


def test_what_was_measured_holds_for_the_next_few(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock, speeds = Clock(), SourceSpeeds()
    monkeypatch.setattr(sources_module, "time", clock)
    sources = [Source("a", clock, [1.0]), Source("b", clock, [0.5])]
    with caplog.at_level("INFO"):
        for _ in range(4):
            fastest = FastestSource(sources, speeds)
            for expert in range(2):
                fastest.fill(Sized(), 0, expert, lambda: False)  # type: ignore[arg-type]
    assert [source.calls for source in sources] == [2, 6] and len(caplog.messages) == 1


def test_the_choice_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monkeypatch.setattr(sources_module, "time", clock)
    fastest = FastestSource([Source("a", clock, [1e-6]), Source("b", clock, [5e-7])])
    with caplog.at_level("INFO"):
        for expert in range(12):
            fastest.fill(Sized(), 0, expert, lambda: False)  # type: ignore[arg-type]
    assert caplog.messages == ["experts come from b (a 100 MB/s, b 200 MB/s)"]


# ---- who holds what ----


def test_the_directory_has_the_experts_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling_engine.expert_parallel.peers.WAIT_SECONDS", 60.0)
    store = serve_store(HOST, 5.0)
    directory = PeerDirectory(store, "epoch/2/0")
    peers = [ExpertPeer(f"tcp://{HOST}:{port}", {0: (port,), 3: (1, 2)}) for port in (1, 2)]
    directory.add(peers[0])
    PeerDirectory(store, "epoch/2/1").add(peers[1])
    began = time.monotonic()
    assert directory.read(1, lambda: False) == peers[:1]
    threading.Timer(0.1, lambda: directory.add(peers[1])).start()
    assert directory.read(2, lambda: False) == peers
    assert time.monotonic() - began < 20
    assert directory.read(3, lambda: True) == peers


def test_a_rank_without_an_entry_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling_engine.expert_parallel.peers.WAIT_SECONDS", 0.1)
    store = serve_store(HOST, 5.0)
    assert PeerDirectory(store, "epoch/2/0").read(1, lambda: False) == []
