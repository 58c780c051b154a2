"""The variables of chat templates that say how much a model reasons."""

import pytest
from starling_agent.openai.effort import EffortVariables
from starling_engine.frontend.template import template_constants, template_variables

EFFORT = "{{ reasoning_effort }}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
KIMI = (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking_effort is undefined %}{% set thinking_effort = 'max' %}{% endif %}"
    "{% if thinking and thinking_effort in ['low', 'medium', 'high', 'max'] %}{{ thinking_effort }}{% endif %}"
)
MINIMAX = (
    "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}{% elif thinking_mode == 'disabled' %}"
    "{% elif thinking_mode == 'adaptive' %}{% endif %}{% endif %}"
)
DEEPSEEK = "{% set mode = thinking_mode|default('chat') %}{% if mode == 'thinking' %}<think>{% endif %}"
SEED = "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}"
HUNYUAN = "{% if reasoning_effort == 'no_think' %}{% endif %}"


def variables(*templates: str) -> EffortVariables:
    names = frozenset[str]().union(*map(template_variables, templates))
    return EffortVariables(names, frozenset[str]().union(*map(template_constants, templates)))


@pytest.mark.parametrize(
    ("templates", "low", "minimal", "off"),
    [
        ([EFFORT], {"reasoning_effort": "low"}, {"reasoning_effort": "minimal"}, {"reasoning_effort": "none"}),
        ([SWITCH], {"enable_thinking": True}, {"enable_thinking": True}, {"enable_thinking": False}),
        ([KIMI], {"thinking": True, "thinking_effort": "low"}, {"thinking": True, "thinking_effort": "low"}, {"thinking": False}),
        ([MINIMAX], {"thinking_mode": "enabled"}, {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        ([DEEPSEEK], {"thinking_mode": "thinking"}, {"thinking_mode": "thinking"}, {"thinking_mode": "chat"}),
        ([SEED], {"thinking_budget": -1}, {"thinking_budget": -1}, {"thinking_budget": 0}),
        ([HUNYUAN], {"reasoning_effort": "low"}, {"reasoning_effort": "minimal"}, {"reasoning_effort": "no_think"}),
        (["{{ thinking_mode }}"], {}, {}, {}),
        (
            [EFFORT, SWITCH],
            {"reasoning_effort": "low", "enable_thinking": True},
            {"reasoning_effort": "minimal", "enable_thinking": True},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
    ],
)
def test_a_level_has_the_names_and_words_of_the_template(templates, low, minimal, off):
    known = variables(*templates)
    assert [known.of(level) for level in ("low", "minimal", "none")] == [low, minimal, off]
    assert known.has_levels == ("reasoning_effort" in low or "thinking_effort" in low)
    assert known.has_levels or known.has_switch == bool(off)


def test_a_budget_is_told_where_the_template_reads_it():
    assert variables(SEED).of_budget(512) == {"thinking_budget": 512}
    assert variables(EFFORT, SWITCH).of_budget(512) == {}
