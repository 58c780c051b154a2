"""What is cached and what no longer is, as routers that look for prefixes want to hear it, in the form in which vLLM says it.

The form is that of vllm/distributed/kv_events.py since its change 42892 (vLLM 0.24 and later): a batch is a positional array, an
event a map with its kind under "type". https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber

A block's hash is of its name (`kv.hashing`: the chain's value, so it stands for the prefix, adapter and salt included) the last 8
bytes as a number, which is what vLLM says unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, and all that some listeners take.
Every KV group tells of its own blocks under its `group_idx`; a prefix is a hit as far as all groups have what they need of it.
A chunk of the CPU tier is told of as the blocks that it was copied from, so that a listener knows them on the device and there by
the same names. That is the form of vLLM's offloading connector with `self_describing_kv_events` (its change 43468), but that a
block which two chunks have is told of once.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec

Medium = Literal["GPU", "CPU"]
"""vLLM's words for the device, whatever it is, and for the CPU tier."""


class BlockSpan(msgspec.Struct, gc=False):
    """Blocks that follow each other in one prefix, after the block `parent` (None: they begin it).

    `tokens` are those of all of them, and empty where nobody is told. `salts` are of the whole prefix: what besides the adapter
    went into the chain's root.
    """

    names: list[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    adapter: str | None
    salts: tuple[str, ...]

    def after(self, count: int) -> "BlockSpan":
        """Without its first blocks."""
        if not count:
            return self
        tokens = self.tokens[len(self.tokens) // len(self.names) * count :]
        return BlockSpan(self.names[count:], self.names[count - 1], tokens, self.adapter, self.salts)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    """Blocks that follow each other in one prefix, the first after `parent_block_hash` (None: it begins the prefix).

    `token_ids` are those of all of them. `extra_keys` has for each block what besides tokens went into its hash: the adapter, and
    in a prefix's first block its media's hashes and its salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`ts` is seconds since the Unix epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventLog:
    """Events since the last `take`. The first of all says that nothing is cached: whoever listens may know another engine here."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._specs = [group.spec for group in groups]
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._growing: dict[tuple[Medium, int], BlockStored] = {}
        """Of each medium and group, what its next blocks may be added to."""
        self._held = 0
        """Blocks that are told to be there, each once for every medium and group."""
        self.emptied()

    def stored(self, group: int, span: BlockSpan, medium: Medium = "GPU") -> None:
        """These blocks are there from now on, which they were not."""
        self._held += len(span.names)
        parent = None if span.parent is None else block_hash(span.parent)
        event = self._growing.get((medium, group))
        if event is None or event.block_hashes[-1] != parent:
            event = self._growing[medium, group] = self._begin(group, parent, span.adapter, medium)
            self._events.append(event)
        event.block_hashes.extend(map(block_hash, span.names))
        event.token_ids.extend(span.tokens)
        assert event.extra_keys is not None
        adapter = (span.adapter,) if span.adapter else ()
        first = (*adapter, *(span.salts if span.parent is None else ()))
        event.extra_keys += [first or None, *[adapter or None] * (len(span.names) - 1)]

    def _begin(self, group: int, parent: int | None, adapter: str | None, medium: Medium) -> BlockStored:
        spec = self._specs[group]
        return BlockStored(
            block_hashes=[],
            parent_block_hash=parent,
            token_ids=[],
            block_size=spec.block_size,
            lora_id=None,
            medium=medium,
            lora_name=adapter,
            extra_keys=[],
            group_idx=group,
            kv_cache_spec_kind=_kind(spec),
            kv_cache_spec_sliding_window=spec.window or None,
        )

    def removed(self, group: int, names: Sequence[bytes], medium: Medium = "GPU") -> None:
        """These blocks were there, and are no more."""
        self._held -= len(names)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, group):
            last.block_hashes.extend(map(block_hash, names))
        else:
            self._events.append(BlockRemoved([*map(block_hash, names)], medium, group))
            self._growing.clear()

    def emptied(self) -> None:
        """One medium has given up what it could. With nothing left in any, what has been said before is of no interest."""
        if not self._held:
            self._events = [AllBlocksCleared()]
            self._growing.clear()

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        events, self._events = self._events, []
        self._growing.clear()
        return events


def block_hash(name: bytes) -> int:
    """64 bits, unsigned."""
    return int.from_bytes(name[-8:], "big")


def _kind(spec: KVSpec) -> str:
    if isinstance(spec, LatentSpec):
        return "mla_attention"
    return "sliding_window" if spec.window else "full_attention"
