"""`starling chat`: talk to a running server."""

import os
from typing import Annotated, Any

import typer

from starling_operator.commands.failures import fail


def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; without it a conversation begins.")] = None,
    url: Annotated[str, typer.Option("--url", help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="By default the first that the server has.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Also $STARLING_API_KEY.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 for the likeliest answer.")] = None,
) -> None:
    """Stream answers of a running server to the terminal."""
    import httpx

    from starling_operator.talk import AnswerError, Talk

    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    talk = Talk(url, api_key or os.environ.get("STARLING_API_KEY"), options, system)
    try:
        with talk:
            if prompt is not None:
                talk.ask(prompt, _show)
            else:
                _converse(talk)
    except AnswerError as error:
        fail(str(error), "change the request, or see the server's log")
    except httpx.HTTPError as error:
        fail(f"{url} cannot be reached: {error}", "start a server with `starling serve MODEL`, or give its --url")


def _show(piece: str) -> None:
    typer.echo(piece, nl=False)


def _converse(talk: Any) -> None:
    """Until the end of input or Ctrl-C."""
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if question.strip():
            talk.ask(question, _show)
