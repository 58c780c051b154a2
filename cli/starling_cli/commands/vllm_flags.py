"""Flags of `vllm serve` that people bring along and that are not here: what to do instead. None is accepted and ignored."""

from typing import Any

from starling_engine.frontend.vllm_arguments import NOT_NEEDED, VLLM_ARGUMENTS, instead_of

from starling_cli.commands.failures import fail
from starling_cli.plain_help import PlainCommand


def _flag(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


LOGS = "see --log-level, --access-log and --enable-log-requests, which is off unless given"
TLS = "let a proxy end TLS; on Kubernetes, spec.endpoint.tlsSecret"
INSTEAD = {
    "--model": "write it first: starling serve MODEL",
    "--config": "write its settings as flags",
    "--enable-auto-tool-choice": NOT_NEEDED
    + "tools are always possible, and their format is that of the chat template (see --tool-call-parser)",
    "--enable-reasoning": NOT_NEEDED + "reasoning is apart where the chat template's format is known (see --reasoning-parser)",
    "--enable-prompt-tokens-details": NOT_NEEDED + "usage always has cached_tokens",
    "--disable-log-requests": LOGS,
    "--uvicorn-log-level": LOGS,
    "--disable-uvicorn-access-log": "give --no-access-log",
    "--ssl-certfile": TLS,
    "--ssl-keyfile": TLS,
    **{_flag(name): text for name in VLLM_ARGUMENTS if (text := instead_of(name, _flag))},
}


class ServeCommand(PlainCommand):
    """`starling serve`, which tells those who come from vLLM what takes the place of a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in (arg.partition("=")[0] for arg in args):
            if flag in INSTEAD:
                fail(f"there is no {flag} here", INSTEAD[flag], 2)
        return super().parse_args(ctx, args)
