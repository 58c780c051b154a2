"""The variables by which chat templates learn how much a model is to reason. Each family has its own names."""

from collections.abc import Collection, Mapping
from typing import Any

COMMON = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables that clients send to every model."""
_SWITCHES = ("enable_thinking", "thinking")
_LEVELS = ("reasoning_effort", "thinking_effort")
_MODES = (("enabled", "disabled"), ("thinking", "chat"))
"""Values of `thinking_mode`, on and off: MiniMax M3's, and those that templates for DeepSeek V4 have."""
_KIMI_LEVELS = {"minimal": "low", "xhigh": "max"}
"""Levels of `thinking_effort` in the place of those that Kimi K3 does not know."""
_HUNYUAN_OFF = "no_think"
"""No reasoning in Hunyuan 3's `reasoning_effort`."""


class EffortVariables:
    """Says a level of reasoning in the variables that a checkpoint's templates read."""

    def __init__(self, variables: Collection[str], sought: Collection[str]) -> None:
        """`sought` are constants that the templates compare with."""
        self._variables = variables
        self._levels = [name for name in _LEVELS if name in variables]
        self._switches = [name for name in _SWITCHES if name in variables]
        modes = _MODES if "thinking_mode" in variables else ()
        self._mode = next((mode for mode in modes if mode[0] in sought), None)
        self._off = _HUNYUAN_OFF if _HUNYUAN_OFF in sought else "none"

    @property
    def has_levels(self) -> bool:
        return bool(self._levels)

    @property
    def has_switch(self) -> bool:
        """Reasoning can be turned off."""
        return bool(self._switches) or self._mode is not None or "thinking_budget" in self._variables

    def of_budget(self, tokens: int) -> Mapping[str, Any]:
        """Returns the variables for a number of tokens, which Seed-OSS counts while it reasons."""
        return {"thinking_budget": tokens} if "thinking_budget" in self._variables else {}

    def of(self, effort: str) -> Mapping[str, Any]:
        """Returns the variables for a level, which is `none` where the model shall not reason."""
        reasons = effort != "none"
        found: dict[str, Any] = dict.fromkeys(self._switches, reasons)
        if "reasoning_effort" in self._levels:
            found["reasoning_effort"] = effort if reasons else self._off
        if "thinking_effort" in self._levels and reasons:
            found["thinking_effort"] = _KIMI_LEVELS.get(effort, effort)
        if self._mode is not None:
            found["thinking_mode"] = self._mode[not reasons]
        if "thinking_budget" in self._variables:  # Seed-OSS, which has no limit by itself
            found["thinking_budget"] = -1 if reasons else 0
        return found
