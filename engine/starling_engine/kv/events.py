"""What is cached and what no longer is, as routers that look for prefixes want to hear it, in the form in which vLLM says it.

The form is that of vllm/distributed/kv_events.py since its change 42892 (vLLM 0.24 and later): a batch is a positional array, an
event a map with its kind under "type". https://docs.vllm.ai/en/stable/examples/online_serving/kv_events_subscriber

A block's hash is its name, 32 bytes (`kv.hashing`): the chain's value, so it stands for the prefix, adapter and salt included.
Every KV group tells of its own blocks under its `group_idx`; a prefix is a hit as far as all groups have what they need of it.
"""

from collections.abc import Sequence

import msgspec

from starling_engine.kv.spec import KVGroup, KVSpec, LatentSpec

MEDIUM = "GPU"
"""vLLM's word for the device, whatever it is."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    """Blocks that follow each other in one prefix, the first after `parent_block_hash` (None: it begins the prefix).

    `token_ids` are those of all of them. `extra_keys` has for each block what besides tokens went into its hash: the adapter, and
    in a prefix's first block its media's hashes and its salt.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
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
    block_hashes: list[bytes]
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
        self._growing: list[BlockStored | None] = []
        """Of each group, what its next block may be added to."""
        self.cleared()

    def stored(
        self, group: int, name: bytes, parent: bytes | None, tokens: Sequence[int], adapter: str | None, salts: tuple[str, ...]
    ) -> None:
        """One block has got a name. `salts` are of the whole prefix."""
        event = self._growing[group]
        if event is None or parent is None or event.block_hashes[-1] != parent:
            event = self._growing[group] = self._begin(group, parent, adapter)
            self._events.append(event)
        event.block_hashes.append(name)
        event.token_ids.extend(tokens)
        assert event.extra_keys is not None
        keys = (*([adapter] if adapter else []), *(salts if parent is None else ()))
        event.extra_keys.append(keys or None)

    def _begin(self, group: int, parent: bytes | None, adapter: str | None) -> BlockStored:
        spec = self._specs[group]
        return BlockStored(
            block_hashes=[],
            parent_block_hash=parent,
            token_ids=[],
            block_size=spec.block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=adapter,
            extra_keys=[],
            group_idx=group,
            kv_cache_spec_kind=_kind(spec),
            kv_cache_spec_sliding_window=spec.window or None,
        )

    def removed(self, group: int, name: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name], MEDIUM, group))
            self._growing = [None] * len(self._specs)

    def cleared(self) -> None:
        """Nothing is cached, so what has been said before is of no interest."""
        self._events = [AllBlocksCleared()]
        self._growing = [None] * len(self._specs)

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        events, self._events = self._events, []
        self._growing = [None] * len(self._specs)
        return events


def _kind(spec: KVSpec) -> str:
    if isinstance(spec, LatentSpec):
        return "mla_attention"
    return "sliding_window" if spec.window else "full_attention"
