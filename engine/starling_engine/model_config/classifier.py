"""Classification heads, of texts (ForSequenceClassification) and of tokens (ForTokenClassification): what their numbers mean."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields

ENDING = "ForSequenceClassification"
TOKEN_ENDING = "ForTokenClassification"
MASKED_ENDING = "ForMaskedLM"
REWARDS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
"""Architectures of Qwen's own code whose head rates each token, and how many numbers it has by default."""
PoolingType = Literal["mean", "last", "cls"]
HeadPooling = Literal["mean", "last", "cls", "late"]
"""Pooling of states, or of what the head makes of each."""
LabelActivation = Literal["sigmoid", "softmax", "identity"]
MAX_LABELS = 100_000
_ACTIVATIONS: dict[str, LabelActivation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
"""Activations of sentence-transformers' CrossEncoder, by the class in torch."""
_PROBLEMS: dict[str, LabelActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Modules of a head, by their names in the checkpoint: maybe a dense layer with its activation and norm, then `out`."""

    out: str = "classifier"
    bias: bool = True
    dense: str | None = None
    dense_bias: bool = True
    activation: str = "tanh"
    norm: str | None = None
    pooling: HeadPooling = "cls"


ReadHead = Callable[[Fields], HeadShape]


def fixed_head(head: HeadShape) -> ReadHead:
    """Returns this head whatever the config says."""
    return lambda _config: head


decoder_head = fixed_head(HeadShape(out="score", bias=False, pooling="last"))


def decoder_token_head(config: Fields) -> HeadShape:
    """Returns the head of `transformers`, or the one of two layers that reward models have."""
    if not REWARDS.keys().isdisjoint(config.texts("architectures")):
        return HeadShape(out="score.2", dense="score.0", activation="relu", pooling="last")
    return HeadShape(out="score", bias=config.boolean("token_classification_bias", True), pooling="last")


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A model's head.

    labels             names of what each of its numbers is of
    label_activation   makes probabilities of the numbers of a text
    score_activation   makes the score of a pair of the one number that it has
    of_tokens          the head labels tokens, and no text as a whole
    of_answers         the head is the rows of "yes" and "no" of a language model's, which reads a pair through a template
    """

    head: HeadShape
    labels: tuple[str, ...]
    label_activation: LabelActivation
    score_activation: LabelActivation
    of_tokens: bool = False
    of_answers: bool = False


def read_classifier(config: Fields, head: ReadHead | None, token_head: ReadHead | None) -> ClassifierConfig | None:
    """Reads labels and activations, as transformers and sentence-transformers write them; None for a model without a head."""
    names = config.texts("architectures")
    rewards = next((REWARDS[name] for name in names if name in REWARDS), None)
    of_tokens = rewards is not None or any(name.endswith(TOKEN_ENDING) for name in names)
    read_head = token_head if of_tokens else head
    if read_head is None or not (of_tokens or any(name.endswith(ENDING) for name in names)):
        return None
    named = config.child("id2label")
    if named.values and sorted(named.values, key=_number) != [str(at) for at in range(len(named.values))]:
        raise config.error("id2label", "must name the labels 0, 1 and so on")
    count = len(named.values) or config.integer("num_labels", rewards or 2, high=MAX_LABELS)
    labels = tuple(named.text(str(at), f"LABEL_{at}") for at in range(count))
    problem = config.text("problem_type") if config.has("problem_type") else None
    if problem is not None and problem not in _PROBLEMS:
        raise config.error("problem_type", f"must be one of {', '.join(_PROBLEMS)}")
    activation = _PROBLEMS[problem or ("regression" if rewards == 1 else "single_label_classification")]
    return ClassifierConfig(
        head=read_head(config),
        labels=labels,
        # As in transformers' pipeline: a softmax over one label would be 1 whatever it is of.
        label_activation="sigmoid" if activation == "softmax" and count == 1 else activation,
        score_activation=_score_activation(config) or "sigmoid",
        of_tokens=of_tokens,
        of_answers=not of_tokens and config.boolean("answer_head", False),
    )


def _number(name: str) -> int:
    return int(name) if name.isdecimal() else -1


def _score_activation(config: Fields) -> LabelActivation | None:
    """Reads the activation that a cross-encoder's authors have named, from release 4 of sentence-transformers on or before."""
    own, older = config.child("sentence_transformers"), "sbert_ce_default_activation_function"
    return read_activation(own, "activation_fn") or read_activation(config, older)


def read_activation(config: Fields, name: str) -> LabelActivation | None:
    """Reads the name of a class in torch; None where there is none. Raises UnsupportedModel."""
    if not config.has(name):
        return None
    found = config.text(name).rpartition(".")[2]
    if found not in _ACTIVATIONS:
        raise UnsupportedModel(f"{config.source}: {name} {found!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def activated(activation: LabelActivation, logits: Sequence[float]) -> list[float]:
    """Returns the numbers that the activation makes of a head's."""
    match activation:
        case "identity":
            return list(logits)
        case "sigmoid":
            return [sigmoid(value) for value in logits]
    most = max(logits)
    shares = [math.exp(value - most) for value in logits]
    whole = sum(shares)
    return [share / whole for share in shares]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
