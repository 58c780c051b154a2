"""A listener to KV events as routers have one: vLLM's structures, its sockets, and what it then knows of an engine."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import msgspec
import zmq
from starling_engine.kv.event_endpoint import REPLAY_PORT_OFFSET
from starling_engine.kv.events import EventLog, KVEventBatch, event_hash
from starling_engine.kv.hashing import GRANULE, chain_root
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.ports import free_port

# The structures of vllm/distributed/kv_events.py (after change 42892), as a listener declares them.


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VLLMEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class Stored(VLLMEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(VLLMEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(VLLMEvent, tag="AllBlocksCleared"):
    pass


class Batch(EventBatch):
    events: list[Stored | Removed | Cleared]


def heard(log: EventLog) -> list[Stored | Removed | Cleared]:
    """What a listener makes of the log's events, over the wire's bytes."""
    payload = msgspec.msgpack.encode(KVEventBatch(1.0, log.take(), 0))
    return msgspec.msgpack.decode(payload, type=Batch).events


def hashed(head: bytes, tokens: Sequence[int]) -> bytes:
    for start in range(0, len(tokens), GRANULE):
        head = sha256(head + array("I", tokens[start : start + GRANULE]).tobytes()).digest()
    return head


class Router:
    """Knows of one engine what it has been told, by medium and KV group; checks that a prefix is what its hash says.

    Of snapshots it knows what was said: where nothing else is cached, what lies before them was never told.
    """

    def __init__(self) -> None:
        self.cached: dict[str, dict[int, set[bytes]]] = {"GPU": defaultdict(set), "CPU": defaultdict(set)}
        self.names: dict[bytes | int, bytes] = {}
        """In full, by what was said of them."""
        self.parents: dict[bytes, bytes | None] = {}
        self.snapshots: dict[str, set[bytes | int]] = {"GPU": set(), "CPU": set()}
        self._state_groups: set[int | None] = set()
        self.cleared = 0
        self.kinds: set[tuple[str, int | None]] = set()

    def hear(self, events: list[Stored | Removed | Cleared]) -> None:
        for event in events:
            match event:
                case Cleared():
                    for groups in self.cached.values():
                        groups.clear()
                    for said in self.snapshots.values():
                        said.clear()
                    self.cleared += 1
                case Removed(hashes, medium, group) if group in self._state_groups:
                    for said in hashes:
                        self.snapshots[medium].remove(said)
                case Removed(hashes, medium, group):
                    for said in hashes:
                        self.cached[medium][group].remove(self.names[said])
                case Stored():
                    self._store(event)

    def has_in_slots(self, event: Removed) -> bool:
        """Returns whether it knows of all blocks that leave, and that they are in host memory."""
        known = self.cached["CPU"][event.group_idx]
        return event.medium == "CPU" and all(self.names.get(said) in known for said in event.block_hashes)

    def _store(self, event: Stored) -> None:
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes)
        assert event.lora_id is None and event.lora_name is None
        self.kinds.add((event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window))
        if event.kv_cache_spec_kind == "mamba":
            self._store_snapshots(event)
            return
        salts = (event.extra_keys[0] or ()) if event.parent_block_hash is None else ()
        parent = None if event.parent_block_hash is None else self.names[event.parent_block_hash]
        head = parent or chain_root(None, *(salts or (None,)))
        known = self.cached[event.medium][event.group_idx]
        for at, said in enumerate(event.block_hashes):
            head = hashed(head, event.token_ids[at * event.block_size : (at + 1) * event.block_size])
            assert said == int.from_bytes(head, "big") % 2**64
            assert head not in known
            known.add(head)
            self.names[said] = head
            self.parents[head] = parent
            parent = head

    def _store_snapshots(self, event: Stored) -> None:
        self._state_groups.add(event.group_idx)
        assert self.snapshots[event.medium].isdisjoint(event.block_hashes)
        self.snapshots[event.medium].update(event.block_hashes)
        head = self.names.get(event.parent_block_hash)
        if head is not None:
            for at, said in enumerate(event.block_hashes):
                head = hashed(head, event.token_ids[at * event.block_size : (at + 1) * event.block_size])
                assert said == event_hash(head)

    def known(self, medium: str) -> dict[int, set[bytes]]:
        return {group: names for group, names in self.cached[medium].items() if names}

    def blocks_of(self, chunk: bytes, count: int) -> list[bytes]:
        """The `count` blocks of a chunk, by its own name."""
        names = [chunk]
        while len(names) < count:
            parent = self.parents[names[-1]]
            assert parent is not None
            names.append(parent)
        return names

    def forecast(self, tokens: Sequence[int], block_size: int, media: tuple[str, ...] = ("GPU", "CPU")) -> int:
        """Tokens that the engine finds of a prompt without salt, where all of a model's layers see all tokens."""
        names = names_of(tokens, block_size)
        device, cpu = (self.cached[medium][0] if medium in media else set() for medium in ("GPU", "CPU"))
        hit = _leading(name in device for name in names) * block_size
        size = CHUNK // block_size
        chunks = [names[at : at + size] for at in range(0, len(names) - size + 1, size)]
        first = hit // CHUNK
        return max(hit, (first + _leading(cpu.issuperset(chunk) for chunk in chunks[first:])) * CHUNK)

    def forecast_of_state(self, tokens: Sequence[int], block_size: int) -> int:
        """Tokens of a prompt without salt that an engine of a model with a state finds on its device."""
        names = names_of(tokens, block_size)
        known = _leading(name in self.cached["GPU"][0] for name in names) if self._has_blocks else len(names)
        ends = [count for count in range(1, known + 1) if event_hash(names[count - 1]) in self.snapshots["GPU"]]
        return max(ends, default=0) * block_size

    @property
    def _has_blocks(self) -> bool:
        return 0 not in self._state_groups


def names_of(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Names of a prompt's blocks, without salt and without the last token."""
    head, names = chain_root(None, None), []
    for start in range(0, len(tokens) - block_size, block_size):
        head = hashed(head, tokens[start : start + block_size])
        names.append(head)
    return names


def _leading(each: Iterable[bool]) -> int:
    count = 0
    for there in each:
        if not there:
            break
        count += 1
    return count


# ---- over ZeroMQ ----


def publisher_port() -> int:
    """The first of four that are free, as are those for what is asked for again."""
    return free_port((1, 2, 3, *range(REPLAY_PORT_OFFSET, REPLAY_PORT_OFFSET + 4)))


@contextmanager
def listening(context: "zmq.Context[Any]", port: int, topic: str = "", host: str = "127.0.0.1") -> Iterator["zmq.Socket[bytes]"]:
    with context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.IPV6, ":" in host)
        sub.connect(f"tcp://{host}:{port}")
        sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        yield sub


class Follower:
    """Hears one engine core's batches from the first on; asks again for those that it missed."""

    def __init__(self, context: "zmq.Context[Any]", port: int) -> None:
        self._replayed = lambda first: replay(context, port, first)
        self._next = 0

    def batches(self, sub: "zmq.Socket[bytes]", quiet_ms: int) -> Iterator[Batch]:
        """Until nothing has come for so long."""
        yield from self._again()
        while sub.poll(quiet_ms):
            _, number, batch = take(sub)
            if number > self._next:
                yield from self._again()
            elif number == self._next:
                self._next += 1
                yield batch

    def _again(self) -> Iterator[Batch]:
        for number, batch in self._replayed(self._next):
            assert number == self._next, "as many are kept"
            self._next += 1
            yield batch


def take(sub: "zmq.Socket[bytes]") -> tuple[bytes, int, Batch]:
    assert sub.poll(5000), "nothing came"
    topic, number, payload = sub.recv_multipart()
    return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)


def replay(context: "zmq.Context[Any]", port: int, first: int, host: str = "127.0.0.1") -> list[tuple[int, Batch]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IPV6, ":" in host)
        dealer.connect(f"tcp://{host}:{port + REPLAY_PORT_OFFSET}")
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            assert dealer.poll(5000), "the end did not come"
            empty, number, payload = dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)))
