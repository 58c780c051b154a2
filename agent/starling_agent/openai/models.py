"""GET /v1/models, in OpenAI's form, and in Anthropic's for its clients"""

from collections.abc import Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from starling_agent.http.error_forms import is_anthropic
from starling_agent.openai.answering import json_response
from starling_agent.openai.codex_models import CodexModelList, codex_models
from starling_agent.openai.endpoint import Endpoint, endpoint_of
from starling_agent.openai.protocol.answers import ModelArchitecture, ModelCard, ModelList

VECTORS = ModelArchitecture(modality="text->embeddings", output_modalities=("embeddings",))
"""Modalities of a model without a head for tokens."""
router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the names that the model is served under. Codex, which says its `client_version`, gets its own list besides."""
    endpoint = endpoint_of(request)
    if is_anthropic(request.scope):
        return json_response(_model_page(endpoint, endpoint.names))
    data = [_card(endpoint, name) for name in endpoint.names]
    if "client_version" not in request.query_params:
        return json_response(ModelList(data=data))
    return json_response(CodexModelList(data=data, models=codex_models(endpoint)))


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """Returns one of them; a name may have slashes."""
    endpoint = endpoint_of(request)
    name = endpoint.model_name(model)
    return json_response(_model_info(endpoint, name) if is_anthropic(request.scope) else _card(endpoint, name))


def _model_page(endpoint: Endpoint, names: Sequence[str]) -> dict[str, object]:
    ends = {"first_id": names[0], "last_id": names[-1]}
    return {"data": [_model_info(endpoint, name) for name in names], "has_more": False, **ends}


def _model_info(endpoint: Endpoint, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(endpoint.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {**about, "max_input_tokens": endpoint.max_model_len, "max_tokens": endpoint.max_model_len}


def _card(endpoint: Endpoint, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=endpoint.created,
        root=endpoint.engine.config.worker.model_path,
        max_model_len=endpoint.max_model_len,
        context_length=endpoint.max_model_len,
        architecture=ModelArchitecture() if endpoint.engine.model_config.has_lm_head else VECTORS,
    )
