"""Measures what it costs a server to split outputs into content, reasoning and calls of tools, with a mock core at a set rate.

    python bench/frontend.py [--streams N ...] [--rate TOKENS_PER_SECOND] [--rounds N] [--short]

The same tokens go to chats with `tools` at a server that knows the model's formats, and to plain chats at one that knows none, in
turns. Everything but the core is real: detokenizing, parsing, events and HTTP. Measured are the server's processor time for each
token, from the first one on, and the time from the core's delivery of a token to what the client gets: the first event, the event
that the token completes, and all of its characters, some of which wait for the next token.

Writes bench/results/frontend.md.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mock_core
from frontend_streams import Timeline, read_streams, shown_tokens
from mock_served import END, NAME, Served, write_model

RESULTS = Path(__file__).parent / "results" / "frontend.md"
REASONING = (
    "The user wants a function that reads a file of settings, and tests for it. I look at what is there first. The module has "
    "no reader yet, so I write one, with errors that name the file. Then I run the tests, for a change that was not run is a guess."
)
CODE = (
    "import json\nfrom pathlib import Path\n\n\ndef read_settings(path: Path) -> dict[str, object]:\n"
    '    """Reads a file of settings."""\n    try:\n        return json.loads(path.read_text())\n    except ValueError as error:\n'
    '        raise SettingsError(f"{path} is no JSON: {error}") from None\n'
)
CALLS = (
    ("write_file", {"path": "src/settings.py", "content": CODE}),
    ("run", {"command": "pytest -q tests/test_settings.py", "seconds": 60}),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in arguments},
                "required": [*arguments],
            },
        },
    }
    for name, arguments in CALLS
]
CONTENT = "I write the reader, and run its tests."
OUTPUT = f"<think>\n{REASONING}\n</think>\n\n{CONTENT}\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)

PARTS: dict[object, str] = {
    "reasoning": REASONING,
    "content": CONTENT,
    **{i: json.dumps(arguments) for i, (_, arguments) in enumerate(CALLS)},
}


@dataclass(frozen=True)
class Round:
    """Microseconds of processor time for a token, events with text a second, and the seconds of all streams' timings."""

    cpu: float
    rate: float
    first: list[float]
    events: list[float]
    tokens: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, in turns")
    parser.add_argument("--short", action="store_true", help="few streams, one round, and no file: only to see that it works")
    args = parser.parse_args()
    if args.short:
        args.streams, args.rate, args.rounds = [1, 16], 200.0, 1
    from shared import machine  # imports torch, which the core's processes would do as well

    load = os.getloadavg()[0]
    text = f"# Parsing of outputs\n\n{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {load:.1f}.\n"
    for section in measure(args.streams, args.rate, args.rounds):
        text += f"\n{section}\n"
        print(section)
        if not args.short:
            RESULTS.write_text(text)  # each as it ends: all of them take 15 minutes


def measure(counts: Sequence[int], rate: float, rounds: int) -> Iterator[str]:
    """Yields a section of the results for each number of streams."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        model = Path(folder) / "model"
        tokenizer = write_model(model)
        output = tokenizer.encode(OUTPUT + END).ids
        shown = shown_tokens(tokenizer, output, OUTPUT, PARTS)
        sides = [closing.enter_context(contextlib.closing(Served(model, output, parsers))) for parsers in ("auto", "none")]
        for streams in counts:
            pairs = []
            for number in range(-1, rounds):  # the first one warms up
                print(f"{streams} streams, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                found = {i: one_round(sides[i], streams, rate, shown, None if i else TOOLS) for i in ((0, 1), (1, 0))[number % 2]}
                pairs.append((found[0], found[1]))
            yield table(streams, rate, len(output), pairs[1:])


def one_round(side: Served, streams: int, rate: float, shown: Timeline, tools: object) -> Round:
    message = {"role": "user", "content": "Write a reader of settings, and test it."}
    body = {"model": NAME, "messages": [message], "stream": True, "max_tokens": 2000, **({"tools": tools} if tools else {})}
    side.control.send(mock_core.Round(streams, rate))
    reading = read_streams(side.port, streams, json.dumps(body).encode(), side.control, lambda: side.cpu_seconds)
    timings = [shown.lateness(stream, reading.sent, is_split=tools is not None) for stream in reading.streams]
    events = [late for timing in timings for late in timing.events]
    return Round(
        reading.cpu_seconds / (streams * len(reading.sent)) * 1e6,
        len(events) / (reading.sent[-1] - reading.sent[0]),
        [timing.first for timing in timings],
        events,
        [late for timing in timings for late in timing.tokens],
    )


def table(streams: int, rate: float, tokens: int, pairs: list[tuple[Round, Round]]) -> str:
    """Medians over the rounds; lateness over all their tokens."""
    sides = list(zip(*pairs, strict=True))
    rows = {
        "processor time, us a token": [statistics.median(one.cpu for one in side) for side in sides],
        "events a second": [statistics.median(one.rate for one in side) for side in sides],
    }
    kinds = {"the first event": "first", "an event": "events", "all of a token": "tokens"}
    for name, kind in kinds.items():
        late = [[seconds for one in side for seconds in getattr(one, kind)] for side in sides]
        for words, share in (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99)):
            rows[f"token to {name}, ms, {words}"] = [quantile(side, share) * 1e3 for side in late]
    ratio = statistics.median(one.cpu / other.cpu for one, other in pairs)
    lines = [
        f"## {streams} stream{'s' if streams > 1 else ''}",
        "",
        f"{tokens} tokens each, {rate:g} a second; {len(pairs)} rounds in turns. Median ratio of processor time: {ratio:.3f}.",
        "",
        "| | tools and reasoning | plain | ratio |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {one:.2f} | {other:.2f} | {one / other:.3f} |" for name, (one, other) in rows.items()),
    ]
    return "\n".join(lines)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
