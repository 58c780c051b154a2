"""Checks and defaults of what a request for vectors asks of a model, and the numbers that come back."""

from collections.abc import Collection

import msgspec

from starling_engine.errors import InvalidRequest
from starling_engine.model_config.classifier import LabelActivation
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.retrieval_heads import COLBERT, LEXICAL
from starling_engine.outputs import PooledNumbers, SparseVector, TokenRows
from starling_engine.params import OF_TOKENS, PoolingParams
from starling_engine.token_packing import unpack_floats, unpack_tokens


def check_pooling(params: PoolingParams, model: ModelConfig) -> None:
    """Raises InvalidRequest for parameters that are wrong, or that the model cannot have."""
    params.validate(model.vector_size, model.vocab_size, model.pooler.dimensions, model.traits.token_types)
    check_adapter(params.adapter, model, "adapter")
    if params.unseen_from is not None and model.causal:
        raise InvalidRequest("is for encoders", "unseen_from")
    if params.task in ("classify", "token_classify"):
        if model.classifier is None:
            raise InvalidRequest("this model has no classification head", "model")
        if model.classifier.of_tokens and params.task == "classify":
            raise InvalidRequest("this model's head labels tokens, and no text: POST /pooling with task token_classify", "model")
        return
    if params.logit_token_ids is None and model.pooler.fault is not None:
        raise InvalidRequest(f"this model makes no vectors here: {model.pooler.fault}", "model")
    heads = model.pooler.retrieval
    if params.task in ("token_embed", "sparse_embed") and heads is not None and not heads.readable:
        raise InvalidRequest(f"its {COLBERT} and {LEXICAL} are pickles, which are read with --load-format pt alone", "model")
    if params.task == "sparse_embed" and not model.pooler.has_sparse:
        raise InvalidRequest(f"this model's vectors are not sparse: possible is the task {model.pooler.task}", "model")
    if params.logit_token_ids is None and params.task == "embed" and model.pooler.splade is not None:
        raise InvalidRequest("this model's vectors are sparse: POST /pooling with task sparse_embed, or /score", "model")
    if params.logit_token_ids is None and params.task == "embed" and model.pooler.multi_vector is not None:
        raise InvalidRequest("this model has a vector for each token, and none for a text: POST /pooling, or /score", "model")
    if params.logit_token_ids is not None:
        check_gives_tokens(model)


def check_adapter(name: str | None, model: ModelConfig, field: str) -> None:
    """Raises InvalidRequest, naming the field, for a name that is none of the model's adapters."""
    if name is None:
        return
    if model.adapters is None:
        raise InvalidRequest("this model has no adapters for tasks; prompt_name has the checkpoint's prompts", field)
    if name not in model.adapters.names:
        raise InvalidRequest(f"{name[:100]!r} is no task of this model; possible: {', '.join(model.adapters.names)}", field)


def check_gives_tokens(model: ModelConfig) -> None:
    """Raises InvalidRequest for a model that has no logits, and names the routes to what it has."""
    if not model.has_lm_head:
        raise InvalidRequest(f"this model has no head that gives tokens; {_routes(model)}", "model")


def _routes(model: ModelConfig) -> str:
    """Returns where a model without a head for tokens is asked."""
    head, pooler = model.classifier, model.pooler
    if head is not None:
        if head.of_tokens:
            return "POST /pooling has its labels of tokens"
        return "use /score, /rerank or /classify" if len(head.labels) == 1 else "use /classify"
    if pooler.splade is not None or pooler.multi_vector is not None:
        return "POST /pooling has its vectors; or use /score or /rerank"
    return "use /v1/embeddings, /pooling, /score or /rerank"


def resolved(params: PoolingParams, model: ModelConfig) -> PoolingParams:
    """Returns the parameters with the model's defaults. Logits are those behind the last token, whatever its vectors are."""
    if params.logit_token_ids is not None:
        return PoolingParams(pooling="last", normalize=False, logit_token_ids=params.logit_token_ids)
    if params.task in ("classify", "token_classify"):
        assert model.classifier is not None, "checked with the parameters"
        pooling = model.classifier.head.pooling
        return PoolingParams(task=params.task, pooling=pooling, normalize=False, second_from=params.second_from)
    if params.task == "sparse_embed":
        return params
    pooler = model.pooler
    normalize = pooler.normalize if params.normalize is None else params.normalize
    return msgspec.structs.replace(params, pooling=params.pooling or pooler.pooling, normalize=normalize)


def numbers_of(packed: bytes, params: PoolingParams, num_tokens: int, left_out: Collection[int] = ()) -> PooledNumbers:
    """Returns a prompt's numbers in the form that the task has. A sparse vector has no weights of the tokens `left_out`."""
    if params.task == "sparse_embed":
        half = len(packed) // 2
        weights = zip(unpack_tokens(packed[:half]), unpack_floats(packed[half:]), strict=True)
        kept = {token: weight for token, weight in weights if token not in left_out}
        return SparseVector([*kept], [*kept.values()])
    if params.task in OF_TOKENS:
        import numpy as np  # routers import this module, and have none

        return np.frombuffer(packed, "<f4").reshape(num_tokens, -1)
    return unpack_floats(packed)


def activated_rows(activation: LabelActivation, logits: TokenRows) -> TokenRows:
    """Does the same to each row as `activated` to one text's numbers."""
    import numpy as np

    match activation:
        case "identity":
            return logits
        case "sigmoid":
            return np.exp(-np.logaddexp(np.float32(0), -logits))
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: TokenRows = shares / shares.sum(axis=1, keepdims=True)
    return found
