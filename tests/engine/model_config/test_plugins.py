"""Architectures that installed packages add: real distributions in a folder on PYTHONPATH, read by processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from starling_engine.model_config.registry import DEFINITIONS

from tests.engine.checkpoints import PROMPT, Variant, answer, write_checkpoint
from tests.engine.real_engine import MODEL
from tests.engine.written import copy_tokenizer

HELIUM = """
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

def traits(config: Fields) -> Traits:
    return Traits(qkv_bias=config.boolean("attention_bias", False), paired_rope=True)

HELIUM = ModelDefinition(architecture="HeliumForCausalLM", traits=traits, head_dim=128, rope_theta=1e5, rms_eps=1e-8)
"""
"""Kyutai's Helium, which Starling does not have: Llama whose heads rotate in pairs."""
SERVE = """
import json, sys
from starling_engine import LLM, SamplingParams

if __name__ == "__main__":
    path, prompt, tokens, ranks = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    settings = dict(dtype="float32", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, num_threads=1)
    with LLM(path, tensor_parallel_size=ranks, kv_cache_memory_bytes=16 << 20, show_progress=False, **settings) as llm:
        wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        (found,) = llm.generate({"prompt_token_ids": prompt}, wanted, use_tqdm=False)
    out = found.outputs[0]
    chosen = [each[token].logprob for each, token in zip(out.logprobs, out.token_ids)]
    print(json.dumps({"tokens": list(out.token_ids), "logprobs": chosen}))
"""
FIND = """
import sys
from starling_engine.model_config.registry import find_definition
from starling_engine.errors import StarlingError
for name in sys.argv[1:]:
    try:
        print(find_definition([name]).architecture)
    except StarlingError as error:
        print(f"{type(error).__name__}: {error}")
"""

CACHED = """
import sys
from dataclasses import replace
from pathlib import Path
from starling_engine.kv_offload.secondary.tiers import cached_as
from starling_engine.model_config.config import load_model_config
from tests.engine.workers import plain_worker

for name in sys.argv[2:]:
    print(cached_as(replace(load_model_config(Path(sys.argv[1])), architecture=name), plain_worker()))
"""


def install(folder: Path, distribution: str, points: dict[str, str], version: str = "1.5", **modules: str) -> None:
    """Puts a distribution into the folder as pip does: modules beside a dist-info with its metadata."""
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[starling.models]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def run(folder: Path, code: str, *arguments: str) -> str:
    script = folder / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_another_package_answers_as_transformers_does(tmp_path: Path, ranks: int) -> None:
    """The server, its core and, with two ranks, the workers look the architecture up: each is a process of its own."""
    assert "HeliumForCausalLM" not in DEFINITIONS
    install(tmp_path / "site", "starling-helium", {"HeliumForCausalLM": "helium_of_starling:HELIUM"}, helium_of_starling=HELIUM)
    vocab = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
    folder = tmp_path / "model"
    model = write_checkpoint(folder, Variant("helium", {"head_dim": 16, "vocab_size": vocab}))
    copy_tokenizer(folder)
    reference = answer(folder, model, steps=16)
    found = json.loads(run(tmp_path / "site", SERVE, str(folder), json.dumps(reference.prompt), "16", str(ranks)).splitlines()[-1])
    assert found["tokens"] == reference.tokens
    assert len(set(reference.tokens)) > 4, "the tokens vary"
    expected = torch.log_softmax(reference.logits[PROMPT - 1 : -1], -1)[range(16), reference.tokens]
    torch.testing.assert_close(torch.tensor(found["logprobs"]), expected, atol=1e-3, rtol=0)


def test_a_base_model_is_the_decoder_of_a_packages_architecture(tmp_path: Path) -> None:
    install(tmp_path, "helium", {"HeliumForCausalLM": "helium_of_starling:HELIUM"}, helium_of_starling=HELIUM)
    assert run(tmp_path, FIND, "HeliumModel", "LlamaForCausalLM").split() == ["HeliumForCausalLM", "LlamaForCausalLM"]


def test_a_package_that_cannot_be_used_is_named_where_its_architecture_is_asked_for_and_only_there(tmp_path: Path) -> None:
    broken = {
        "AForCausalLM": "absent_module:A",
        "BForCausalLM": "of_starling:ABSENT",
        "CForCausalLM": "of_starling:WORD",
        "DForCausalLM": "of_starling:HELIUM",
        "EForCausalLM": "raising",
        "Qwen3ForCausalLM": "of_starling:HELIUM",
    }
    raising = "raise RuntimeError('no such device')"
    install(tmp_path, "broken", broken, of_starling=f"{HELIUM}\nWORD = 'a word'\n", raising=raising)
    install(tmp_path, "twin", {"FForCausalLM": "of_starling:HELIUM"})
    install(tmp_path, "other-twin", {"FForCausalLM": "of_starling:HELIUM"})
    names = [*broken, "FForCausalLM", "LlamaForCausalLM", "EForCausalML"]
    found = dict(zip(names, run(tmp_path, FIND, *names).splitlines(), strict=True))
    for name, words in {
        "AForCausalLM": ["absent_module:A", "ModuleNotFoundError", "'absent_module'"],
        "BForCausalLM": ["AttributeError", "ABSENT"],
        "CForCausalLM": ["must be a ModelDefinition, not a str"],
        "DForCausalLM": ["another name than its definition: HeliumForCausalLM"],
        "EForCausalLM": ["RuntimeError: no such device"],
        "Qwen3ForCausalLM": ["Starling has this architecture itself", "uninstall the package"],
    }.items():
        begins = f"ModelPackageError: entry point {name} = {broken[name]} of broken 1.5 (starling.models)"
        assert found[name].startswith(begins) and all(word in found[name] for word in words), found[name]
    assert all(word in found["FForCausalLM"] for word in ("of twin 1.5", "of other-twin 1.5", "uninstall all but one"))
    assert found["LlamaForCausalLM"] == "LlamaForCausalLM"
    assert found["EForCausalML"].startswith("UnsupportedModel") and "the nearest is EForCausalLM" in found["EForCausalML"]


def test_keys_of_another_version_of_a_package_are_not_found(tmp_path: Path) -> None:
    """The weights are the same, and what is computed from them may differ."""
    found = []
    for version in ("1.5", "1.6"):
        install(tmp_path / version, "helium", {"HeliumForCausalLM": "helium_of_starling:HELIUM"}, version)
        found.append(run(tmp_path / version, CACHED, MODEL, "HeliumForCausalLM", "LlamaForCausalLM").splitlines())
    (first, own), (second, own_again) = found
    assert own == own_again and (first, second) == (f"{own}, as in helium 1.5", f"{own}, as in helium 1.6")
