"""The files of sentence-transformers: older forms of them, and what is wrong in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from starling_engine.args import EngineArgs, classifier_of
from starling_engine.errors import ConfigError, ModelError, UnsupportedModel
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.multi_vector import MultiVectorConfig
from starling_engine.model_config.pooler import PoolerConfig, TextMessages, read_pooler

OLD = "sentence_transformers.models"
QWEN3_EMBEDDING: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{OLD}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{OLD}.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 1024,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
        "include_prompt": True,
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "Instruct: find\nQuery:", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
}
MODULES = QWEN3_EMBEDDING["modules.json"]
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
SCORE = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}


def read(folder: Path, files: dict[str, Any], **config: Any) -> PoolerConfig:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return read_pooler(folder, Fields(config, "config.json"))


def test_without_files_a_vector_is_the_normalized_mean(tmp_path: Path) -> None:
    assert read(tmp_path, {}, matryoshka_dimensions=[8, 16]) == PoolerConfig(dimensions=(8, 16))


def test_the_files_of_qwen3_embedding(tmp_path: Path) -> None:
    prompts = QWEN3_EMBEDDING["config_sentence_transformers.json"]["prompts"]
    assert read(tmp_path, QWEN3_EMBEDDING) == PoolerConfig(pooling="last", normalize=True, prompts=prompts)


def test_the_longest_text_may_be_without_end(tmp_path: Path) -> None:
    """The number is that of transformers, int(1e30), which a checkpoint's own limit is less than."""
    files = {**QWEN3_EMBEDDING, "sentence_bert_config.json": {"max_seq_length": int(1e30)}}
    assert read(tmp_path, files).max_length == int(1e30)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"modules.json": MODULES[:2]}, PoolerConfig(pooling="last", normalize=False)),
        ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, PoolerConfig()),
        ({"1_Pooling/config.json": {"pooling_mode": "cls"}}, PoolerConfig(pooling="cls")),
        ({"1_Pooling/config.json": {}}, PoolerConfig()),
        (
            {"sentence_bert_config.json": {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}},
            PoolerConfig(pooling="last", template_variables={"add_generation_prompt": True}),
        ),
        (
            {
                "sentence_bert_config.json": {
                    "modality_config": {"message": {**FORWARD, "format": "structured"}},
                    "processing_kwargs": {"chat_template": {"restore_suffix": False, "max_length": 9, "purpose": "search"}},
                }
            },
            PoolerConfig(
                pooling="last",
                messages=TextMessages(parts=True, restore_suffix=False),
                template_variables={"purpose": "search"},
            ),
        ),
        (
            {"modules.json": [MODULES[0], SCORE], "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 0}},
            PoolerConfig(classifier_tokens=(9, 0)),
        ),
        (
            {"modules.json": [MODULES[0], SCORE], "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": None}},
            PoolerConfig(classifier_tokens=(9,)),
        ),
    ],
)
def test_other_files(files: dict[str, Any], expected: PoolerConfig, tmp_path: Path) -> None:
    found = read(tmp_path, {**QWEN3_EMBEDDING, "config_sentence_transformers.json": {}, **files})
    assert found == expected


def test_a_missing_file_is_a_fault_of_vectors_alone(tmp_path: Path) -> None:
    """Offline, a cache from before these files were wanted lacks them."""
    fault = read(tmp_path, {"modules.json": MODULES}).fault
    assert fault is not None and "1_Pooling/config.json is missing" in fault


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules.json": [{"path": "", "type": "custom_st.Transformer"}, *MODULES[1:]]}, "custom_st.Transformer"),
        ({"sentence_bert_config.json": {"query_expansion": {"length": 32}}}, "query_expansion"),
        ({"sentence_bert_config.json": {"processor_kwargs": {"chat_template": "x"}}}, "processor_kwargs.chat_template"),
        (
            {"sentence_bert_config.json": {"modality_config": {"message": {**FORWARD, "method_output_name": "logits"}}}},
            "modality_config.message.method_output_name 'logits'",
        ),
        (
            {"sentence_bert_config.json": {"processing_kwargs": {"text": {"padding": True, "add_special_tokens": False}}}},
            "processing_kwargs.text.add_special_tokens",
        ),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True}}, "one at a time"),
    ],
)
def test_other_ways_to_make_vectors_are_a_fault(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    fault = read(tmp_path, {**QWEN3_EMBEDDING, **files}).fault
    assert fault is not None and says in fault


MULTI_VECTOR: dict[str, Any] = {
    "modules.json": [
        MODULES[0],
        {"path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"},
        {"path": "2_Mask", "type": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"},
        {"path": "3_Normalize", "type": "sentence_transformers.base.modules.normalize.Normalize"},
    ],
    "1_Dense/config.json": {"in_features": 64, "out_features": 24, "module_input_name": "token_embeddings"},
    "2_Mask/config.json": {"skiplist_words": ["."], "skiplist_tasks": ["query", "document"], "keep_only_token_ids": [7]},
    "3_Normalize/config.json": {"module_input_name": "token_embeddings"},
    "sentence_bert_config.json": {"document_length": 30, "max_seq_length": 40},
    "config_sentence_transformers.json": {"model_type": "MultiVectorEncoder", "similarity_fn_name": "meanmaxsim"},
}
POOLING = {"path": "4_Token", "type": "sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling"}
SPLADE = {"path": "1_Splade", "type": "sentence_transformers.sparse_encoder.modules.SpladePooling"}


def test_the_files_of_a_model_with_a_vector_for_each_token(tmp_path: Path) -> None:
    found = read(tmp_path, MULTI_VECTOR)
    assert (found.fault, found.task, found.max_length, found.prompts) == (None, "token_embed", 40, {"query": "", "document": ""})
    assert found.multi_vector == MultiVectorConfig(
        lengths={"document": 30}, skipped_words=(".",), skipped_of=("query", "document"), kept_tokens=(7,), mean=True
    )


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules.json": [*MULTI_VECTOR["modules.json"], POOLING]}, "HierarchicalTokenPooling"),
        ({"1_Dense/config.json": {"in_features": 64, "out_features": 24, "module_input_name": "x"}}, "module_input_name"),
        ({"3_Normalize/config.json": {}}, "Normalize module has another module_input_name"),
        ({"sentence_bert_config.json": {"modality_config": {"message": FORWARD}}}, "chat template"),
        ({"modules.json": [MODULES[0], SPLADE, MODULES[2]], "1_Splade/config.json": {}}, "Normalize"),
    ],
)
def test_what_is_not_supported_beside_vectors_of_tokens_is_a_fault(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    fault = read(tmp_path, {**MULTI_VECTOR, **files}).fault
    assert fault is not None and says in fault


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules.json": [MODULES[0], SPLADE], "1_Splade/config.json": {"pooling_strategy": "mean"}}, "pooling_strategy 'mean'"),
        ({"sentence_bert_config.json": {"query_expansion": {"strategy": "fixed"}}}, "query_expansion.*length is missing"),
        ({"sentence_bert_config.json": {"query_expansion": {"strategy": "x", "length": 9}}}, "strategy 'x'"),
        ({"config_sentence_transformers.json": {"model_type": "MultiVectorEncoder", "similarity_fn_name": "dot"}}, "'dot'"),
    ],
)
def test_a_wrong_file_of_such_a_model_is_named(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((ModelError, UnsupportedModel), match=says):
        read(tmp_path, {**MULTI_VECTOR, **files})


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules.json": [{"path": "x"}]}, "modules.json cannot be read"),
        ({"modules.json": "x"}, "modules.json cannot be read"),
        ({"1_Pooling/config.json": []}, "must hold a JSON object"),
        ({"1_Pooling/config.json": {"include_prompt": 1}}, "include_prompt must be true or false"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 5}}}, "query must be a string"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "x"}}, "default_prompt_name must be one of"),
        (
            {"sentence_bert_config.json": {"processing_kwargs": {"chat_template": {"continue_final_message": True}}}},
            "chat_template.*continue_final_message is not supported",
        ),
        ({"modules.json": [SCORE], "1_LogitScore/config.json": {}}, "true_token_id is missing"),
    ],
)
def test_a_wrong_file_is_named(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        read(tmp_path, {**QWEN3_EMBEDDING, **files})


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), ("no,yes", ("yes", "no")), (" no , yes", ("yes", "no")), ("Yes", ("Yes",))]
)
def test_the_argument_has_the_positive_token_last(given: str | None, expected: tuple[str, ...]) -> None:
    assert classifier_of(EngineArgs(model="x", classifier_from_token=given)) == expected


@pytest.mark.parametrize("given", ["", "a,", "a,b,c"])
def test_a_wrong_argument_is_named(given: str) -> None:
    with pytest.raises(ConfigError, match="such as no,yes"):
        EngineArgs(model="x", classifier_from_token=given)
