"""Heads in GGUF files: RoBERTa's, DistilBERT's and ModernBERT's, which score pairs or label texts; and Qwen3-Reranker's rest."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starling_engine.errors import UnsupportedModel
from starling_engine.gguf.metadata import GgufMetadata

ANSWERS = ("yes", "no")
"""Labels of a head that is two rows of a language model's: such a model, Qwen3-Reranker's, reads a pair through its template."""
PARTS: Mapping[str, str] = {"cls": "dense", "cls.norm": "norm", "cls.output": "out"}
"""Modules of a head, by fields of `HeadShape`."""
_DENSE, _OUT = "cls.weight", "cls.output.weight"
_LABELS = "classifier.output_labels"
_CLS, _RANK = 2, 4
"""Numbers of llama.cpp for pooling by the first token, and for models that score pairs."""


def ranks(data: GgufMetadata) -> bool:
    """Says if the file is of a model that scores pairs."""
    return bool(data.get("pooling_type") == _RANK)


def no_head(data: GgufMetadata, _name: str) -> dict[str, Any]:
    """Returns no fields, for a family whose heads are not read. Raises UnsupportedModel for a file with one."""
    if ranks(data):
        raise data.refused("pooling_type", "rank is not supported: serve the original checkpoint, whose head scores pairs")
    if (found := next((name for name in (_DENSE, _OUT) if name in data.file.tensors), None)) is not None:
        rule = "heads are not supported for this architecture; serve the original checkpoint"
        raise UnsupportedModel(f"{data.file.path}: {found}: {rule}")
    return {}


def encoder_head(data: GgufMetadata, name: str) -> dict[str, Any]:
    """Returns the fields of a head on top of the architecture `name`; none where the file has no head.

    Raises UnsupportedModel for half a head: the converter leaves out BERT's dense layer, without which scores are others.
    """
    tensors = data.file.tensors
    missing = [each for each in (_DENSE, _OUT) if each not in tensors]
    if len(missing) == len((_DENSE, _OUT)) and not ranks(data):
        return {}
    if missing:
        rule = "a head without it gives other scores than the authors' model; serve the original checkpoint"
        raise UnsupportedModel(f"{data.file.path}: {missing[0]} is missing: {rule}")
    labels = _labels(data)
    return _fields(name, labels) if labels else {**_fields(name, ()), "num_labels": tensors[_OUT].shape[0]}


def modernbert_head(data: GgufMetadata, name: str) -> dict[str, Any]:
    """Returns the fields of ModernBERT's head, which pools by the mean unless the file says otherwise, as in llama.cpp."""
    found = encoder_head(data, name)
    pooling = "cls" if data.get("pooling_type") == _CLS else "mean"
    return {**found, "classifier_pooling": pooling, "classifier_bias": "cls.bias" in data.file.tensors} if found else found


def answer_head(data: GgufMetadata, name: str) -> dict[str, Any]:
    """Returns the fields of a head that is the rows of "yes" and "no" of a language model's, of which nothing else may be there."""
    if not ranks(data):
        return {}
    if _labels(data) != [*ANSWERS] or _OUT not in data.file.tensors:
        raise data.refused("pooling_type", f"rank is not supported without {_OUT}, and {_LABELS} of {', '.join(ANSWERS)}")
    return {**_fields(name, ANSWERS), "answer_head": True}


def _labels(data: GgufMetadata) -> list[str]:
    found = data.get(_LABELS)
    return found if isinstance(found, list) else []


def _fields(name: str, labels: Sequence[str]) -> dict[str, Any]:
    base = re.sub("(Model|ForCausalLM)$", "", name)
    return {"architectures": [f"{base}ForSequenceClassification"], "id2label": {str(at): label for at, label in enumerate(labels)}}
