"""Results as a table for people and as JSON for machines."""

import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from starling_cli.benchmark.acceptance import Acceptance
from starling_cli.benchmark.offline import LatencyResult
from starling_cli.benchmark.records import Spread, Summary


def print_summary(title: str, summary: Summary) -> None:
    table = Table(title=title, show_header=False)
    rows = [
        ("requests completed", f"{summary.completed}"),
        ("requests failed", f"{summary.failed}"),
        ("seconds", f"{summary.seconds:.2f}"),
        ("prompt tokens", f"{summary.prompt_tokens}"),
        ("output tokens", f"{summary.output_tokens}"),
        ("requests/s", f"{summary.request_rate:.2f}"),
        ("output tokens/s", f"{summary.output_rate:.1f}"),
        ("all tokens/s", f"{summary.total_rate:.1f}"),
    ]
    if summary.goodput is not None:
        rows.append(("goodput (requests/s that met the goals)", f"{summary.goodput:.2f}"))
    if summary.drafts is not None:
        rows += _draft_rows(summary.drafts)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if summary.latency is not None and summary.latency.mean > 0:
        spreads = {"TTFT": summary.ttft, "ITL": summary.itl, "TPOT": summary.tpot, "end to end": summary.latency}
        print_spreads(spreads)
    for error, count in summary.errors.items():
        Console(stderr=True).print(f"{count} x {error}", style="red", markup=False)


def print_latency(title: str, result: LatencyResult) -> None:
    Console().print(f"{title}: {result.iterations} runs of {result.batch_size} requests, {result.output_tokens} tokens each")
    print_spreads({"TTFT": result.ttft, "end to end": result.latency})
    Console().print(f"mean gap between tokens: {result.itl_ms:.2f} ms")
    if result.drafts is not None:
        for name, value in _draft_rows(result.drafts):
            Console().print(f"{name}: {value}")


def _draft_rows(drafts: Acceptance) -> list[tuple[str, str]]:
    by_position = " ".join(f"{rate:.0%}" for rate in drafts.rate_by_position)
    return [
        ("draft tokens accepted", f"{drafts.accepted_tokens} of {drafts.draft_tokens} ({drafts.rate:.0%})"),
        ("tokens of a row with drafts", f"{drafts.length:.2f}"),
        ("accepted by position", by_position),
    ]


def print_spreads(spreads: dict[str, Spread | None]) -> None:
    table = Table("milliseconds", *(label for label in ("mean", "p50", "p90", "p99")))
    for name, spread in spreads.items():
        if spread is not None:
            table.add_row(name, *(f"{value:.2f}" for value in dataclasses.astuple(spread)))
    Console().print(table)


def write_json(path: Path, benchmark: str, arguments: dict[str, Any], result: Summary | LatencyResult) -> None:
    """The result with what it needs to be compared: arguments, machine, time."""
    content = {
        "benchmark": benchmark,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "arguments": {name: value for name, value in arguments.items() if name not in ("api_key", "json_file")},
        "result": dataclasses.asdict(result),
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
