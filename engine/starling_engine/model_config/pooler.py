"""Reads how a checkpoint's authors make vectors and scores: sentence-transformers' files beside the config. Imports no torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starling_engine.errors import ModelError
from starling_engine.model_config.adapters import INSTRUCTIONS
from starling_engine.model_config.classifier import LabelActivation, PoolingType, read_activation
from starling_engine.model_config.colbert import (
    METADATA,
    PYLATE,
    STANFORD,
    markers_of,
    pylate_mask,
    pylate_texts,
    stanford_files,
    stanford_projection,
    with_markers,
)
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.multi_vector import KEY, ROLES, MultiVectorConfig, read_multi_vector
from starling_engine.model_config.projection import ProjectionConfig, read_projection
from starling_engine.model_config.retrieval_heads import RetrievalHeads, read_retrieval_heads
from starling_engine.model_config.splade import SpladeConfig, read_splade
from starling_engine.params import PoolingTask

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
MASK, SPLADE = "MultiVectorMask", "SpladePooling"
_MODES: Mapping[str, PoolingType] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Names of modes before release 5.4, each of which is true or false."""


_ALIASES = {"pylate.models.Dense.Dense": "Dense"}
"""Classes of others that do what those of sentence-transformers do."""
_ADAPTED = "custom_st.Transformer"
"""The class in Jina 3's own checkpoint, which takes the name of an adapter besides."""
_LENGTH_NAMES = frozenset({"padding", "padding_side", "pad_to_multiple_of", "truncation", "max_length", "return_tensors"})
"""Arguments of processors that change no token but those that they cut. A request says what is cut."""
_RENDER_NAMES = frozenset(
    {"messages", "conversation", "chat_template", "continue_final_message", "tokenize", "return_dict", "tokenizer_kwargs"}
)
"""Arguments of `apply_chat_template` that are no variables of the template, and that would change what it makes of a text."""


@dataclass(frozen=True, kw_only=True)
class TextMessages:
    """Says how texts that become vectors go through the chat template: as a user's message, behind their prompt as the system's.

    parts            messages have lists of parts where the template reads these
    restore_suffix   a text that is cut keeps the tokens that the template writes behind it
    """

    parts: bool = False
    restore_suffix: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Defaults of vectors and scores. Without files of sentence-transformers a vector is the normalized mean.

    dimensions           lengths that a vector may be cut to; empty: any
    prompts              texts that go before an input, by name; `default_prompt_name` is the one where none is named
    projections          what vectors pass behind their pooling
    lower_case           texts are read in lower case
    fault                why vectors would not be those that the authors mean; None where they are
    score_activation     makes the score of a pair of a head's one number, where these files name it
    classifier_tokens    tokens whose logits give a score: that of "yes", and that of "no", which some models lack
    messages             how texts are rendered before they are pooled; None: they are read as they are
    template_variables   what the chat template gets when it renders a text, or the pair that is scored
    multi_vector         how texts are compared by vectors of their tokens, of a model that has those alone
    markers              beginnings of prompts that are one token each, where the tokenizer knows them
    max_length           the longest text that the authors mean, in tokens; None: as long as the model takes
    splade               how a text's sparse vector is made, of a model that has those alone
    retrieval            other heads, which make vectors of tokens and sparse vectors beside those of a text
    """

    pooling: PoolingType = "mean"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    projections: tuple[ProjectionConfig, ...] = ()
    lower_case: bool = False
    fault: str | None = None
    score_activation: LabelActivation | None = None
    classifier_tokens: tuple[int, ...] = ()
    messages: TextMessages | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    multi_vector: MultiVectorConfig | None = None
    markers: tuple[str, ...] = ()
    max_length: int | None = None
    splade: SpladeConfig | None = None
    retrieval: RetrievalHeads | None = None

    @property
    def has_sparse(self) -> bool:
        """Says if the model makes sparse vectors."""
        return self.splade is not None or (self.retrieval is not None and self.retrieval.readable)

    @property
    def late(self) -> MultiVectorConfig:
        """Returns how queries and documents become vectors of their tokens, of any model."""
        of_bge_m3 = self.retrieval is not None
        return self.multi_vector or MultiVectorConfig(skips_first=of_bge_m3, normalize=True, mean=of_bge_m3)

    @property
    def task(self) -> PoolingTask:
        """The task of a request for vectors that names none."""
        if self.splade is not None:
            return "sparse_embed"
        return "embed" if self.multi_vector is None else "token_embed"

    @property
    def rendering(self) -> dict[str, Any]:
        """Arguments of `ChatRenderer.render` for these texts, apart from their messages."""
        variables = dict(self.template_variables)
        opens_answer = variables.pop("add_generation_prompt", False) is True
        return {"template": None, "add_generation_prompt": opens_answer, "variables": variables}


def pooler_of(kind: PoolingType | None) -> PoolerConfig:
    """Returns the config of a model that says how it pools, and nothing else."""
    return PoolerConfig() if kind is None else PoolerConfig(pooling=kind)


def read_pooler(folder: Path, config: Fields) -> PoolerConfig:
    """Reads the files in a checkpoint's folder, of which none has to be there. Raises ModelError naming a wrong field."""
    dimensions, retrieval = config.integers("matryoshka_dimensions"), read_retrieval_heads(folder)
    if not (folder / MODULES).exists():
        if STANFORD in config.texts("architectures"):
            return _stanford(folder, config)
        return PoolerConfig(dimensions=dimensions, retrieval=retrieval, **_instructions(config))
    listed = _modules(folder)
    modules = dict(listed)
    saved, texts = _fields(folder / PROMPTS), _fields(folder / TRANSFORMER)
    length = texts.integer("max_seq_length") if texts.has("max_seq_length") else None
    alike: dict[str, Any] = {"dimensions": dimensions, "max_length": length}
    if SPLADE in modules:
        return PoolerConfig(**alike, **_prompts(saved), **_sparse(folder, listed, texts))
    if saved.get("model_type") == PYLATE:
        found = _multi_vector(folder, listed, pylate_mask(saved), Fields({}, PROMPTS), pylate_texts(saved, texts))
        return PoolerConfig(**alike, **_prompts(with_markers(saved), ROLES), **found | _marked(saved))
    if saved.get("model_type") == "MultiVectorEncoder":
        mask = _fields(folder / Path(modules.get(MASK, MASK)).name / "config.json")
        return PoolerConfig(**alike, **_prompts(saved, ROLES), **_multi_vector(folder, listed, mask, saved, texts))
    found = {"normalize": "Normalize" in modules} if "Pooling" in modules else {}
    for name, read in _READERS.items():
        if name in modules:
            # A name only: the file must not lead out of its folder.
            path = folder / Path(modules[name]).name / "config.json"
            found |= read(Fields.read(path)) if path.exists() else {"fault": f"{path.parent.name}/{path.name} is missing"}
    template = texts.child("processing_kwargs").child("chat_template")
    if "Pooling" in modules:
        found |= _reading(texts)
        found["lower_case"] = texts.boolean("do_lower_case", False)
        found["messages"] = _messages(texts.child("modality_config"), template)
    found["template_variables"] = _variables(template)
    found |= _projections(folder, listed, "Pooling", "sentence_embedding")
    known = ("Transformer", "Normalize", "Dense", *_READERS, *([_ADAPTED] if config.has("lora_adaptations") else []))
    if unknown := [name for name in modules if name not in known]:
        found["fault"] = f"its {MODULES} names {', '.join(unknown)}, which is not supported"
    if "LogitScore" not in modules:
        found["score_activation"] = read_activation(saved, "activation_fn")
    prompts = _prompts(saved)
    prompts["prompts"] = {**_instructions(config)["prompts"], **prompts["prompts"]}
    return PoolerConfig(**alike, retrieval=retrieval, **prompts, **found)


def _instructions(config: Fields) -> dict[str, Any]:
    """Reads the prompts of adapters' tasks, by their names."""
    return {"prompts": {name: config.child(INSTRUCTIONS).text(name) for name in config.child(INSTRUCTIONS).names()}}


def _sparse(folder: Path, modules: list[tuple[str, str]], texts: Fields) -> dict[str, Any]:
    """Reads a checkpoint with a weight for each token of the vocabulary."""
    paths = dict(modules)
    found: dict[str, Any] = {"splade": read_splade(Fields.read(folder / Path(paths[SPLADE]).name / "config.json"))}
    found["lower_case"] = texts.boolean("do_lower_case", False)
    found |= _reading(texts, output="logits")
    if unknown := [name for name in paths if name not in ("Transformer", "MLMTransformer", SPLADE)]:
        found["fault"] = f"its {MODULES} names {', '.join(unknown)}, which is not supported"
    return found


def _stanford(folder: Path, config: Fields) -> PoolerConfig:
    """Reads a checkpoint of ColBERT's authors, without files of sentence-transformers."""
    saved, texts = stanford_files(folder)
    found = _multi_vector(folder, [], pylate_mask(saved), Fields({}, METADATA), pylate_texts(saved, texts))
    found["projections"] = (stanford_projection(folder, config),)
    return PoolerConfig(**_prompts(with_markers(saved), ROLES), **found | _marked(saved))


def _marked(saved: Fields) -> dict[str, Any]:
    """Returns what PyLate's models do besides what their modules say."""
    return {"normalize": True, "markers": tuple(filter(None, markers_of(saved).values()))}


def _multi_vector(folder: Path, modules: list[tuple[str, str]], mask: Fields, saved: Fields, texts: Fields) -> dict[str, Any]:
    """Reads a checkpoint with a vector for each token; `mask` is the config of the module of that name."""
    paths = dict(modules)
    found = {"normalize": "Normalize" in paths, "multi_vector": read_multi_vector(texts, mask, saved)}
    found["lower_case"] = texts.boolean("do_lower_case", False)
    found |= _reading(texts, expands=True)
    found |= _projections(folder, modules, "Transformer", KEY)
    if "Normalize" in paths and _fields(folder / Path(paths["Normalize"]).name / "config.json").get("module_input_name") != KEY:
        found["fault"] = f"its Normalize module has another module_input_name than {KEY!r}"
    if texts.child("modality_config").has("message"):
        found["fault"] = f"{TRANSFORMER} sends texts of a model with a vector for each token through a chat template"
    if unknown := [name for name in paths if name not in ("Transformer", "Normalize", "Dense", MASK)]:
        found["fault"] = f"its {MODULES} names {', '.join(unknown)}, which is not supported"
    return found


def _projections(folder: Path, modules: list[tuple[str, str]], first: str, features: str) -> dict[str, Any]:
    """Reads the dense modules, which come behind the module `first`, and before vectors are normalized."""
    names = [name for name, _ in modules]
    if "Dense" not in names:
        return {}
    last = len(names) - 1 - names[::-1].index("Dense")
    if first not in names[: names.index("Dense")] or "Normalize" in names[:last]:
        return {"fault": f"its {MODULES} has Dense where it is not supported, before {first} or behind Normalize"}
    found = [read_projection(folder / Path(path).name, features) for name, path in modules if name == "Dense"]
    why = next((one for one in found if isinstance(one, str)), None)
    if why is not None:
        return {"fault": f"its Dense module has {why}, which is not supported"}
    return {"projections": tuple(found)}


def _fields(path: Path) -> Fields:
    return Fields.read(path) if path.exists() else Fields({}, path.name)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Returns the class's name and the folder of each module, in their order. Classes of others have their whole names."""
    path = folder / MODULES
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [(_class_of(module["type"]), module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error


def _class_of(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else _ALIASES.get(name, name)


def _pooling(config: Fields) -> dict[str, Any]:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_MODES.items() if config.boolean(name, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        return {"fault": f"its vectors are pooled by {modes}, and only {', '.join(_MODES)} are supported, one at a time"}
    if not config.boolean("include_prompt", True):
        return {"fault": "its vectors leave out the prompt's tokens (include_prompt: false), which is not supported"}
    return {"pooling": _MODES[modes[0]]}


def _classifier(config: Fields) -> dict[str, Any]:
    names = [name for name in ("true_token_id", "false_token_id") if config.has(name) or name == "true_token_id"]
    return {"classifier_tokens": tuple(config.integer(name, low=0) for name in names)}


def _messages(modalities: Fields, template: Fields) -> TextMessages | None:
    if not modalities.has("message"):
        return None
    parts = modalities.child("message").get("format") == "structured"
    return TextMessages(parts=parts, restore_suffix=template.boolean("restore_suffix", True))


def _variables(template: Fields) -> dict[str, Any]:
    """Returns what the template's variables are. Raises ModelError for an argument that is none."""
    for name in template.names():
        if name in _RENDER_NAMES:
            raise template.error(name, "is not supported; only variables of the template and add_generation_prompt are")
    return {name: value for name, value in template.values.items() if name not in (*_LENGTH_NAMES, "restore_suffix")}


def _reading(texts: Fields, *, expands: bool = False, output: str = "last_hidden_state") -> dict[str, Any]:
    """Returns the fault of a way to read texts that is not ours, if there is one. `expands`: queries may be expanded."""
    why = next((way for way in _ways_of_reading(texts, output) if not (expands and way == "query_expansion")), None)
    return {} if why is None else {"fault": f"{TRANSFORMER} asks for {why}, which is not supported"}


def _ways_of_reading(texts: Fields, output: str) -> Iterator[str]:
    """Yields what a file asks of its texts that is not done here, by the field's name."""
    if texts.has("query_expansion"):
        yield "query_expansion"
    modalities = texts.child("modality_config")
    used = "message" if modalities.has("message") else "text"
    for name, ours in (("method", "forward"), ("method_output_name", output)):
        if (value := modalities.child(used).get(name)) not in (None, ours):
            yield f"modality_config.{used}.{name} {value!r}"
    for group in ("processor_kwargs", "tokenizer_args"):
        if texts.child(group).has("chat_template"):
            yield f"{group}.chat_template"
    for group in ("common", "text"):
        arguments = texts.child("processing_kwargs").child(group).names()
        yield from (f"processing_kwargs.{group}.{name}" for name in arguments if name not in (*_LENGTH_NAMES, "logits_to_keep"))


_READERS = {"Pooling": _pooling, "LogitScore": _classifier}
"""Readers of modules' configs, by the module's class."""


def _prompts(config: Fields, names: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the prompts; those of `names` are there in any case."""
    prompts = config.child("prompts")
    texts = {**dict.fromkeys(names, ""), **{name: prompts.text(name) for name in prompts.names()}}
    default = config.text("default_prompt_name") if config.has("default_prompt_name") else None
    if default is not None and default not in texts:
        raise config.error("default_prompt_name", f"must be one of {', '.join(texts)}")
    return {"prompts": texts, "default_prompt_name": default}
