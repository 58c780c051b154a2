"""`python -m tests.engine.parallel.failing_worker VICTIM ADDRESS RANK`: one rank runs out of memory inside a step."""

import sys
from typing import Any

from starling_engine.models.decoder_layer import DecoderLayer
from starling_engine.worker.process.worker_process import main

CALLS = 20
"""Calls of a layer before one fails: past the warm-up."""


def fail_once() -> None:
    real, calls = DecoderLayer.forward, 0

    def forward(self: DecoderLayer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == CALLS:
            raise MemoryError("no more")
        return real(self, *args)

    DecoderLayer.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    victim = sys.argv.pop(1)
    if sys.argv[-1] == victim:
        fail_once()
    main()
