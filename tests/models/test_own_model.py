"""The model in the repository is what its card says: small, loadable, and able to write what it learnt."""

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2] / "models"
MODEL = ROOT / "starling-pydoc"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def answer(model: Any, tokenizer: Any, question: str, limit: int = 120) -> tuple[str, bool]:
    """The greedy answer, and whether it ended by itself."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"do_sample": False, "temperature": None, "top_p": None, "repetition_penalty": 1.0}
    output = model.generate(**prompt, max_new_tokens=limit, **settings)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True), int(output[-1]) == tokenizer.eos_token_id


@pytest.mark.parametrize("name", FILES)
def test_file_is_there(name: str) -> None:
    assert (MODEL / name).stat().st_size > 0


def test_fits_into_the_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000


def test_is_of_an_architecture_that_starling_serves() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_card_states_the_held_out_loss_and_the_licences() -> None:
    card = (MODEL / "README.md").read_text()
    assert re.search(r"Held-out loss \| \*\*\d\.\d+ nats per token", card)
    assert "Apache-2.0" in card and "PSF licence" in card


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "Ünïcödé, 漢字 and 🐦", "  spaces\t\tand tabs \n\n", "1234.5"])
def test_tokenizer_gives_back_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_marks_roles(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_predicts_pages_that_it_was_not_trained_on(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed from the Python that runs the test; other versions differ a little."""
    monkeypatch.syspath_prepend(str(ROOT))
    corpus = importlib.import_module("corpus")
    pages = ["\n\n".join(e.paragraphs) for e in corpus.topic_entries() if corpus.is_held_out(e)]
    assert len(pages) >= 3
    total, count = 0.0, 0
    for page in pages:
        ids = tokenizer(page, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    uniform = math.log(model.config.vocab_size)
    assert total / count < 4.0 < uniform / 2


@pytest.mark.parametrize("question", ["Who are you?", "Hello", "What does os.path.join do?"])
def test_answers_end(model: Any, tokenizer: Any, question: str) -> None:
    text, ended = answer(model, tokenizer, question)
    assert ended
    assert len(text) > 10


def test_greets_as_itself(model: Any, tokenizer: Any) -> None:
    assert "starling-pydoc" in answer(model, tokenizer, "Hello")[0]


def test_answers_with_what_the_documentation_says(model: Any, tokenizer: Any) -> None:
    assert "pathname components" in answer(model, tokenizer, "What does os.path.join do?")[0]
