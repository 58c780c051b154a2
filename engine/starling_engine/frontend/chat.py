"""Chat templates: turn messages into the prompt that the model was trained on.

Templates are programs that come with a checkpoint, so they run in jinja2's sandbox and see plain JSON values only. They get the
same filters, globals, `tools`, `documents` and special tokens as from transformers' `apply_chat_template`.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.control_tokens import ChatPrompt, ControlTokens, draw_sentinel, turn_markers
from starling_engine.frontend.shown_tools import Message, ShownCalls, with_tools_and_calls
from starling_engine.frontend.template import CompiledTemplate, compile_template
from starling_engine.model_config.fields import Fields

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Ends in a space, which shows whether a template trims its messages."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatTemplates:
    """A checkpoint's templates by name; the only one, or the one for all other cases, is "default"."""

    by_name: Mapping[str, str]

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> "ChatTemplates":
        """Reads the templates. Separate files take precedence over the tokenizer's config, as in transformers.

        Where neither has one, it is that of a processor of images and text (chat_template.json). Raises ModelError where that file
        is no such object.
        """
        files = {path.stem: path for path in sorted((folder / "chat_templates").glob("*.jinja"))}
        if (single := folder / "chat_template.jinja").is_file():
            files["default"] = single
        if files:
            return cls({name: path.read_text(encoding="utf-8") for name, path in files.items()})
        configured = tokenizer_config.get("chat_template")
        if isinstance(configured, list):
            return cls({entry["name"]: entry["template"] for entry in configured})
        if not configured and (of_processor := folder / "chat_template.json").is_file():
            configured = Fields.read(of_processor).text("chat_template")
        return cls({"default": configured} if configured else {})

    def choose(self, template: str | None, with_tools: bool) -> CompiledTemplate:
        """Returns `template`, which is a template or the name of one of the checkpoint's; for None the one that fits.

        Raises InvalidRequest if there is none or the given one cannot be compiled, ModelError if the checkpoint's cannot.
        """
        if template is not None and template not in self.by_name:
            try:
                return compile_template(template)
            except ValueError as error:
                raise InvalidRequest(f"this is not a chat template: {error}", "chat_template") from error
        name = template or ("tool_use" if with_tools and "tool_use" in self.by_name else "default")
        if name not in self.by_name:
            raise InvalidRequest(self._what_is_missing(), "chat_template" if self.by_name else "messages")
        try:
            return compile_template(self.by_name[name])
        except ValueError as error:
            raise ModelError(f"the checkpoint's chat template {name!r} cannot be read: {error}") from error

    def turn_markers(self, tokens: Collection[str]) -> frozenset[str]:
        """Returns `tokens` that mark turns in these templates. One that cannot be compiled raises only when it is chosen."""
        written: set[str] = set()
        sought: set[str] = set()
        for source in self.by_name.values():
            with suppress(ValueError):
                template = compile_template(source)
                written |= template.written
                sought |= template.sought
        return turn_markers(tokens, written, sought)

    def _what_is_missing(self) -> str:
        if not self.by_name:
            return "the model has no chat template: give one as chat_template, or ask for a completion of a plain prompt"
        return f"the model has no default chat template: name one of {', '.join(sorted(self.by_name))} as chat_template"


@dataclass(frozen=True)
class ChatRenderer:
    """A checkpoint's templates, and their variables other than the messages. Small enough to send to another process."""

    templates: ChatTemplates
    named_tokens: Mapping[str, str]
    control: ControlTokens

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ChatRenderer":
        control = ControlTokens(frozenset(value["spellings"]))
        return cls(ChatTemplates(value["templates"]), value["named_tokens"], control)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values for another process."""
        spellings = sorted(self.control.spellings)
        return {"templates": dict(self.templates.by_name), "named_tokens": dict(self.named_tokens), "spellings": spellings}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any],
        calls: Sequence[Any] | None = None,
    ) -> ChatPrompt:
        """Returns the prompt for a conversation. `variables` are the template's own (tools, enable_thinking, ...).

        `calls` are the fields of `ShownCalls`, for templates that show no calls.
        Raises InvalidRequest with the template's error, or with the message that cannot be rendered.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message needs add_generation_prompt=False", "continue_final_message")
        if not messages:
            raise InvalidRequest("at least one message is needed", "messages")
        tools = variables.get("tools")
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
            raise InvalidRequest("must be a list of objects", "tools")
        chosen = self.templates.choose(template, with_tools=tools is not None)
        given = {"tools": None, "documents": None, **self.named_tokens, **_plain(variables, "chat_template_kwargs")}
        given["messages"] = [_prepare(message, index, chosen) for index, message in enumerate(messages)]
        given["add_generation_prompt"] = add_generation_prompt
        show = _rendered_to_continue if continue_final_message else _rendered
        render = partial(show, calls=None if calls is None else ShownCalls(*calls))
        return self._render(chosen, given, ("messages", *variables), render)

    def _render(self, template: CompiledTemplate, given: dict[str, Any], texts: Sequence[str], render: "_Render") -> ChatPrompt:
        """Renders texts of users that could spell control tokens twice, with and without sentinels: they differ only if they do."""
        sentinel = draw_sentinel()
        marked = given | {name: self.control.marked(given[name], sentinel, template.sought) for name in texts}
        could_spell = marked != given
        prompt = ChatPrompt(render(template, given))
        if not could_spell:
            return prompt
        distinguished = self.control.unmarked(render(template, marked), sentinel)
        return prompt if self.control.spelled(prompt) == self.control.spelled(distinguished) else distinguished


_Render = Callable[[CompiledTemplate, dict[str, Any]], str]


class CallArguments(dict[str, Any]):
    """The arguments of a call in the history: an object, and its JSON where a template writes it as a text.

    Templates of some families want objects and others texts (DeepSeek R1 and V3.1); clients send texts to all.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _rendered(template: CompiledTemplate, given: dict[str, Any], *, calls: ShownCalls | None) -> str:
    messages = with_tools_and_calls(given["messages"], given["tools"], template, calls)
    return template.render(**given | {"messages": [_with_arguments(message) for message in messages]})


def _with_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message if not isinstance(calls, list) else {**message, "tool_calls": [_with_own_arguments(call) for call in calls]}


def _with_own_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": dict() as arguments} as function}:
            return {**call, "function": {**function, "arguments": CallArguments(arguments)}}
    return call


def _rendered_to_continue(template: CompiledTemplate, given: dict[str, Any], *, calls: ShownCalls | None) -> str:
    ending = _mark_the_end(given["messages"])
    return _cut_at_mark(_rendered(template, given, calls=calls), ending)


def _prepare(message: Message, index: int, template: CompiledTemplate) -> Message:
    """Returns a copy for the template, without null fields: OpenAI's clients send `content: null` for an absent one."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message must be an object, got {type(message).__name__}", where)
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InvalidRequest(f"must be a text, got {type(plain.get('role')).__name__}", f"{where}.role")
    if "content" in plain:
        plain["content"] = _content(plain["content"], f"{where}.content", template)
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _content(content: Any, where: str, template: CompiledTemplate) -> Any:
    """Returns the content in the form that the template reads: a string, or a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.wants_parts else content
    if not isinstance(content, list):
        raise InvalidRequest(f"must be a string or a list of parts, got {type(content).__name__}", where)
    texts = [_text_of(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return content if template.reads_parts else "\n".join(texts)


def _text_of(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequest(f'only parts {{"type": "text", "text": "..."}} are possible, got {kind!r}', where)
    return text


def _mark_the_end(messages: list[Message]) -> str:
    """Puts a mark after the final message's text, from which on all can be cut off; returns the text."""
    message = messages[-1]
    content = message.get("content")
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])
        content[-1]["text"] = text + _CONTINUE_HERE
    elif isinstance(content, str):
        text = content
        message["content"] = text + _CONTINUE_HERE
    else:
        raise InvalidRequest("continue_final_message needs text to continue", f"messages[{len(messages) - 1}].content")
    return text


def _cut_at_mark(prompt: str, ending: str) -> str:
    mark = prompt.rfind(_CONTINUE_HERE.strip())
    if mark < 0 or ending.strip() not in prompt:
        raise InvalidRequest("the chat template changes the final message, so it cannot be continued", "messages")
    trimmed = not prompt.startswith(_CONTINUE_HERE, mark)
    return prompt[:mark].rstrip() if trimmed else prompt[:mark]


def _plain(value: Any, where: str) -> Any:
    """Returns a deep copy of JSON values alone: an object's methods would be a way out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"holds a {type(value).__name__}, which a chat template cannot show", where) from error
