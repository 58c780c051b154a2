"""Checkpoints of sentence-transformers, a folder for each: `python -m tests.agent.sentence_transformers_checkpoints TARGET`.

`TARGET/expected.json` has its vectors and scores of the texts.
"""

import json
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from tests.agent.scored_texts import CUT, DOCUMENTS, INSTRUCTION, QUERY, TEXTS
from tests.engine.checkpoints import edit_json

PYDOC = Path(__file__).parents[2] / "models/starling-pydoc"
ANSWERS = ("True", "False")
"""The tokenizer has no tokens for yes and no."""
TEXTS_ALONE: Any = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""These are as before release 5.4, Qwen3-Embedding among them; later ones may send texts through a chat template."""
PROMPTS = {"query": "Instruct: find the page\nQuery: ", "document": ""}
PAIRS = """\
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | \
default("Given a web search query, retrieve relevant passages that answer the query") -%}
{%- set query_text = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document_text = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be \
"yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction }}
<Query>: {{ query_text }}
<Document>: {{ document_text }}<|im_end|>
<|im_start|>assistant
<think>

</think>


"""
"""The template that Qwen3-Reranker has today."""


MESSAGES = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
A vector to {{ purpose }} with:{% endif %}"""


def main(target: Path) -> None:
    torch.manual_seed(0)
    made = {"last": last, "mean": mean, "messages": messages, "reranker": reranker, "encoder": encoder, "cross": cross_encoder}
    made |= {"colbert": colbert, "colbert decoder": colbert_decoder, "splade": splade, "pylate": pylate, "stanford": stanford}
    expected = {name: make(target / name) for name, make in made.items()}
    refused(target / "mean", target)
    original(target / "reranker", target / "original")
    (target / "expected.json").write_text(json.dumps(expected))


def last(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint like Qwen3-Embedding: the last token's state, an end token that the tokenizer adds, and no head."""
    model = SentenceTransformer(
        modules=[transformer(folder, Qwen3Model, ends=True), Pooling(64, "lasttoken"), Normalize()], prompts=PROMPTS
    )
    model.save_pretrained(str(folder), create_model_card=False)
    edit_json(folder / "config.json", {"matryoshka_dimensions": [16, 32, 64]})
    found = {
        "plain": model.encode(TEXTS).tolist(),
        "query": model.encode(TEXTS, prompt_name="query").tolist(),
        "tokens": [F.normalize(one, dim=1).tolist() for one in model.encode(TEXTS, output_value="token_embeddings")],
        "short": model.encode(TEXTS, truncate_dim=16, normalize_embeddings=True).tolist(),
        "binary": model.encode(TEXTS, prompt_name="query", precision="binary").tolist(),
        "ubinary": model.encode(TEXTS, prompt_name="query", precision="ubinary").tolist(),
        "scores": model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].tolist(),
    }
    model.max_seq_length = 6
    return {**found, "truncated": model.encode(TEXTS).tolist()}


def mean(folder: Path) -> dict[str, Any]:
    """Writes a chat model that gives vectors too, with a prompt where none is named."""
    modules = [transformer(folder, Qwen3ForCausalLM, tie_word_embeddings=True), Pooling(64, "mean")]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS, default_prompt_name="query")
    model.save_pretrained(str(folder), create_model_card=False)
    return {
        "plain": model.encode(TEXTS).tolist(),
        "document": model.encode(TEXTS, prompt_name="document").tolist(),
        "scores": model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].tolist(),
    }


def messages(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint whose texts go through a chat template with a tail, and one that drops the tail of what is cut."""
    first = Transformer(
        str(folder.parent / "last"),
        processor_kwargs={"chat_template": MESSAGES},
        processing_kwargs={"chat_template": {"add_generation_prompt": True, "purpose": "search"}},
    )
    model = SentenceTransformer(modules=[first, Pooling(64, "lasttoken"), Normalize()], prompts=PROMPTS)
    model.save_pretrained(str(folder), create_model_card=False)
    found = {
        "plain": model.encode(TEXTS).tolist(),
        "query": model.encode(TEXTS, prompt_name="query").tolist(),
        "scores": model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].tolist(),
    }
    model.max_seq_length = CUT
    found |= {"cut": model.encode(TEXTS).tolist(), "cut query": model.encode(TEXTS, prompt_name="query").tolist()}
    first.processing_kwargs["chat_template"]["restore_suffix"] = False
    model.save_pretrained(str(folder.parent / "without tail"), create_model_card=False)
    return {**found, "ids without tail": first.preprocess([TEXTS[1]])["input_ids"][0].tolist()}


def reranker(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint like Qwen3-Reranker."""
    first = transformer(folder, Qwen3ForCausalLM, template=PAIRS, task="text-generation")
    yes, no = (first.tokenizer.convert_tokens_to_ids(word) for word in ("True", "False"))
    model = CrossEncoder(modules=[first, LogitScore(yes, no)])
    model.save_pretrained(str(folder), create_model_card=False)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    return {
        "logits": model.predict(pairs, activation_fn=torch.nn.Identity()).tolist(),
        "scores": model.predict(pairs, activation_fn=torch.nn.Sigmoid()).tolist(),
        "instructed": model.predict(pairs, activation_fn=torch.nn.Sigmoid(), prompt=INSTRUCTION).tolist(),
        "ranked": [int(found["corpus_id"]) for found in model.rank(QUERY, DOCUMENTS)],
    }


def encoder(folder: Path) -> dict[str, Any]:
    """Writes an encoder like BGE: the first token's state, and behind it dense modules, as EmbeddingGemma has them."""
    bert(folder, BertModel)
    first = Transformer(str(folder), do_lower_case=True)
    modules = [first, Pooling(64, "cls"), Dense(64, 96), Dense(96, 32, bias=False, activation_function=torch.nn.Identity())]
    model = SentenceTransformer(modules=[*modules, Normalize()], prompts={"query": "Find this: "})
    model.save_pretrained(str(folder), create_model_card=False)
    return {
        "plain": model.encode(TEXTS).tolist(),
        "query": model.encode(TEXTS, prompt_name="query").tolist(),
        "scores": model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].tolist(),
    }


def cross_encoder(folder: Path) -> dict[str, Any]:
    """Writes a model whose head scores pairs, each text of which is a segment of its own."""
    bert(folder, BertForSequenceClassification, num_labels=1)
    model = CrossEncoder(str(folder), activation_fn=torch.nn.Identity())
    model.save_pretrained(str(folder.parent / "cross logits"), create_model_card=False)
    model.activation_fn = torch.nn.Sigmoid()
    model.save_pretrained(str(folder), create_model_card=False)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    return {
        "logits": model.predict(pairs, activation_fn=torch.nn.Identity()).tolist(),
        "token logits": [token_logits(model, text) for text in TEXTS],
        "scores": model.predict(pairs).tolist(),
        "ranked": [int(found["corpus_id"]) for found in model.rank(QUERY, DOCUMENTS)],
    }


def colbert(folder: Path) -> dict[str, Any]:
    """Writes a model with a vector for each token, whose short queries end with tokens that nobody sees."""
    bert(folder, BertModel)
    expansion: Any = {"strategy": "fixed", "length": 24, "attend": False}
    first = Transformer(str(folder), document_length=30, query_expansion=expansion)
    mask = MultiVectorMask(skiplist_words=["##e", "no such token"])
    return multi_vector(folder, [first, *token_projection(), mask], {"query": "[q] ", "document": "[d] "})


def colbert_decoder(folder: Path) -> dict[str, Any]:
    """Writes a decoder that does the same: its long queries stay whole, and scores are means."""
    first = transformer(folder, Qwen3Model)
    first.query_length, first.query_expansion = 40, {"strategy": "min", "length": 12, "attend": True}
    return multi_vector(folder, [first, *token_projection(), MultiVectorMask()], None, similarity_fn_name="meanmaxsim")


def splade(folder: Path) -> dict[str, Any]:
    """Writes a masked language model with a weight for each token of the vocabulary."""
    bert(folder, BertForMaskedLM)
    modules = [Transformer(str(folder), transformer_task="fill-mask"), SpladePooling("max")]
    model = SparseEncoder(modules=modules, prompts={"query": "[q] ", "document": ""})
    model.save_pretrained(str(folder), create_model_card=False)
    return {
        "plain": model.encode(TEXTS).to_dense().tolist(),
        "query": model.encode_query(TEXTS).to_dense().tolist(),
        "scores": model.similarity(model.encode([QUERY]), model.encode(DOCUMENTS))[0].tolist(),
    }


def token_projection() -> list[Any]:
    dense = Dense(64, 24, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    return [dense, Normalize(module_input_name="token_embeddings")]


def pylate(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint as PyLate did, whose markers are tokens and which says nothing of punctuation."""
    bert(folder, BertModel)
    dense = Dense(64, 24, bias=False, activation_function=torch.nn.Identity())
    (folder / "1_Dense").mkdir()
    dense.save(str(folder / "1_Dense"))
    edit_json(folder / "1_Dense/config.json", {"module_input_name": None, "module_output_name": None})
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    saved = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[unused0] ",
        "document_prefix": "[unused1] ",
        "query_length": 20,
        "document_length": 30,
        "attend_to_expansion_tokens": False,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(saved))
    return scored(MultiVectorEncoder(str(folder)))


def stanford(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint as ColBERT's authors did: the projection lies beside the encoder."""
    bert(folder, BertModel)
    path = folder / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "linear.weight": torch.randn(24, 64)}, path, metadata={"format": "pt"})
    edit_json(folder / "config.json", {"architectures": ["HF_ColBERT"]})
    metadata = {"query_maxlen": 24, "doc_maxlen": 30, "dim": 24, "mask_punctuation": True, "attend_to_mask_tokens": True}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return scored(MultiVectorEncoder(str(folder)))


def multi_vector(folder: Path, modules: list[Any], prompts: Any, **settings: Any) -> dict[str, Any]:
    model = MultiVectorEncoder(modules=modules, prompts=prompts, **settings)
    model.save_pretrained(str(folder), create_model_card=False)
    return scored(model)


def scored(model: MultiVectorEncoder) -> dict[str, Any]:
    queries, documents = model.encode_query([QUERY, *TEXTS]), model.encode_document(DOCUMENTS)
    return {
        "queries": [one.tolist() for one in queries],
        "documents": [one.tolist() for one in documents],
        "scores": model.similarity(queries[:1], documents)[0].tolist(),
    }


def token_logits(model: CrossEncoder, text: str) -> list[list[float]]:
    """Returns what the head gives for each token of a text, as if it were the first one."""
    bert = model.model
    with torch.inference_mode():
        states = bert.bert(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found: list[list[float]] = bert.classifier(bert.bert.pooler(states[:, None])).tolist()
    return found


def bert(folder: Path, kind: Any, **config: Any) -> None:
    """Writes a random BERT in float32, whose tokens are characters in lower case."""
    folder.mkdir()
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[unused0]",
        "[unused1]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = kind(BertConfig(**sizes, vocab_size=len(words), max_position_embeddings=128, **config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def refused(source: Path, target: Path) -> None:
    """Writes checkpoints whose vectors are made in other ways than ours."""
    first = SentenceTransformer(str(source))[0]
    ways = {
        "dense": [first, Pooling(64), Dense(64, 32, activation_function=torch.nn.Softmax(-1))],
        "max": [first, Pooling(64, "max")],
        "two": [first, Pooling(64, ("mean", "cls"))],
        "prompt": [first, Pooling(64, include_prompt=False)],
    }
    for name, modules in ways.items():
        SentenceTransformer(modules=modules).save_pretrained(str(target / name), create_model_card=False)


def original(source: Path, target: Path) -> None:
    """Writes the reranker as its first checkpoints were: nothing tells it from a chat model."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "1_LogitScore")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (target / name).unlink()
    AutoTokenizer.from_pretrained(PYDOC).save_pretrained(target)


def transformer(
    folder: Path, kind: Any, *, ends: bool = False, template: str | None = None, task: str = "feature-extraction", **config: Any
) -> Transformer:
    """Writes a random Qwen3 in float32 and returns it as a module."""
    tokenizer = AutoTokenizer.from_pretrained(PYDOC)
    if ends:
        end = tokenizer.eos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template or tokenizer.chat_template
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    }
    shape = Qwen3Config(
        **sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        **{"tie_word_embeddings": False, **config},
    )
    model = kind(shape).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if task == "text-generation":
        return Transformer(str(folder), transformer_task=task)
    return Transformer(str(folder), modality_config=TEXTS_ALONE, module_output_name="token_embeddings")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
