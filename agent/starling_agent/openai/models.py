"""GET /v1/models"""

from fastapi import APIRouter, Request, Response

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, endpoint_of
from starling_agent.openai.protocol.answers import ModelCard, ModelList

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the names that the model is served under."""
    endpoint = endpoint_of(request)
    return json_response(ModelList(data=[_card(endpoint, name) for name in endpoint.names]))


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """Returns one of them; a name may have slashes."""
    endpoint = endpoint_of(request)
    return json_response(_card(endpoint, endpoint.model_name(model)))


def _card(endpoint: Endpoint, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=endpoint.created,
        root=endpoint.engine.config.worker.model_path,
        max_model_len=endpoint.max_model_len,
    )
