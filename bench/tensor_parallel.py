"""What splitting a model over two processes costs: two ranks of one thread beside one rank of two threads, the ideal split.

    python bench/tensor_parallel.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

The engines take turns on the same two cores. Writes bench/results/tensor_parallel.md.
"""

import statistics
import time
from pathlib import Path

from shared import machine, model_asked_for
from starling_engine import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "tensor_parallel.md"
CASES = ((1, 32, 32), (8, 128, 32), (1, 1024, 1))
TRIES = 7


def seconds(engine: LLM, batch: int, prompt: int, new: int, salt: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(salt * 31 + row * 7 + i) % 3000 + 100 for i in range(prompt)]} for row in range(batch)]
    began = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def engine(model: Path, ranks: int, threads: int) -> LLM:
    return LLM(
        str(model),
        max_model_len=2048,
        tensor_parallel_size=ranks,
        num_threads=threads,
        kv_cache_memory_bytes=(1 << 30) // ranks,
        enable_prefix_caching=False,
        seed=0,
    )


def main() -> None:
    model = model_asked_for()
    lines = [
        "# Tensor parallel on CPUs",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. Two cores: one rank with two threads, beside two ranks with one thread each.",
        "",
        "| | one rank (s) | two ranks (s) | cost of the split |",
        "|---|---:|---:|---:|",
    ]
    with engine(model, 1, 2) as one, engine(model, 2, 2) as two:
        for batch, prompt, new in CASES:
            times: list[list[float]] = [[], []]
            for attempt in range(TRIES):
                for which, tried in enumerate((one, two)):
                    times[which].append(seconds(tried, batch, prompt, new, attempt))
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            single, split = map(statistics.median, times)
            lines.append(f"| {batch} x {prompt} in, {new} out | {single:.2f} | {split:.2f} | {ratio - 1:+.0%} |")
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
