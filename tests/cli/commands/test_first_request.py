"""The request that `starling serve` shows when it serves: each kind of model answers its own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starling_cli.commands.first_request import first_request
from starling_engine.model_config.config import load_model_config

from tests.engine.encoder_checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    MASKED,
    TOKEN_CLASSIFIERS,
    EncoderVariant,
    write_encoder,
    write_splade,
)
from tests.engine.real_engine import MODEL

MODULES = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", "Pooling", "Normalize")]


def encoder(variant: EncoderVariant) -> Callable[[Path], object]:
    return lambda folder: write_encoder(folder, variant)


def splade(folder: Path) -> None:
    write_encoder(folder, MASKED["bert"])
    write_splade(folder)


def decoder(folder: Path) -> None:
    shutil.copy(Path(MODEL) / "config.json", folder)


def embedding_decoder(folder: Path) -> None:
    decoder(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "Pooling").mkdir()
    (folder / "Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}))


@pytest.mark.parametrize(
    ("write", "has_chat_template", "path", "fields"),
    [
        (encoder(ENCODERS["bert"]), False, "/v1/embeddings", {"input"}),
        (encoder(CLASSIFIERS["roberta"]), False, "/v1/rerank", {"query", "documents"}),
        (encoder(CLASSIFIERS["bert"]), False, "/classify", {"input"}),
        (encoder(TOKEN_CLASSIFIERS["bert"]), False, "/pooling", {"input", "task"}),
        (splade, False, "/pooling", {"input"}),
        (embedding_decoder, True, "/v1/embeddings", {"input"}),
        (decoder, True, "/v1/chat/completions", {"messages"}),
        (decoder, False, "/v1/completions", {"prompt"}),
    ],
)
def test_a_model_is_asked_for_what_it_is_made_for(
    write: Callable[[Path], object], has_chat_template: bool, path: str, fields: set[str], tmp_path: Path
) -> None:
    write(tmp_path)
    asked = first_request(load_model_config(tmp_path), has_chat_template=has_chat_template)
    assert (asked[0], asked[1].keys()) == (path, fields)


def test_a_language_model_that_judges_pairs_is_asked_for_a_ranking(tmp_path: Path) -> None:
    decoder(tmp_path)
    model = load_model_config(tmp_path)
    judge = replace(model, pooler=replace(model.pooler, classifier_tokens=(7, 9)))
    assert first_request(judge, has_chat_template=True)[0] == "/v1/rerank"
