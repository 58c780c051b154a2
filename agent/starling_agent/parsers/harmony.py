"""gpt-oss's format: messages, each with a header that names its channel and its recipient.

https://github.com/openai/harmony/blob/main/docs/format.md
"""

import re

from starling_agent.parsers.calls import read_arguments
from starling_agent.parsers.reading import Reading
from starling_agent.parsers.source import Markers, Reader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, CHANNEL, MESSAGE, "<|constrain|>", *MESSAGE_ENDS)
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_FUNCTIONS = "functions."
_HEADER_ENDS = Markers(MESSAGE, START, *MESSAGE_ENDS)
_BODY_ENDS = Markers(*MESSAGE_ENDS, START)


def read_messages(reading: Reading) -> Reader[None]:
    """Reads messages to the end of the output, which begins in a header, behind the role that the prompt has written."""
    source = reading.source
    while True:
        header, marker = yield from source.text_until(_HEADER_ENDS)
        if marker is None:
            return
        if marker == MESSAGE:
            yield from _message(reading, header)


def _message(reading: Reading, header: str) -> Reader[None]:
    """Reads the body of a message. What is for another recipient than a function is left out, as an unknown channel is."""
    source, output = reading.source, reading.output
    role, *channels = header.split(CHANNEL)
    channel = channels[-1].strip() if channels else ""
    recipient = _recipient(channel) or (_recipient(role) if len(channels) == 1 else None)
    if recipient is None or not reading.has_calls:
        sinks = {"analysis": output.reasoning, "commentary": output.content, "final": output.content, "": output.content}
        yield from source.until(_BODY_ENDS, sinks.get(_first_word(channel)))
        return
    if recipient.startswith(_FUNCTIONS) and (yield from source.next_character()) == "{":
        output.begin_call(recipient.removeprefix(_FUNCTIONS))
        yield from read_arguments(reading)
        yield from source.until(_BODY_ENDS)
        output.end_call()
    else:
        yield from source.until(_BODY_ENDS)


def _recipient(text: str) -> str | None:
    found = _RECIPIENT.search(text)
    return found[1] if found else None


def _first_word(text: str) -> str:
    found = re.match(r"\w+", text)
    return found[0] if found else ""
