"""Starts an engine and asks it for a token; prints a line of JSON.

usage: python -m bench.gpu.first_token FOLDER [--toy]
"""

import time

BEGAN = time.time()

import json  # noqa: E402 - the clock starts before anything is loaded
import sys  # noqa: E402
from typing import Any  # noqa: E402

from starling_engine import LLM, SamplingParams  # noqa: E402


def main() -> None:
    place: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 64 << 20} if "--toy" in sys.argv else {"device": "cuda"}
    with LLM(sys.argv[1], dtype="bfloat16", max_model_len=2048, show_progress=False, **place) as llm:
        llm.generate([{"prompt_token_ids": list(range(100, 132))}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        took = time.time() - BEGAN
        (((phases),),) = llm.engine.cores.start_seconds
    print(json.dumps({"seconds": took, "phases": phases}), flush=True)


if __name__ == "__main__":
    main()
