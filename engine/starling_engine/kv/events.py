"""KV events tell routers which blocks are cached and which were removed, in vLLM's form.

The form is that of vllm/distributed/kv_events.py since its change 42892 (vLLM 0.24 and later): a batch is a positional array, an
event a map with its kind under "type". https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber

- A block's hash in an event is a number: the last 8 bytes of its prefix hash (`kv.hashing`). vLLM sends the same unless
  VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, and some listeners accept nothing else.
- Every KV group reports its own blocks under its `group_idx`; a prefix is a hit up to where all groups have what they need.
- Snapshots of a recurrent state are reported as blocks of the group behind all others, of vLLM's kind `mamba`. Each is the block
  of a prefix at whose end it lies, and only with it can the prefix be used up to there.
- A chunk of the CPU tier is reported as the blocks that it was copied from, with the same hashes as on the device.
  This is the form of vLLM's offloading connector with `self_describing_kv_events` (its change 43468), except that a block in two
  chunks is reported once.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from starling_engine.kv.hashing import HASH_BYTES
from starling_engine.kv.spec import ChunkedLocalSpec, KVGroup, KVSpec, LatentSpec, RunSpec, StateGroup

Medium = Literal["GPU", "CPU"]
"""vLLM's words for the device, whatever it is, and for the CPU tier."""


class BlockSpan(msgspec.Struct, gc=False):
    """Consecutive blocks of a prefix, after the block `parent` (None: they begin it).

    `tokens` are the tokens of all of them, empty unless events are published. `salt` is the prefix's cache salt.
    """

    hashes: list[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    salt: str | None

    def after(self, count: int) -> "BlockSpan":
        """Returns the span without its first `count` blocks."""
        if not count:
            return self
        tokens = self.tokens[len(self.tokens) // len(self.hashes) * count :]
        return BlockSpan(self.hashes[count:], self.hashes[count - 1], tokens, self.salt)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    """Consecutive blocks of a prefix, the first after `parent_block_hash` (None: it begins the prefix).

    `token_ids` are the tokens of all of them. `extra_keys` has for each block the parts of its hash apart from tokens: in a
    prefix's first block the salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: Medium
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`ts` is seconds since the Unix epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventLog:
    """Events since the last `take`, while it is open: without anybody who listens, nothing is noted.

    One that is `published` is open all the time, and its events have tokens. The very first is AllBlocksCleared: a listener may
    know an earlier engine at this address.
    """

    def __init__(self, groups: Sequence[KVGroup], state: StateGroup | None = None, *, published: bool = True) -> None:
        self.published = self.is_open = published
        self._forms = [(group.spec.block_size, _kind(group.spec), group.spec.window or None) for group in groups]
        """Block size, kind and window of each group's events."""
        self._state_group = len(groups)
        if state is not None:
            self._forms.append((state.block_size, "mamba", None))
        self._snapshots: dict[Medium, set[bytes]] = {"GPU": set(), "CPU": set()}
        """Snapshots that listeners know of."""
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._growing: dict[tuple[Medium, int], BlockStored] = {}
        """Event that the next blocks of a medium and group may be added to."""
        self._num_stored = 0
        """Blocks that listeners know as stored, each once for every medium and group."""
        self.emptied()

    def open(self, device: Collection[tuple[int, bytes]], host: Collection[tuple[int, bytes]]) -> None:
        """Begins to note events. Listeners know of these blocks, by their group and hash."""
        self.is_open, self._num_stored = True, len(device) + len(host)
        self._snapshots = {
            "GPU": {name for group, name in device if group == self._state_group},
            "CPU": {name for group, name in host if group == self._state_group},
        }

    def close(self) -> None:
        """Notes nothing any more, unless it is published."""
        self.is_open = self.published
        if not self.is_open:
            self.take()

    def stored(self, group: int, span: BlockSpan, medium: Medium = "GPU") -> None:
        """Reports blocks that were stored now. Callers ask `is_open` first: a span has its cost."""
        self._num_stored += len(span.hashes)
        if group == self._state_group:
            self._snapshots[medium].update(span.hashes)
        parent = None if span.parent is None else event_hash(span.parent)
        event = self._growing.get((medium, group))
        if event is None or event.block_hashes[-1] != parent:
            event = self._growing[medium, group] = self._begin(group, parent, medium)
            self._events.append(event)
        event.block_hashes.extend(map(event_hash, span.hashes))
        event.token_ids.extend(span.tokens)
        assert event.extra_keys is not None
        first = (span.salt,) if span.salt is not None and span.parent is None else None
        event.extra_keys += [first, *[None] * (len(span.hashes) - 1)]

    def _begin(self, group: int, parent: int | None, medium: Medium) -> BlockStored:
        block_size, kind, window = self._forms[group]
        return BlockStored(
            block_hashes=[],
            parent_block_hash=parent,
            token_ids=[],
            block_size=block_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[],
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def removed(self, group: int, hashes: Sequence[bytes], medium: Medium = "GPU") -> None:
        """Reports blocks that were removed now. A snapshot is removed with the first of its own blocks, which bear its name."""
        if not self.is_open:
            return
        if group == self._state_group:
            hashes = [*self._snapshots[medium].intersection(name[:HASH_BYTES] for name in hashes)]
            self._snapshots[medium].difference_update(hashes)
        if not hashes:
            return
        self._num_stored -= len(hashes)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes.extend(map(event_hash, hashes))
        else:
            self._events.append(BlockRemoved([*map(event_hash, hashes)], medium, group))
            self._growing.clear()

    def emptied(self) -> None:
        """Called when a medium was cleared. With no block left in any medium, earlier events are dropped."""
        if self.is_open and not self._num_stored:
            self._events = [AllBlocksCleared()]
            self._growing.clear()

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        events, self._events = self._events, []
        self._growing.clear()
        return events


def event_hash(block_hash: bytes) -> int:
    """Returns a block's hash in events: 64 bits, unsigned."""
    return int.from_bytes(block_hash[-8:], "big")


def _kind(spec: KVSpec) -> str:
    if isinstance(spec, LatentSpec | RunSpec):
        return "mla_attention"
    if isinstance(spec, ChunkedLocalSpec):
        return "chunked_local_attention"
    return "sliding_window" if spec.window else "full_attention"
