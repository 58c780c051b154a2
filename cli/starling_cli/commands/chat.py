"""`starling chat`: talk to a running server, or to an InferenceService of a cluster."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from starling_cli.commands.failures import fail
from starling_cli.commands.flags import Context, Kubeconfig, Namespace, connected

LOCAL_URL = "http://127.0.0.1:8000"
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Form of names that the API allows. A question with a space, a capital or a mark cannot be one."""


def chat(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="An InferenceService (one lower-case word); left out, the server at --url."),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="One question; without it a conversation begins.")] = None,
    url: Annotated[str | None, typer.Option("--url", help=f"The server, instead of a service. Default: {LOCAL_URL}")] = None,
    model: Annotated[str | None, typer.Option("--model", help="By default the first that the server has.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Also $STARLING_API_KEY.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 for the likeliest answer.")] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Stream answers to the terminal: `starling chat NAME`, or `starling chat "A question?"` for a server on this machine."""
    service, question = _service_and_question(name, prompt, url)
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    key = api_key or os.environ.get("STARLING_API_KEY")
    if service is None:
        _talk(url or LOCAL_URL, key, options, system, question)
        return
    with _service_url(service, kubeconfig, context, namespace) as forwarded_url:
        _talk(forwarded_url, key, options, system, question)


def _service_and_question(name: str | None, prompt: str | None, url: str | None) -> tuple[str | None, str | None]:
    """Returns (service, question). A single argument is a service only if it can be one and there is no --url."""
    if prompt is not None:
        if url is not None:
            fail("a service NAME and --url exclude each other", "give one of them")
        if name is None or not SERVICE_NAME.fullmatch(name):
            fail(f"{name!r} is no InferenceService's name", "write the question as one argument, in quotes")
        return name, prompt
    if name is not None and url is None and SERVICE_NAME.fullmatch(name):
        return name, None
    return None, name


@contextlib.contextmanager
def _service_url(service: str, kubeconfig: Any, context: str | None, namespace: str | None) -> Iterator[str]:
    from starling_cli.cluster.port_forward import forwarded, ready_pod

    with connected(kubeconfig, context, namespace) as cluster, forwarded(cluster, ready_pod(cluster, service)) as url:
        yield url


def _talk(url: str, key: str | None, options: dict[str, Any], system: str | None, question: str | None) -> None:
    import httpx
    from starling_agent.client.bounded import BadAnswer

    from starling_cli.conversation import AnswerError, Conversation

    try:
        with Conversation(url, key, options, system) as talk:
            if question is not None:
                talk.ask(question, _show, _show_reasoning)
            else:
                _converse(talk)
    except (AnswerError, BadAnswer) as error:
        fail(str(error), "change the request, or see the server's log")
    except httpx.HTTPError as error:
        fail(f"{url} cannot be reached: {error}", "start a server with `starling serve MODEL`, or give its --url")


def _show(piece: str) -> None:
    typer.echo(piece, nl=False)


def _show_reasoning(piece: str) -> None:
    """Shows what the model writes for itself to a person alone: it is not the answer that a pipe wants."""
    if sys.stdout.isatty():
        typer.secho(piece, dim=True, nl=False)


def _converse(talk: Any) -> None:
    """Asks and answers until the end of input or Ctrl-C."""
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if question.strip():
            talk.ask(question, _show, _show_reasoning)
