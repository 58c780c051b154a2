"""Measures what fewer bits cost: how much more texts that a model has not seen surprise it, in each scheme that Starling offers.

    python bench/perplexity.py [MODEL]

Without an argument it is the repository's own model. The texts are those that its training left out (models/heldout.py), which is
documentation of the running Python. Each is read alone. Writes results/perplexity_<instruction set>.md.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint import OWN_MODEL
from shared import machine, results
from starling_engine import LLM, SamplingParams
from starling_engine.frontend.resolve import CACHE_TYPES
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.weights.quantized.writer import SCHEMES, Scheme, quantize_checkpoint
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from corpus import load
from heldout import held_out_texts

READ = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
SMALL_GROUP = 32
PLAIN = "bfloat16"


def surprises(model: Path, texts: list[list[int]], **settings: Any) -> list[float]:
    """Returns -log p of each token of the texts but their first, in nats."""
    arguments = {"dtype": "bfloat16", "max_model_len": 1040, "enable_prefix_caching": False, "kv_cache_memory_bytes": 256 << 20}
    with LLM(str(model), **{**arguments, **settings}) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], READ, use_tqdm=False)
    rows = [(output.prompt_logprobs or [], output.prompt_token_ids or []) for output in outputs]
    return [-row[token].logprob for logprobs, ids in rows for row, token in zip(logprobs, ids, strict=True) if row]


def written(model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes the model in each scheme of `starling quantize`; yields the options, and the folder."""
    schemes: dict[str, Scheme] = {}
    for name, scheme in SCHEMES.items():
        schemes[f"--scheme {name}"] = scheme
        if scheme.group is not None:
            schemes[f"--scheme {name} --group-size {SMALL_GROUP}"] = replace(scheme, group=SMALL_GROUP)
    for at, (options, scheme) in enumerate(schemes.items()):
        quantize_checkpoint(model, folder / str(at), scheme)
        yield f"starling quantize {options}", folder / str(at)


def measured(model: Path, texts: list[list[int]]) -> Iterator[tuple[str, list[float]]]:
    """Yields each way's name, and what it says of the tokens."""
    yield PLAIN, surprises(model, texts)
    for name in ONLINE:
        yield f"--quantization {name}", surprises(model, texts, quantization=name)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in written(model, Path(folder)):
            yield name, surprises(path, texts)
    for name in dict.fromkeys(cache for cache in CACHE_TYPES.values() if cache is not None):
        yield f"--kv-cache-dtype {name}", surprises(model, texts, kv_cache_dtype=name)


def row(name: str, found: list[float], plain: list[float]) -> str:
    mean = statistics.fmean(found)
    differences = [a - b for a, b in zip(found, plain, strict=True)]
    more, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(found))
    change = "" if found is plain else f"{more:+.4f} ± {error:.4f}"
    return f"| {name if name == PLAIN else f'`{name}`'} | {mean:.4f} | {change} | {math.exp(mean):.2f} |"


def main() -> None:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else OWN_MODEL
    texts = held_out_texts(Tokenizer.from_file(str(model / "tokenizer.json")), load().held_out).documents
    count = sum(len(ids) - 1 for ids in texts)
    lines = [
        "# Perplexity",
        f"`python bench/perplexity.py`: {model.name}, {len(texts)} held-out documents, {count:,} tokens; {machine()}.",
        "Differences are paired by token, with the standard error of their mean. Weights are rounded without calibration.",
        "| | nats a token | more than bfloat16 | perplexity |\n|---|---:|---:|---:|",
    ]
    print("\n\n".join(lines))
    plain: list[float] = []
    for name, found in measured(model, texts):
        plain = plain or found
        lines[-1] += f"\n{row(name, found, plain)}"
        print(lines[-1].rpartition("\n")[2], flush=True)
    results("perplexity").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
