"""`starling chat`: talk to a running server, or to an InferenceService of a cluster."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starling_cli.cluster.client import Access
from starling_cli.commands.failures import fail
from starling_cli.commands.flags import Context, Kubeconfig, Namespace, connected

if TYPE_CHECKING:
    from starling_cli.chatting.client import ChatClient
    from starling_cli.chatting.session import Session
    from starling_cli.chatting.terminal import Display
    from starling_cli.chatting.tools import Tools

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
    tools: Annotated[
        Path | None, typer.Option("--tools", help="JSON file of tools as OpenAI's `tools`; an entry may have a `command` to run.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Run tools' commands without asking.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Stream answers to the terminal: `starling chat NAME`, or `starling chat "A question?"` for a server on this machine."""
    service, question = _service_and_question(name, prompt, url)
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    chosen = Chosen(api_key or os.environ.get("STARLING_API_KEY"), model, system, fields, _tools(tools), yes)
    if service is None:
        _talk(url or LOCAL_URL, chosen, question)
        return
    if question is None and kubeconfig is None and not Access(None, context, namespace).is_configured:
        fail(
            f"{service!r} is taken for an InferenceService's name, and no cluster is configured",
            f"give --kubeconfig, or ask a server on this machine: starling chat --url {LOCAL_URL} {service}",
        )
    with _service_url(service, kubeconfig, context, namespace) as forwarded_url:
        _talk(forwarded_url, chosen, question)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The flags of a chat, wherever its server is. `fields` are further fields of requests, None where not given."""

    api_key: str | None
    model: str | None
    system: str | None
    fields: dict[str, Any]
    tools: "Tools"
    yes: bool


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


def _tools(file: Path | None) -> "Tools":
    from starling_cli.chatting.tools import BadTools, Tools, read_tools

    try:
        return Tools([], {}) if file is None else read_tools(file)
    except BadTools as error:
        fail(str(error), "give a list of OpenAI's tools, or an object with `tools`")


def _talk(url: str, chosen: Chosen, question: str | None) -> None:
    import httpx
    from starling_agent.client.bounded import BadAnswer

    from starling_cli.chatting.client import AnswerError, ChatClient
    from starling_cli.chatting.slash_commands import BadCommand, Question
    from starling_cli.chatting.terminal import harmless

    try:
        with ChatClient(url, chosen.api_key) as client, _session(client, chosen, is_prompt=question is None) as session:
            if question is None:
                session.run()
            else:
                session.obey(Question(question))
    except (AnswerError, BadAnswer) as error:
        fail(harmless(str(error)), "change the request, or see the server's log")
    except httpx.HTTPError as error:
        fail(f"{url} cannot be reached: {error}", "start a server with `starling serve MODEL`, or give its --url")
    except BadCommand as error:
        fail(str(error), "see /help")
    except OSError as error:
        fail(str(error), "name another file")
    except EOFError:
        raise typer.Abort from None


@contextlib.contextmanager
def _session(client: "ChatClient", chosen: Chosen, *, is_prompt: bool) -> Iterator["Session"]:
    from starling_cli.chatting.conversation import Conversation
    from starling_cli.chatting.session import Session
    from starling_cli.chatting.terminal import Display
    from starling_cli.chatting.tool_calls import CallAnswerer

    display = Display()
    fields = chosen.fields | {"tools": chosen.tools.specs or None}
    answer_calls = CallAnswerer(chosen.tools, display, chosen.yes)
    talk = Conversation(client, fields, model=chosen.model, system=chosen.system, answer_calls=answer_calls)
    with contextlib.ExitStack() as closing:
        remember = _line_history(display, closing) if is_prompt and display.is_person else _forget
        yield Session(talk, display, remember)


def _line_history(display: "Display", closing: contextlib.ExitStack) -> Callable[[str], None]:
    from starling_cli.chatting.line_history import history_file, line_history

    try:
        return closing.enter_context(line_history(history_file()))
    except OSError as error:
        display.note(f"lines are not remembered: {error}")
        return _forget


def _forget(_: str) -> None:
    """Remembers no line."""
