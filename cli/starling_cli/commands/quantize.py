"""`starling quantize`: a checkpoint in fewer bits, for Starling, vLLM and transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from starling_cli.commands.failures import fail


def quantize(
    model: Annotated[str, typer.Argument(help="A folder of safetensors, or org/name[@revision] of the Hugging Face hub.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; new, or empty.")],
    scheme: Annotated[
        str, typer.Option("--scheme", help="W4A16, W8A16, W8A8 or FP8_DYNAMIC, as compressed-tensors names them.")
    ] = "W4A16",
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Columns that share a scale, of W4A16: 128 unless given; 32 loses less.")
    ] = None,
) -> None:
    """Write a checkpoint whose weights have 8 or 4 bits. They are rounded, without calibration."""
    from safetensors import SafetensorError
    from starling_engine.errors import ConfigError, ModelError
    from starling_engine.weights.hub import resolve_model
    from starling_engine.weights.quantized.writer import SCHEMES, quantize_checkpoint
    from tqdm import tqdm

    scheme = scheme.upper()
    if scheme not in SCHEMES:
        fail(f"--scheme {scheme} is not known", f"take one of {', '.join(SCHEMES)}", 2)
    chosen = SCHEMES[scheme]
    if group_size is not None:
        if chosen.group is None or group_size < 32 or group_size % 32:
            fail(f"--group-size {group_size} does not go with {scheme}", "it is for W4A16, and a multiple of 32", 2)
        chosen = replace(chosen, group=group_size)
    try:
        source = resolve_model(model)
        with tqdm(unit=" tensors", delay=0.1) as bar:  # there is none where the checkpoint is refused at once

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            written = quantize_checkpoint(source, out, chosen, show)
    except ConfigError as error:
        fail(str(error), "name a folder that is new or empty")
    except ModelError as error:
        fail(str(error), "take a folder of safetensors in bfloat16, float16 or float32 whose columns suit the group size")
    except (OSError, SafetensorError) as error:
        fail(f"{out} could not be written: {error}", "remove what was written, and make room")
    size = f"{written / 1e9:.2f} GB" if written >= 1e8 else f"{written / 1e6:.1f} MB"
    typer.echo(f"{out}: {size} of weights in {scheme}; starling serve {out}")
