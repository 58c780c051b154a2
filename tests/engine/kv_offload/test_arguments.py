"""Arguments of the tiers: what goes together, and what is said of what does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starling_engine import LLM, EngineArgs
from starling_engine.errors import ConfigError
from starling_engine.frontend.resolve import resolve
from starling_engine.kv_offload.secondary.store.address import parse_address
from starling_engine.kv_offload.sizes import chunk_bytes, host_memory, host_slots, rank_slab_bytes, state_pieces
from starling_engine.ledger import HostMemory
from starling_engine.model_config.config import STATE_LENGTH

from tests.engine.checkpoints import FAMILIES, VARIANTS, write_checkpoint

FOLDER = {"kv_fs_path": "/kv", "kv_fs_bytes": "10GiB"}
STORE = "mooncake://s:50051?buffer=3MiB"
MIB = 1 << 20


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_cpu_bytes": "4GiB", "kv_cpu_policy": "arc", "preempt": "swap"},
        {"kv_fs_path": "/kv", "kv_fs_bytes": 64 << 20, "kv_fs_direct": "on", "preempt": "swap"},
        {"kv_store": "mooncake://store.kv.svc:50051"},
        {"kv_store": "mooncake://[::1]:50051?segment=4GiB&metadata=http://store:8080/metadata"},
        {"kv_events": "tcp://*:5557"},
        {"kv_events": "tcp://127.0.0.1:5557"},
        {"preempt": "recompute", "enable_prefix_caching": False},
    ],
)
def test_what_goes_together(arguments: dict[str, Any]) -> None:
    EngineArgs(model="m", **arguments)


def test_a_store_at_an_address_of_ipv6_keeps_its_brackets() -> None:
    address = parse_address("mooncake://[fd00::1]:50051")
    assert (str(address), address.metadata) == ("[fd00::1]:50051", "http://[fd00::1]:8080/metadata")


def test_sizes_become_bytes() -> None:
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": "64MiB", "kv_cpu_bytes": "500MB", **FOLDER}
    args = EngineArgs(model="m", **sizes)
    assert (args.kv_cache_memory_bytes, args.kv_cpu_bytes, args.kv_fs_bytes) == (64 << 20, 500_000_000, 10 << 30)


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes", "like 4GiB"),
        ({"kv_cpu_bytes": "4GX"}, "kv_cpu_bytes", "like 4GiB"),
        ({"kv_cpu_bytes": -1}, "kv_cpu_bytes", "at least 0"),
        ({"kv_cpu_bytes": 1, "kv_cpu_policy": "fifo"}, "kv_cpu_policy", "lru, arc"),
        ({"kv_cpu_policy": "arc"}, "kv_cpu_policy", "needs kv_cpu_bytes"),
        ({"kv_fs_path": "/kv"}, "kv_fs_path", "needs kv_fs_bytes"),
        ({"kv_fs_bytes": "1GiB"}, "kv_fs_bytes", "kv_fs_path"),
        ({**FOLDER, "kv_fs_path": "kv"}, "kv_fs_path", "absolute"),
        ({**FOLDER, "kv_fs_path": ""}, "kv_fs_path", "absolute"),
        ({**FOLDER, "kv_fs_bytes": "63MiB"}, "kv_fs_bytes", "at least 64MiB"),
        ({**FOLDER, "kv_fs_direct": "yes"}, "kv_fs_direct", "auto, on, off"),
        ({"kv_fs_direct": "on"}, "kv_fs_direct", "needs kv_fs_path"),
        ({"kv_store": "redis://store:50051"}, "kv_store", "mooncake://MASTER:PORT"),
        ({"kv_store": "mooncake://store"}, "kv_store", "mooncake://MASTER:PORT"),
        ({"kv_store": "mooncake://store:50051?segmnt=4GiB"}, "kv_store", "segmnt is not known"),
        ({"kv_store": "mooncake://store:50051?segment=lots"}, "kv_store", "like 4GiB"),
        ({"kv_events": "5557"}, "kv_events", r"tcp://\*:PORT"),
        ({"preempt": "swop"}, "preempt", "auto, recompute, swap"),
        ({"preempt": "swap"}, "preempt", "needs kv_cpu_bytes"),
        ({"kv_cpu_bytes": 1, "enable_prefix_caching": False}, "kv_cpu_bytes", "enable_prefix_caching"),
        ({**FOLDER, "enable_prefix_caching": False}, "kv_fs_path", "enable_prefix_caching"),
        ({"kv_store": "mooncake://s:1", "enable_prefix_caching": False}, "kv_store", "enable_prefix_caching"),
        ({"kv_events": "tcp://*:1", "enable_prefix_caching": False}, "kv_events", "enable_prefix_caching"),
    ],
)
def test_what_cannot_work_names_the_argument(arguments: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        EngineArgs(model="m", **arguments)
    assert raised.value.field == field


def test_a_script_is_told_the_same() -> None:
    with pytest.raises(ConfigError, match="kv_cpu_bytes: '4GX' is no size; write it like 4GiB"):
        LLM("m", kv_cpu_bytes="4GX")


@pytest.mark.parametrize("outside", [FOLDER, {"kv_store": "mooncake://s:50051"}], ids=["files", "store"])
def test_what_is_outside_passes_through_what_a_request_needs(tmp_path: Path, outside: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])

    def host_bytes(**fields: Any) -> int:
        tiers = resolve(EngineArgs(model=str(tmp_path), **outside, **fields))[2].worker.tiers
        assert tiers is not None
        return tiers.host_bytes

    chunk = host_bytes(max_model_len=64)
    assert host_bytes(max_model_len=256) == 4 * chunk
    assert host_bytes(max_model_len=256, kv_cache_memory_bytes=5 * chunk) == 4 * chunk
    assert host_bytes(max_model_len=256, kv_cache_memory_bytes=3 * chunk) == 3 * chunk, "no request brings more"
    assert host_bytes(max_model_len=256, kv_cache_memory_bytes=3 * chunk, kv_cpu_bytes=2 * chunk) == 2 * chunk


def test_a_state_passes_through_host_memory_too(tmp_path: Path) -> None:
    """A prefix of 64 tokens with its snapshot has room beside what is written back."""
    write_checkpoint(tmp_path, FAMILIES["qwen3.5"])
    _, model, config = resolve(EngineArgs(model=str(tmp_path), max_model_len=64, **FOLDER))
    worker, pieces = config.worker, len(state_pieces(model, config.worker))
    slots = host_slots(model, worker)
    assert pieces and slots - 1 - slots // 4 >= 1 + pieces
    few = (pieces + 1) * chunk_bytes(model, worker)
    with pytest.raises(ConfigError, match=rf"kv_cpu_bytes: .* 64 tokens and their state; .*{slots * chunk_bytes(model, worker)}"):
        resolve(EngineArgs(model=str(tmp_path), kv_cpu_bytes=few))


def test_a_state_alone_passes_through_slots_of_a_piece(tmp_path: Path) -> None:
    """Its sequences are as long as the engine likes; what is about keys and values is refused."""
    write_checkpoint(tmp_path, FAMILIES["falcon-mamba"])
    _, model, config = resolve(EngineArgs(model=str(tmp_path), **FOLDER))
    pieces, slab = state_pieces(model, config.worker), rank_slab_bytes(model, config.worker)
    assert len(pieces) > 2 and chunk_bytes(model, config.worker) == max(pieces) * slab
    assert 3 * 19 * 96 * 4 <= sum(pieces) * slab < 1.1 * 3 * 19 * 96 * 4, "of three layers with 16 + 3 rows of 96 channels"
    assert config.scheduler.max_model_len == STATE_LENGTH
    assert resolve(EngineArgs(model=str(tmp_path), max_model_len=1 << 20))[2].scheduler.max_model_len == 1 << 20
    for name, value in {"kv_cache_dtype": "fp8", "attention_backend": "torch"}.items():
        with pytest.raises(ConfigError, match=f"{name}: is not possible for a model without attention"):
            resolve(EngineArgs(model=str(tmp_path), **{name: value}))


@pytest.mark.parametrize(
    ("arguments", "planned", "passes"),
    [
        ({"kv_cpu_bytes": 8 * MIB}, HostMemory(cpu=8 * MIB, staged_for="kv_store"), False),
        (FOLDER, HostMemory(), True),
        ({**FOLDER, "kv_cpu_bytes": 8 * MIB}, HostMemory(cpu=8 * MIB), False),
        ({"kv_store": f"{STORE}&segment=5MiB"}, HostMemory(store=8 * MIB, staged_for="kv_store"), True),
        ({**FOLDER, "kv_store": STORE, "kv_cpu_bytes": 8 * MIB}, HostMemory(cpu=8 * MIB, store=3 * MIB), False),
    ],
)
def test_the_plan_has_what_each_tier_takes(tmp_path: Path, arguments: dict[str, Any], planned: HostMemory, passes: bool) -> None:
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    tiers = resolve(EngineArgs(model=str(tmp_path), max_model_len=64, **arguments))[2].worker.tiers
    found = host_memory(tiers)
    assert replace(found, staging=0) == planned
    assert bool(found.staging) == passes
    assert host_memory(None) == HostMemory()
