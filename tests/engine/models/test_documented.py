"""Rows of docs/models.md against the registry, and against the checkpoints that families are compared by."""

import re
from collections.abc import Iterator
from pathlib import Path

from starling_engine.model_config.registry import DEFINITIONS, find_definition
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.checkpoints import FAMILIES, VARIANTS
from tests.engine.encoder_checkpoints import ENCODERS

DOCS = Path(__file__).parents[3] / "docs/models.md"
TEXT_PARTS = {
    *("Gemma3ForConditionalGeneration", "KimiK25ForConditionalGeneration", "Llama4ForConditionalGeneration"),
    *(
        "Mistral3ForConditionalGeneration",
        "Mistral4ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
}
ELSEWHERE = TEXT_PARTS | {"XLMRobertaLoRA"}
"""Compared by tests of their own: text parts of larger models, and the form of the authors."""


def documented() -> Iterator[tuple[str, str]]:
    """Yields each architecture that a table has in its first column, and the definition that serves it."""
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`(\w{3,}(?:ForCausalLM|ForConditionalGeneration|Model|LoRA))`", line.split("|")[1]):
                if not name.startswith("For"):
                    yield name, find_definition([name]).architecture


def compared() -> set[str]:
    """Returns the definitions that serve some checkpoint of a table of tests."""
    found = set[str]()
    for variant in (*VARIANTS.values(), *FAMILIES.values()):
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(variant.model_type, ())
        default = [known] if isinstance(known, str) else [*known]
        found.add(find_definition(variant.edits.get("architectures") or default).architecture)
    return found | {find_definition([encoder.model]).architecture for encoder in ENCODERS.values()}


def test_each_architecture_has_a_row_and_each_row_is_served() -> None:
    assert {architecture for _, architecture in documented()} == DEFINITIONS.keys()


def test_each_row_is_compared_with_transformers() -> None:
    assert DEFINITIONS.keys() - compared() == ELSEWHERE
