"""From the engine's arguments to a tier."""

import os
from pathlib import Path

from starling_engine.config import Direct
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.files import can_go_direct
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, this_process
from starling_engine.kv_offload.secondary.folder.tier import FolderTier


def open_folder(path: str, limit: int, direct: Direct, fingerprint: Fingerprint) -> FolderTier:
    """The tier in the folder `path`, which is made where it is missing; `limit` in bytes, of all models together.

    Returns within milliseconds however much it holds; what there is, is counted in the background. A disk that is out of order
    makes a tier that is so too, until it works again. Raises ConfigError for what can never work.
    """
    root = Path(path).expanduser()
    if limit < 1:
        raise ConfigError(f"must be at least 1, got {limit}", "kv_fs_bytes")
    if os.path.exists(root) and not os.path.isdir(root):  # noqa: PTH110, PTH112 - these never raise
        raise ConfigError(f"{root} is a file, not a folder", "kv_fs_path")
    layout = FolderLayout(root, fingerprint.digest, this_process())
    try:
        layout.make()
        empty = layout.is_empty()
    except OSError as error:
        tier = FolderTier(layout, fingerprint, limit, direct == "on")
        tier.report(error)
    else:
        tier = FolderTier(layout, fingerprint, limit, _passes_by_cache(layout, direct), empty)
    tier.keeper.start()
    return tier


def _passes_by_cache(layout: FolderLayout, direct: Direct) -> bool:
    """Whether to use O_DIRECT; "auto" where it is seen to work. Raises ConfigError where "on" does not."""
    if direct == "off":
        return False
    can = can_go_direct(layout.new_temporary())
    if direct == "on" and can is False:
        raise ConfigError(f"the file system of {layout.root} knows no O_DIRECT; possible are auto and off", "kv_fs_direct")
    return direct == "on" or bool(can)
