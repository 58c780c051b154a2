"""Each family of encoders against transformers: sequences of one step, split over ranks or not, have the same hidden states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.args import EngineArgs
from starling_engine.attention.bidirectional import BidirectionalAttention
from starling_engine.errors import ConfigError, InvalidRequest, ModelError, UnsupportedModel
from starling_engine.frontend.pooling import check_gives_tokens, numbers_of
from starling_engine.frontend.resolve import resolve
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models import mlp
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import ALONE, Communicator, no_tick
from starling_engine.params import PoolingParams
from starling_engine.step import NewRequest, StepPlan
from starling_engine.token_packing import pack_tokens
from starling_engine.weights.loader import load_weights
from starling_engine.worker import prompt_outputs
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.host.encoder_runner import EncoderRunner
from starling_engine.worker.stage import StageLink
from transformers import PreTrainedModel

from tests.engine.checkpoints import edit_json
from tests.engine.encoder_checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    MASKED,
    TOKEN_CLASSIFIERS,
    VOCAB,
    EncoderVariant,
    write_adapted,
    write_encoder,
    write_splade,
)
from tests.engine.parallel.threads import on_ranks

CPU, FP32 = torch.device("cpu"), torch.float32
TOLERANCE = 2e-5
LENGTHS = [5, 1, 61, 17]
"""The second sequence has one token; the third is longer than any window."""
SECOND = 3
"""Token of each sequence with which its second segment begins, if it has as many."""


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def answers(
    folder: Path,
    params: list[PoolingParams],
    tensor: Communicator = ALONE,
    stages: Communicator = ALONE,
    dtype: torch.dtype = FP32,
) -> list[Any]:
    """Returns what a rank makes of all prompts in one step; None for each in a stage but the last."""
    config = load_model_config(folder)
    methods = select_linear_method(dtype, CPU)
    model = Decoder(config, dtype, CPU, methods, BidirectionalAttention(), tensor=tensor, stage=stages.shard)
    load_weights(model, folder)
    batch, link = InputBatch([], len(LENGTHS), 128, 16), StageLink(stages, config.hidden_size, dtype, CPU)
    layers = len(model.layers)
    runner = EncoderRunner(model, batch, link, CPU, no_tick, num_layers=layers, adapters=config.adapters)
    each = list(zip(prompts(), params, strict=True))
    new = [NewRequest(slot, pack_tokens(ids), len(ids), [], 0, None, wanted) for slot, (ids, wanted) in enumerate(each)]
    slots = list(range(len(each)))
    with torch.inference_mode():
        result = runner.launch(StepPlan(0, 0, slots, [0] * len(slots), LENGTHS, [True] * len(slots), new)).finish()
    if not stages.shard.last:
        return [None] * len(slots)
    packed = [result.extras_of(row).pooled or b"" for row in slots]
    return [numbers_of(one, wanted, length) for one, wanted, length in zip(packed, params, LENGTHS, strict=True)]


def expected(model: PreTrainedModel, variant: EncoderVariant) -> list[torch.Tensor]:
    """Returns each prompt's hidden states [T, hidden_size], or logits [labels], with two segments where there are some."""
    found = []
    for ids in prompts():
        inputs = {"input_ids": torch.tensor([ids])}
        if variant.types > 1:
            inputs["token_type_ids"] = (torch.arange(len(ids)) >= SECOND).long()[None]
        with torch.inference_mode():
            output = getattr(model, "base_model", model)(**inputs) if "Masked" in variant.model else model(**inputs)
        found.append(output.logits[0] if "logits" in output else output.last_hidden_state[0])
    return found


def second_from(variant: EncoderVariant, length: int) -> int | None:
    return SECOND if variant.types > 1 and length > SECOND else None


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("split", ["alone", "two ranks", "two stages"])
@pytest.mark.matrix
def test_an_encoder_sees_in_both_directions_as_transformers_does(name: str, split: str, tmp_path: Path) -> None:
    variant = ENCODERS[name]
    states = expected(write_encoder(tmp_path, variant), variant)
    kinds = ["mean", "last", "mean", "cls"]
    wanted = [
        PoolingParams(pooling=kind, normalize=False, second_from=second_from(variant, length))  # type: ignore[arg-type]
        for kind, length in zip(kinds, LENGTHS, strict=True)
    ]

    def work(ranks: Communicator) -> list[Any]:
        return answers(tmp_path, wanted, **{"tensor" if split == "two ranks" else "stages": ranks})

    found = answers(tmp_path, wanted) if split == "alone" else on_ranks(2, "gloo", work)[-1]
    pooled = [states[0].mean(0), states[1][-1], states[2].mean(0), states[3][0]]
    torch.testing.assert_close(torch.tensor(found), torch.stack(pooled), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.matrix
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    variant = ENCODERS[name]
    model = write_encoder(tmp_path, variant)
    exact, rounded = expected(model, variant), expected(model.to(torch.bfloat16), variant)
    wanted = [PoolingParams(task="token_embed", normalize=False, second_from=second_from(variant, length)) for length in LENGTHS]
    found = answers(tmp_path, wanted, dtype=torch.bfloat16)

    def error(states: list[torch.Tensor]) -> float:
        return sum(float((each - right).abs().sum()) for each, right in zip(states, exact, strict=True))

    assert 0 < error([torch.tensor(each) for each in found]) < 1.2 * error(rounded)


@pytest.mark.parametrize("split", ["alone", "two ranks", "two stages"])
def test_each_sequence_of_a_step_has_the_adapter_of_its_task(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs take 16 tokens at once here, so that a sequence is in several parts of them."""
    monkeypatch.setattr(mlp, "CACHED_ROWS", 16)
    models = write_adapted(tmp_path)
    tasks = ["text-matching", None, "retrieval.query", "retrieval.passage"]
    wanted = [PoolingParams(task="token_embed", normalize=False, adapter=task) for task in tasks]

    def work(ranks: Communicator) -> list[Any]:
        return answers(tmp_path, wanted, **{"tensor" if split == "two ranks" else "stages": ranks})

    found = answers(tmp_path, wanted) if split == "alone" else on_ranks(2, "gloo", work)[-1]
    variant = ENCODERS["jina-v3"]
    states = {task: expected(models[task], variant) for task in tasks}
    for at, (task, vectors) in enumerate(zip(tasks, found, strict=True)):
        torch.testing.assert_close(torch.tensor(vectors), states[task][at], atol=TOLERANCE, rtol=1e-5)
    assert (states[None][2] - states["retrieval.query"][2]).abs().mean() > 0.1


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_head_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    variant = CLASSIFIERS[name]
    logits = expected(write_encoder(tmp_path, variant), variant)
    classifier = load_model_config(tmp_path).classifier
    assert classifier is not None
    pooling = classifier.head.pooling
    wanted = [
        PoolingParams(task="classify", pooling=pooling, normalize=False, second_from=second_from(variant, length))
        for length in LENGTHS
    ]
    found = torch.tensor(answers(tmp_path, wanted))
    torch.testing.assert_close(found, torch.stack(logits), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "routes"), [("bert", "use /classify"), ("roberta", "use /score, /rerank or /classify")])
def test_who_asks_a_model_with_labels_for_tokens_is_told_the_routes_that_answer(name: str, routes: str, tmp_path: Path) -> None:
    """A pair is scored by the one label that a model has."""
    write_encoder(tmp_path, CLASSIFIERS[name])
    with pytest.raises(InvalidRequest, match=f"; {routes}$"):
        check_gives_tokens(load_model_config(tmp_path))


@pytest.mark.parametrize("name", TOKEN_CLASSIFIERS)
def test_a_head_gives_each_token_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    variant = TOKEN_CLASSIFIERS[name]
    logits = expected(write_encoder(tmp_path, variant), variant)
    classifier = load_model_config(tmp_path).classifier
    assert classifier is not None and classifier.of_tokens and len(classifier.labels) == 5
    wanted = [PoolingParams(task="token_classify", second_from=second_from(variant, length)) for length in LENGTHS]
    for found, theirs in zip(answers(tmp_path, wanted), logits, strict=True):
        torch.testing.assert_close(torch.tensor(found), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_a_reward_model_rates_each_token(name: str, labels: int, tmp_path: Path) -> None:
    """Its head is the authors' own, of two layers."""
    variant = ENCODERS["qwen2"]
    states = expected(write_encoder(tmp_path, variant), variant)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, labels))
    path = tmp_path / "model.safetensors"
    tensors = {f"model.{tensor}": values for tensor, values in load_file(path).items()}
    save_file({**tensors, **{f"score.{tensor}": values for tensor, values in head.state_dict().items()}}, path)
    edit_json(tmp_path / "config.json", {"architectures": [name], "id2label": None, "label2id": None})
    classifier = load_model_config(tmp_path).classifier
    assert classifier is not None and classifier.label_activation == ("identity" if labels == 1 else "softmax")
    wanted = [PoolingParams(task="token_classify")] * len(LENGTHS)
    for found, theirs in zip(answers(tmp_path, wanted), states, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(torch.tensor(found), head(theirs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("split", ["alone", "two ranks", "two stages"])
@pytest.mark.matrix
def test_a_head_for_masked_tokens_makes_sparse_vectors(
    name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are of 16 tokens at once here, so that a text has those of several parts."""
    monkeypatch.setattr(prompt_outputs, "LOGPROB_ROWS", 16)
    variant = MASKED[name]
    model = write_encoder(tmp_path, variant)
    write_splade(tmp_path, pooling_strategy="max" if name == "bert" else "sum", activation_function="log1p_relu")
    wanted = [PoolingParams(task="sparse_embed")] * len(LENGTHS)

    def work(ranks: Communicator) -> list[Any]:
        return answers(tmp_path, wanted, **{"tensor" if split == "two ranks" else "stages": ranks})

    found = answers(tmp_path, wanted) if split == "alone" else on_ranks(2, "gloo", work)[-1]
    for vector, ids in zip(found, prompts(), strict=True):
        weights = torch.zeros(VOCAB)
        weights[vector.indices] = torch.tensor(vector.values)
        with torch.inference_mode():
            each = model(torch.tensor([ids])).logits[0].relu().log1p().log1p()
        theirs = each.amax(0) if name == "bert" else each.sum(0)
        torch.testing.assert_close(weights, theirs, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("name", ["mpnet", "modernbert"])
def test_tokens_that_none_sees_see_the_others(name: str, tmp_path: Path) -> None:
    """Keys are fewer than queries then, also with biases by distance and in windows."""
    variant = ENCODERS[name]
    model = write_encoder(tmp_path, variant)
    seen = [max(1, length - 3) for length in LENGTHS]
    wanted = [PoolingParams(task="token_embed", normalize=False, unseen_from=count) for count in seen]
    for found, ids, count in zip(answers(tmp_path, wanted), prompts(), seen, strict=True):
        mask = (torch.arange(len(ids)) < count).long()[None]
        with torch.inference_mode():
            states = model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
        torch.testing.assert_close(torch.tensor(found), states, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("split", ["two ranks", "two stages"])
def test_each_token_has_a_vector_of_its_own(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_outputs, "LOGPROB_ROWS", 16)
    variant = ENCODERS["roberta"]
    states = expected(write_encoder(tmp_path, variant), variant)
    wanted = [PoolingParams(task="token_embed", normalize=True, dimensions=dimensions) for dimensions in (64, 3, 8, 1)]

    def work(ranks: Communicator) -> list[Any]:
        return answers(tmp_path, wanted, **{"tensor" if split == "two ranks" else "stages": ranks})

    for found, theirs, one in zip(on_ranks(2, "gloo", work)[-1], states, wanted, strict=True):
        vectors = torch.nn.functional.normalize(theirs[:, : one.dimensions], dim=1)
        torch.testing.assert_close(torch.tensor(found), vectors, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"id2label": {"0": "no", "2": "yes"}}, "id2label"),
        ({"problem_type": "guess"}, "problem_type"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "activation_fn"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_what_an_encoder_cannot_be_is_said(edits: dict[str, Any], error: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, CLASSIFIERS["bert"])
    edit_json(tmp_path / "config.json", edits)
    with pytest.raises((ModelError, UnsupportedModel), match=error):
        load_model_config(tmp_path)


def test_an_encoders_settings_know_no_cache_and_no_streams(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"])
    _, _, config = resolve(EngineArgs(model=str(tmp_path), max_num_seqs=1, max_num_batched_tokens=1))
    scheduler = config.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.step_target_ms, scheduler.prefix_caching) == (128, 0, False)
    refused: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "spec_method": "ngram",
        "step_target_ms": 50,
        "classifier_from_token": "no,yes",
    }
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=f"{name}.*not possible for an encoder"):
            resolve(EngineArgs(model=str(tmp_path), **{name: value}))


def test_the_longest_text_is_the_one_that_the_authors_mean(tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS["bert"])
    write_splade(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    lengths = [resolve(EngineArgs(model=str(tmp_path), max_model_len=given))[2].scheduler.max_model_len for given in (None, 100)]
    assert lengths == [48, 100]


def test_names_of_the_first_checkpoints_are_known(tmp_path: Path) -> None:
    """BERT's first files have the names of TensorFlow."""
    variant = ENCODERS["bert"]
    states = expected(write_encoder(tmp_path, variant), variant)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}

    def renamed(name: str) -> str:
        return next((f"bert.{name.removesuffix(end)}{other}" for end, other in old.items() if name.endswith(end)), f"bert.{name}")

    save_file({renamed(name): tensor for name, tensor in tensors.items()}, path)
    wanted = [PoolingParams(pooling="cls", normalize=False, second_from=second_from(variant, length)) for length in LENGTHS]
    found = torch.tensor(answers(tmp_path, wanted))
    torch.testing.assert_close(found, torch.stack([each[0] for each in states]), atol=TOLERANCE, rtol=0)
