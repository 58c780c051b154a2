"""What the arguments of the tiers have to hold, on their own and with each other."""

from pathlib import Path
from typing import TYPE_CHECKING

from starling_engine.errors import ConfigError
from starling_engine.kv.endpoint import parse_endpoint
from starling_engine.tiers.store.address import parse_address

if TYPE_CHECKING:
    from starling_engine.config import EngineArgs

LEAST_FOLDER = 64 << 20
"""Bytes; with less, what is written goes again before it is read."""


def check_tiers(args: "EngineArgs") -> None:
    """Raises ConfigError naming the first argument that can never work."""
    if args.kv_cpu_bytes < 0:
        raise ConfigError(f"must be at least 0, got {args.kv_cpu_bytes}", "kv_cpu_bytes")
    _check_folder(args)
    if args.kv_store is not None:
        parse_address(args.kv_store)
    if args.kv_events is not None:
        parse_endpoint(args.kv_events)
    _check_needs(args)


def _check_folder(args: "EngineArgs") -> None:
    path, limit = args.kv_fs_path, args.kv_fs_bytes
    if limit is not None and path is None:
        raise ConfigError("is the size of the folder that kv_fs_path names; give both", "kv_fs_bytes")
    if path is None:
        return
    if not Path(path).is_absolute():
        raise ConfigError(f"must be an absolute path, for engines that start elsewhere are to find it, got {path!r}", "kv_fs_path")
    if limit is None:
        raise ConfigError("needs kv_fs_bytes: how large the folder may grow, such as 10GiB", "kv_fs_path")
    if limit < LEAST_FOLDER:
        raise ConfigError(f"must be at least 64MiB ({LEAST_FOLDER} bytes), got {limit}", "kv_fs_bytes")


def _check_needs(args: "EngineArgs") -> None:
    """What means nothing without something else is refused, rather than ignored."""
    tiers = {"kv_cpu_bytes": args.kv_cpu_bytes, "kv_fs_path": args.kv_fs_path, "kv_store": args.kv_store}
    named = [name for name, value in tiers.items() if value]
    for name in (*named, *(["kv_events"] if args.kv_events else [])):
        if not args.enable_prefix_caching:
            raise ConfigError("needs enable_prefix_caching: what is kept is found by the prefixes of prompts", name)
    if args.preempt == "swap" and not named:
        raise ConfigError('"swap" needs kv_cpu_bytes, host memory for what is swapped out', "preempt")
    if args.kv_cpu_policy != "lru" and not named:
        raise ConfigError("needs kv_cpu_bytes: there is no CPU tier that it could be the policy of", "kv_cpu_policy")
    if args.kv_fs_direct != "auto" and args.kv_fs_path is None:
        raise ConfigError("needs kv_fs_path: there is no folder whose files it could be about", "kv_fs_direct")
