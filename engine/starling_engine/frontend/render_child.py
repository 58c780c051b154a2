"""Renders chats for a server, in a process of its own: `python -m starling_engine.frontend.render_child`."""

from typing import Any

from starling_engine.frontend.chat import ChatRenderer
from starling_engine.ipc.limited_child import InPlace, Work, serve


def _prepare(settings: Any) -> Work:
    renderer = ChatRenderer.from_json(settings)

    def render(job: Any) -> dict[str, Any]:
        prompt = renderer.render(**job)
        return {"text": prompt.text, "control": prompt.control}

    return render


if __name__ == "__main__":
    # Templates that were compiled are kept, which a copy of the process would not do.
    serve(_prepare, InPlace)
