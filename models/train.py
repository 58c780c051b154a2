"""Trains starling-pydoc, the small model that `make demo` and the end-to-end tests serve, on CPU, in minutes.

    python models/train.py --out models/starling-pydoc --minutes 15 [--seed 0] [--threads 2]

The same seed and number of steps on the same Python give the same batches; with `--minutes`, how many steps
there is time for depends on the machine. A run that was interrupted goes on with `--resume`.
"""

import argparse
from pathlib import Path
from time import perf_counter

import card
import torch
from chat import Questions
from corpus import load
from heldout import HeldOut, calibrate, document_loss, held_out_texts, measure
from run import Budget, Run
from tokenizers import Tokenizer
from tokens import (
    END,
    END_OF_TEXT,
    Windows,
    file_documents,
    rendered,
    save_tokenizer,
    token_id,
    train_tokenizer,
)
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096
REPORT_SECONDS, SAVE_SECONDS = 4.0, 60.0
CURVE_POINTS = 20


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """About five million parameters; heads of 64 because attention kernels are made for them."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config).bfloat16()


def train(run: Run, held_out: HeldOut, tokenizer: Tokenizer, checkpoint: Path) -> None:
    """To the end: a line every few seconds, a point of the curve every 5%, a checkpoint every minute."""
    reported = saved = perf_counter()
    recent: list[float] = []
    point = int(run.done * CURVE_POINTS) + 1
    for loss in run.steps():
        recent.append(loss)
        at, mean = run.progress, sum(recent) / len(recent)
        if perf_counter() - reported > REPORT_SECONDS:
            reported, left = perf_counter(), at.seconds * (1 / run.done - 1)
            speed = f"{at.tokens / at.seconds:.0f} tokens/s"
            print(f"{run.done:6.1%} step {at.step} loss {mean:.3f} {speed} ETA {left:.0f} s", flush=True)
        if run.done >= point / CURVE_POINTS:
            point += 1
            total, count = document_loss(run.model, held_out)
            at.curve.append((at.step, at.tokens, mean, total / count))
            print(f"{run.done:6.1%} step {at.step} held-out loss {total / count:.3f}", flush=True)
            recent.clear()
        if perf_counter() - saved > SAVE_SECONDS:
            saved = perf_counter()
            run.save(checkpoint, tokenizer)
    run.save(checkpoint, tokenizer)


def save_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    ends = [token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=0.2,
        top_p=0.95,
        repetition_penalty=1.05,
        eos_token_id=ends,
        pad_token_id=ends[1],
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, out, CONTEXT)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    print("reading the documentation of this Python ...", flush=True)
    corpus = load()
    files, questions = file_documents(corpus.train), Questions(corpus.train)
    texts = [text for file in files for text in file]
    characters = sum(map(len, texts))
    print(f"{len(texts)} texts, {characters:,} characters; questions about {len(questions)} names", flush=True)
    # A resumed run keeps its tokenizer: with any other, its weights would mean nothing.
    saved = torch.load(options.checkpoint) if options.resume else None
    if saved:
        tokenizer = Tokenizer.from_str(saved["tokenizer"])
    else:
        tokenizer = train_tokenizer([*texts, *(rendered(c) for c in questions.one_each())])
    held_out = held_out_texts(tokenizer, corpus.held_out)

    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters; the first step takes longer", flush=True)
    budget = Budget(options.minutes * 60, options.steps)
    run = Run(Windows(tokenizer, files, questions), model, budget, options.seed, options.compile)
    if saved:
        run.resume(saved)
    train(run, held_out, tokenizer, options.checkpoint)

    temperature = calibrate(model, held_out)
    save_model(model, tokenizer, options.out)
    measured = measure(model, held_out)
    samples = card.samples(model, tokenizer, options.seed)
    facts = card.Facts(corpus, characters, len(questions), model, options.seed, temperature)
    card.write(options.out / "README.md", facts, run.progress, measured, samples)
    print(f"held-out loss {measured.loss:.3f}, perplexity {measured.perplexity:.1f}")
    for sample in samples:
        print(f"\n> {sample.question}\n{sample.text}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "starling-pydoc")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for training steps")
    parser.add_argument("--steps", type=int, help="this many steps instead, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/starling-pydoc.pt"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="faster; needs a C++ compiler")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
