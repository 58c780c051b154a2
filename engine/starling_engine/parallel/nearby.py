"""Which ranks can share memory."""

import hashlib
import tempfile
from pathlib import Path

import torch

from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.shared import shared_folder

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def share_memory(ranks: Communicator) -> bool:
    """Whether all of them see the same files in the folder for shared memory; all get the same answer.

    Ranks of one machine need not: pods have a folder each.
    """
    own = torch.frombuffer(bytearray(_identity()), dtype=torch.uint8)
    return all(torch.equal(other, own) for other in ranks.all_gather(own))


def _identity() -> bytes:
    """[32] of this boot of this machine, and the mounted file system."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    folder = Path(shared_folder() or tempfile.gettempdir())
    return hashlib.sha256(f"{boot} {folder.stat().st_dev} {folder}".encode()).digest()
