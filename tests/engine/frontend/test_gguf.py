"""Models that are one GGUF file: what they say beside llama.cpp, beside the checkpoint they were made from, and in each layout."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from starling_engine import LLM, SamplingParams, native
from starling_engine.errors import ConfigError, InvalidRequest, UnsupportedModel
from starling_engine.frontend.chat import ChatTemplates
from starling_engine.frontend.resolve import resolve
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.gguf.reader import GgufFile
from starling_engine.gguf.split_rules import SPLITS
from starling_engine.gguf.tokenizer import _templates, read_gguf_tokenizer
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.model_config.classifier import sigmoid
from starling_engine.model_config.config import load_model_config
from tokenizers import Regex, pre_tokenizers

from tests.engine.checkpoints import Variant, write_servable
from tests.engine.frontend import llama_cpp_answers, llama_cpp_ends, llama_cpp_tokens
from tests.engine.frontend.test_quantization import GREEDY, TEXT, model, surprise
from tests.engine.gguf_files import SMOLLM2, entry, header, text, write_gguf
from tests.engine.real_engine import MODEL, engine_args
from tests.engine.written import Written

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(180),
]

NATS = {
    "F16": 0.005, "BF16": 0.001, "Q8_0": 0.01, "Q6_K": 0.02, "Q5_K": 0.03, "Q5_0": 0.05, "Q5_1": 0.05, "Q4_K": 0.1, "Q4_1": 0.15,
    "Q4_0": 0.15, "IQ4_NL": 0.15, "IQ4_XS": 0.15, "MXFP4": 0.4, "Q3_K": 0.4, "Q2_K": 1.5,
}  # fmt: skip
"""Bounds on the nats a token by which a type surprises more, or less, than bfloat16."""
PROMPTS = ("The three primary colours are", "def fibonacci(n):\n", "Once upon a time, in 1998,", "Water boils at")
CLOSE, CLOSE_ON_AVERAGE = 0.5, 0.08
"""Nats between our log p and llama.cpp's. Both round the rows that they multiply to 8 bits: either is 0.04 on average, and 0.2 at
most, from what float32 gives here."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The repository's own model in each type, written when it is asked for."""
    folder = tmp_path_factory.mktemp("gguf")

    def write(type_name: str) -> Path:
        write_gguf(folder / f"pydoc.{type_name}.gguf", Path(MODEL), lambda _: type_name)
        return folder / f"pydoc.{type_name}.gguf"

    return Written(write)


@pytest.fixture(scope="module")
def plain() -> float:
    with model(MODEL) as llm:
        return surprise(llm)


@pytest.mark.matrix
@pytest.mark.parametrize("type_name", NATS)
def test_the_model_stays_as_good_as_its_bits_allow(type_name: str, files: dict[str, Path], plain: float) -> None:
    with model(files[type_name]) as llm:
        found = surprise(llm)
        answers = [output.outputs[0].token_ids for output in llm.generate(["The os module", TEXT[:200]], GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in ("The os module", TEXT[:200])]
    assert abs(found - plain) < NATS[type_name]
    assert answers == alone


def test_mixed_types_are_matrices_side_by_side(plain: float, tmp_path: Path) -> None:
    """Values and down have more bits, as in Q4_K_M, and the gate has another type than up, so that no kernel joins them."""
    types = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "token_embd": "Q8_0"}
    write_gguf(tmp_path / "m.gguf", Path(MODEL), lambda name: next((t for part, t in types.items() if part in name), "Q4_K"))
    with model(tmp_path / "m.gguf") as llm:
        assert abs(surprise(llm) - plain) < NATS["Q4_K"]


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_have_the_same_weights(layout: dict[str, int], files: dict[str, Path]) -> None:
    with model(files["Q4_K"]) as one, model(files["Q4_K"], **layout) as several:
        assert surprise(several) == pytest.approx(surprise(one), abs=5e-3)


def test_weights_after_a_sleep_are_the_same(files: dict[str, Path]) -> None:
    with model(files["Q4_0"], max_num_batched_tokens=64) as llm:
        before = llm.generate([TEXT], GREEDY)[0].outputs[0].token_ids
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.generate([TEXT], GREEDY)[0].outputs[0].token_ids == before


def test_float32_is_dequantized(files: dict[str, Path]) -> None:
    with model(files["Q8_0"]) as llm, model(files["Q8_0"], dtype="float32") as exact:
        assert surprise(exact) == pytest.approx(surprise(llm), abs=0.02)


def test_the_tokenizer_and_the_template_are_the_folders(files: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.load(files["Q8_0"]), Tokenizer.load(Path(MODEL))
    assert [ours.encode(text) for text in (TEXT, *PROMPTS)] == [theirs.encode(text) for text in (TEXT, *PROMPTS)]
    assert (ours.eos_token_id, ours.special_ids, ours.vocab_size) == (theirs.eos_token_id, theirs.special_ids, theirs.vocab_size)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    messages = [{"role": "user", "content": "What does <|im_end|> mean?"}]
    assert ours.encode(ours.render_chat(messages)) == theirs.encode(theirs.render_chat(messages))


ENDS = (
    *("<|eot_id|>", "<|end|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>"),
)


def test_tokens_of_any_type_end_an_answer_as_in_llama_cpp(tmp_path: Path) -> None:
    """The model's own vocabulary, with other ends in place of its last tokens, which the file says are plain text."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = stored["model"]["vocab"], stored["model"]["merges"]
    for text_ in ENDS:
        vocabulary[text_] = vocabulary.pop("".join(merges.pop()))
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    write_gguf(tmp_path / "model.gguf", folder)
    command = [sys.executable, llama_cpp_ends.__file__, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    theirs = set(json.loads(done.stdout.splitlines()[-1]))
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    assert theirs > {vocabulary[text_] for text_ in ENDS} and theirs <= tokenizer.special_ids
    assert set(load_model_config(tmp_path / "model.gguf").eos_token_ids) == theirs
    for text_ in ENDS:
        assert tokenizer.encode(f"in{text_}to")[1:-1] == [vocabulary[text_]]


SPLIT = (
    "Hello World, I'M here; you'LL see 12345 and 1,234,567.89 units\n\n  indented\tcode();  // x/y\n",
    "HTTPServer_v2 camelCaseWord XMLHttp café naïve ÀÉ",
    "你好，世界。こんにちは 안녕하세요 2024年",
    "हिन्दी भाषा में तமிழ் e\u0301clair",
    "  \n \n\nfoo\r\nbar  \t baz   ",
    "'S 'Re don't DON'T we'Ve!!! ... ?? <<>> {}[]\\//\n/path/to/file",
    "1 22 333 4444 55555 ½ ² Ⅷ ٣٤٥ x=-1;y+=2**3 #comment 😀",
)


@pytest.mark.matrix
@pytest.mark.parametrize("rule", [name for name in SPLITS if name != "kimi-k2"])
def test_texts_are_split_as_in_llama_cpp(rule: str, tmp_path: Path) -> None:
    """The model's own vocabulary under each rule but Kimi's, which llama.cpp has without its borders between cases."""
    write_gguf(tmp_path / "model.gguf", Path(MODEL), lambda _: "F16", rule)
    command = [sys.executable, "-m", llama_cpp_tokens.__name__, str(tmp_path / "model.gguf"), *SPLIT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    backend, _, _ = read_gguf_tokenizer(GgufFile(tmp_path / "model.gguf"))
    assert [backend.encode(each, add_special_tokens=False).ids for each in SPLIT] == json.loads(done.stdout.splitlines()[-1])


def test_kimis_words_end_where_small_letters_do() -> None:
    (rule,) = SPLITS["kimi-k2"]
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    for text_ in SPLIT:
        pieces = list(regex.findall(rule, text_, regex.VERSION1))
        assert [piece for piece, _ in split.pre_tokenize_str(text_)] == pieces and "".join(pieces) == text_
    assert [piece for piece, _ in split.pre_tokenize_str("camelCase DON'T你好ok 1234")] == [
        *("camel", "Case", " DON'T", "你好", "ok", " ", "123", "4"),
    ]


ANSWERS, QUERY, DOCUMENTS = ("the", "in"), "What is a list?", ["Lists are mutable.", "Sets have no order.", "def f(): pass"]
"""Tokens that stand for yes and no, and what is scored by them."""


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_scores_as_its_checkpoint_does(tied: bool, tmp_path: Path) -> None:
    write_servable(tmp_path, Variant("qwen3", {"head_dim": 32, "tie_word_embeddings": tied}))
    tokenizer = Tokenizer.load(tmp_path)
    (yes,), (no,) = (tokenizer.encode(each, add_special_tokens=False) for each in ANSWERS)
    write_gguf(tmp_path / "model.gguf", tmp_path, answers=(yes, no))
    options: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "max_model_len": 1024, "max_num_seqs": 4, "num_threads": 1}
    with LLM(str(tmp_path), classifier_from_token=",".join(ANSWERS[::-1]), **options) as plain:
        expected = [one.outputs.score for one in plain.score(QUERY, DOCUMENTS, use_activation=False, instruction="Find facts")]
    with LLM(str(tmp_path / "model.gguf"), **options) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_activation=False, instruction="Find facts")]
        assert found == pytest.approx(expected, abs=1e-3) and max(found) - min(found) > 0.05
        probabilities = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, instruction="Find facts")]
        assert probabilities == pytest.approx([sigmoid(one) for one in found], abs=1e-6)
        with pytest.raises(InvalidRequest):
            llm.generate([QUERY], GREEDY)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    if not SMOLLM2.is_file():
        pytest.skip("`make smollm2` brings the model")
    with LLM(str(SMOLLM2), max_model_len=1024, max_num_seqs=4, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def test_a_model_of_others_answers_as_llama_cpp_does(smollm2: LLM) -> None:
    """Along llama.cpp's own answers: each of its tokens is our likeliest, or a near tie; log p are close."""
    command = [sys.executable, llama_cpp_answers.__file__, str(SMOLLM2), *PROMPTS]
    answers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    apart, ties = [], 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = smollm2.get_tokenizer().encode(prompt)
        whole = [*ids, *(step for step, _ in answer)]
        (output,) = smollm2.generate([whole], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2))
        assert output.prompt_logprobs is not None
        for row, (token, ((_, log_p), (_, next_log_p))) in zip(output.prompt_logprobs[len(ids) :], answer, strict=True):
            assert row is not None
            likeliest = max(row, key=lambda each: row[each].logprob)
            apart.append(abs(row[token].logprob - log_p))
            if likeliest != token:
                assert log_p - next_log_p < CLOSE, (prompt, token, likeliest)
                ties += 1
    assert len(apart) == len(PROMPTS) * llama_cpp_answers.TOKENS and ties <= len(apart) // 10
    assert max(apart) < CLOSE and sum(apart) < CLOSE_ON_AVERAGE * len(apart)


def test_a_model_of_others_chats(smollm2: LLM) -> None:
    (output,) = smollm2.chat([[{"role": "user", "content": "What is the capital of France?"}]], GREEDY)
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"


def test_templates_have_names(tmp_path: Path) -> None:
    entries = entry("tokenizer.chat_template", 8, text("plain"))
    entries += entry("tokenizer.chat_templates", 9, struct.pack("<IQ", 8, 1) + text("tool_use"))
    entries += entry("tokenizer.chat_template.tool_use", 8, text("tools"))
    (tmp_path / "model.gguf").write_bytes(header(entries=entries, entry_count=3))
    found = _templates(GgufFile(tmp_path / "model.gguf"))
    assert ChatTemplates.load(tmp_path, {"chat_template": found}).by_name == {"default": "plain", "tool_use": "tools"}


def test_keys_of_other_weights_are_not_found(files: dict[str, Path]) -> None:
    names = [str(files["Q8_0"]), str(files["Q4_0"]), MODEL]
    assert len({fingerprint_of(name, "auto", 0, "bfloat16").digest for name in names}) == 3
    assert fingerprint_of(names[0], "auto", 0, "bfloat16") == fingerprint_of(names[0], "auto", 0, "bfloat16")


def test_what_is_not_possible_is_an_error(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization: int8 is not possible: the weights of a GGUF file are what they are"):
        resolve(engine_args(model=str(files["Q8_0"]), quantization="int8"))
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(files["Q8_0"].read_bytes().replace(b"qwen2", b"qwen9"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre 'qwen9' is not supported; .* \(--tokenizer\)"):
        Tokenizer.load(unknown)
