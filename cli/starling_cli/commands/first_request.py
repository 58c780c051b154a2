"""The request that `starling serve` shows once a model serves: one that this model answers."""

import json
import shlex
from typing import TYPE_CHECKING, Any

from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.pooler import PoolerConfig

if TYPE_CHECKING:
    from starling_agent.openai.endpoint import Endpoint

QUESTION, DOCUMENTS = "What is a list?", ["Lists are mutable sequences.", "Sets have no order."]


def curl_line(url: str, endpoint: "Endpoint") -> str:
    """Returns a request to try at once."""
    path, asked = first_request(endpoint.engine.model_config, has_chat_template=endpoint.tokenizer.has_chat_template)
    body = json.dumps({"model": endpoint.names[0], **asked})
    key = ' -H "Authorization: Bearer $STARLING_API_KEY"' if endpoint.settings.api_keys else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def first_request(model: ModelConfig, *, has_chat_template: bool) -> tuple[str, dict[str, Any]]:
    """Returns path and fields, without the model's name, of what a model is made for.

    A decoder whose files say how it pools is one for vectors, though it chats, too.
    """
    head, pooler = model.classifier, model.pooler
    if pooler.classifier_tokens or (head is not None and not head.of_tokens and len(head.labels) == 1):
        return "/v1/rerank", {"query": QUESTION, "documents": DOCUMENTS}
    if head is not None:
        return ("/pooling", {"input": QUESTION, "task": "token_classify"}) if head.of_tokens else ("/classify", {"input": QUESTION})
    if pooler.task != "embed":
        return "/pooling", {"input": QUESTION}
    if not model.has_lm_head or (pooler.fault is None and pooler != PoolerConfig()):
        return "/v1/embeddings", {"input": QUESTION}
    if has_chat_template:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    return "/v1/completions", {"prompt": "Hello"}
