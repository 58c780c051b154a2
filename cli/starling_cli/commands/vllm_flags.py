"""Flags of `vllm serve` that people bring along and that are not here: what to do instead. None is accepted and ignored."""

from typing import Any

from starling_cli.commands.failures import fail
from starling_cli.plain_help import PlainCommand

NOT_NEEDED = "leave it out: "
TOOLS = NOT_NEEDED + "tools are always possible, and their format is that of the chat template (see --tool-call-parser)"
TASK = NOT_NEEDED + "the checkpoint says what the model is for"
LOGS = "see --log-level, --access-log and --enable-log-requests, which is off unless given"
LORA = "merge the adapter into the model: LoRA is not supported yet"
MEDIA = NOT_NEEDED + "images, audio and other media are not supported yet"
DEFAULTS = "send them with requests; what the checkpoint's generation_config.json says are the defaults"
INSTEAD = {
    "--model": "write it first: starling serve MODEL",
    "--config": "write its settings as flags",
    "--trust-remote-code": NOT_NEEDED + "no checkpoint's code is run; docs/models.md says how a model is added",
    "--hf-token": "set $HF_TOKEN",
    "--download-dir": "set $HF_HOME",
    "--enable-auto-tool-choice": TOOLS,
    "--enable-reasoning": NOT_NEEDED + "reasoning is apart where the chat template's format is known (see --reasoning-parser)",
    "--enable-chunked-prefill": NOT_NEEDED + "prompts are always computed in chunks",
    "--num-gpu-blocks-override": "give --kv-cache-memory-bytes",
    "--kv-offloading-size": "give --kv-cpu-bytes",
    "--swap-space": "give --kv-cpu-bytes",
    "--cpu-offload-gb": "give --quantization int4, or a GGUF file: weights stay on their device",
    "--task": TASK,
    "--runner": TASK,
    "--convert": TASK,
    "--generation-config": DEFAULTS,
    "--override-generation-config": DEFAULTS,
    "--guided-decoding-backend": NOT_NEEDED + "llguidance enforces every form",
    "--structured-outputs-config": NOT_NEEDED + "llguidance enforces every form",
    "--enable-prompt-tokens-details": NOT_NEEDED + "usage always has cached_tokens",
    "--max-logprobs": NOT_NEEDED + "20 are possible",
    "--disable-log-requests": LOGS,
    "--disable-log-stats": NOT_NEEDED + "statistics are at /metrics",
    "--uvicorn-log-level": LOGS,
    "--disable-uvicorn-access-log": "give --no-access-log",
    "--enable-lora": LORA,
    "--lora-modules": LORA,
    "--limit-mm-per-prompt": MEDIA,
    "--distributed-executor-backend": NOT_NEEDED + "ranks are processes",
    "--compilation-config": "see --enforce-eager",
    "--ssl-certfile": "let a proxy end TLS; on Kubernetes, spec.endpoint.tlsSecret",
    "--ssl-keyfile": "let a proxy end TLS; on Kubernetes, spec.endpoint.tlsSecret",
}


class ServeCommand(PlainCommand):
    """`starling serve`, which tells those who come from vLLM what takes the place of a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in (arg.partition("=")[0] for arg in args):
            if flag in INSTEAD:
                fail(f"there is no {flag} here", INSTEAD[flag], 2)
        return super().parse_args(ctx, args)
