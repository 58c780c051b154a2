"""Python imports this by itself where its folder is on the path: see bench/gpu/busy.py. In an engine core it waits for orders to
profile; in every other process it does nothing.
"""

import os
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("STARLING_BENCH_WATCH")


def _serve(folder: Path) -> None:
    """File go-N with a number of seconds in it is answered by trace-N.json. Ends with its process."""
    done: set[str] = set()
    while True:
        time.sleep(0.02)
        for order in [path for path in folder.glob("go-*") if path.name not in done and path.read_text()]:
            done.add(order.name)
            _profile(float(order.read_text()), folder / order.name.replace("go", "trace"))


def _profile(seconds: float, trace: Path) -> None:
    """Kernels are traced whatever thread launches them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        time.sleep(seconds)
    unfinished = trace.with_suffix(".part.json")
    profiler.export_chrome_trace(str(unfinished))
    unfinished.rename(trace.with_suffix(".json"))


if FOLDER and "starling_engine.core" in sys.orig_argv:
    threading.Thread(target=_serve, args=(Path(FOLDER),), name="bench-watch", daemon=True).start()
