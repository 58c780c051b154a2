"""The models as Codex lists them: it asks `/v1/models?client_version=...` and takes what it is told for its own settings.

https://github.com/openai/codex (`ModelInfo` of codex-rs/protocol/src/openai_models.rs) has all fields. Those that are left out
have defaults there. Codex refuses the whole list for one value that it does not know.
"""

from typing import Literal

import msgspec

from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.output_format import OutputFormat
from starling_agent.openai.protocol.answers import ModelList

INSTRUCTIONS = """\
You are a coding agent in a workspace of the user. Find out with the tools what there is before you change it. \
Read and change files by commands. Change only what the task needs, in the style that is there. \
Run tests or the program to see that it works. Go on until the task is done. \
Then say in a few sentences what you did, and what you did not."""
"""Codex demands instructions for each model that it is told of, and has none of its own for them: an empty text is none at all."""


class ReasoningLevel(msgspec.Struct):
    effort: str
    description: str


SWITCH = [ReasoningLevel("none", "Without reasoning"), ReasoningLevel("medium", "With reasoning")]
LEVELS = [
    ReasoningLevel("low", "Little reasoning"),
    ReasoningLevel("medium", "Some reasoning"),
    ReasoningLevel("high", "Much reasoning"),
]


class ToolOutputLimit(msgspec.Struct, frozen=True):
    """The part of a tool's output that goes to the model: what Codex takes for models that it does not know."""

    mode: Literal["bytes"] = "bytes"
    limit: int = 10_000


class CodexModel(msgspec.Struct, kw_only=True):
    """A model under one of its names.

    `apply_patch_tool_type` is none: few models have learned to write Codex's patches, and all of them commands.
    """

    slug: str
    display_name: str
    priority: int
    context_window: int
    supported_reasoning_levels: list[ReasoningLevel]
    base_instructions: str = INSTRUCTIONS
    input_modalities: tuple[Literal["text"]] = ("text",)
    shell_type: Literal["unified_exec"] = "unified_exec"
    apply_patch_tool_type: None = None
    supports_parallel_tool_calls: bool = True
    support_verbosity: bool = False
    supports_reasoning_summary_parameter: bool = False
    default_reasoning_summary: Literal["none"] = "none"
    truncation_policy: ToolOutputLimit = ToolOutputLimit()
    experimental_supported_tools: tuple[()] = ()
    visibility: Literal["list"] = "list"
    supported_in_api: bool = True


class CodexModelList(ModelList, kw_only=True):
    models: list[CodexModel]


def codex_models(endpoint: Endpoint) -> list[CodexModel]:
    levels = _levels(endpoint.output_format)
    return [
        CodexModel(
            slug=name,
            display_name=name,
            priority=priority,
            context_window=endpoint.max_model_len,
            supported_reasoning_levels=levels,
        )
        for priority, name in enumerate(endpoint.names)
    ]


def _levels(output_format: OutputFormat) -> list[ReasoningLevel]:
    """Returns the levels that the chat template tells apart."""
    if output_format.effort.has_levels:
        return LEVELS
    return SWITCH if output_format.effort.has_switch else []
