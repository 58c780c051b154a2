"""A client that names the model for tests that have something else to say."""

from typing import Any

import httpx

NEED_MODEL = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v2/embed",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
)


class NamingClient(httpx.Client):
    """A client that adds `model` to `json` bodies where the API wants one.

    Hundreds of tests are about other fields; the name of whichever server they ask would be noise in each of them. A test about
    `model` itself sends its body as `content`, which stays as it is, or says in `json` which one it is.
    """

    model = ""
    """The name that is added; set once the server is known."""

    def build_request(self, method: str, url: httpx.URL | str, *, json: Any = None, **more: Any) -> httpx.Request:
        return super().build_request(method, url, json=named(httpx.URL(url).path, json, self.model), **more)


def named(path: str, body: Any, model: str) -> Any:
    """Returns a body with the model in it, if requests of the path need one and it has none."""
    return {"model": model, **body} if path in NEED_MODEL and isinstance(body, dict) else body
