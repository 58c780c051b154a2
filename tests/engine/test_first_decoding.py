"""Threads may be the first to decode a type, and several of them at once: msgspec crashes when its type is not made before."""

import subprocess
import sys

ALL_AT_ONCE = """
import sys, threading
{setup}

def run():
    gate.wait()
    first()

sys.setswitchinterval(1e-6)
gate = threading.Barrier(8)
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

HEADER = """
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.object_file import decode_header, encode_header, make_header

key = ObjectKey(b"name", 0, ChunkPart(0, 2, 0, 1))
page = memoryview(encode_header(make_header(Fingerprint("model", "float32", b"digest"), key, memoryview(bytes(64)))))
first = lambda: decode_header(page)
"""


def test_threads_may_be_the_first_to_read_headers() -> None:
    """Checks that threads decode at once: if the first one made the header's type, most such processes end by SIGSEGV."""
    for _ in range(4):
        ended = subprocess.run([sys.executable, "-c", ALL_AT_ONCE.format(setup=HEADER)], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
