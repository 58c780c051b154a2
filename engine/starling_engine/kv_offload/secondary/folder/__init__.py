"""The filesystem tier: chunks in a folder, which engines, their restarts and other nodes share.

A cache: files are never flushed to the disk, for their checksums find whatever a crash of the machine tears. Guarantees:
docs/kv-cache.md.
"""

from starling_engine.kv_offload.secondary.folder.opening import open_folder
from starling_engine.kv_offload.secondary.folder.tier import FolderTier

__all__ = ["FolderTier", "open_folder"]
