"""Whether and how hard to think reaches a chat template under the names that it reads."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvern.api.conversation import template_variables
from kvern.errors import InvalidRequest
from kvern.text.chat_template import ChatTemplate
from kvern.tools.thinking_switches import switches_of

MODE = "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}on{% elif thinking_mode == 'disabled' %}off{% endif %}{% endif %}"  # noqa: E501
ADAPTIVE = "{% if thinking_mode == 'enabled' %}on{% elif thinking_mode == 'adaptive' %}may{% elif thinking_mode == 'disabled' %}off{% endif %}"  # noqa: E501
AUTO = "{% if thinking_option in ['off', 'auto'] %}{{ thinking_option }}{% endif %}"
BUDGET = "{% if thinking_budget is defined and thinking_budget == 0 %}off{% else %}{{ thinking_budget }}{% endif %}"
HUNYUAN = (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "{{ reasoning_effort }}"
)
KIMI = (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking and thinking_effort is defined and thinking_effort not in ('low', 'high', 'max') %}"
    "{{ raise_exception('no such effort') }}{% endif %}{{ thinking }},{{ thinking_effort }}"
)
SOLAR = "{% set effort_ = reasoning_effort | default('high') %}{% if reasoning_effort in ['low', 'minimal'] %}off{% else %}{{ effort_ }}{% endif %}"  # noqa: E501
COHERE = "{{ reasoning if reasoning is defined else not (reasoning_effort | lower == 'none') }}"
ASKED = [{"role": "user", "content": "Hm?"}]


def rendered(template: str, body: Mapping[str, Any], budget: int | None = None) -> str:
    chat = ChatTemplate({"default": template})

    def render(names: Mapping[str, Any]) -> str:
        return chat.render(ASKED, None, True, names)

    def takes(names: Mapping[str, Any]) -> bool:
        try:
            return render(names) is not None
        except InvalidRequest:
            return False

    return render(switches_of(template).variables(template_variables(body), budget, takes))


OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"},
]


@pytest.mark.parametrize("body", OFF, ids=range(len(OFF)))
@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ enable_thinking }}", "False"),
        ("{{ thinking }}", "False"),
        ("{{ think }}{{ force_reasoning }}", "FalseFalse"),
        ("{{ no_think }}", "True"),
        ("{{ thinking_option == 'off' }}", "True"),
        (MODE, "off"),
        (BUDGET, "off"),
        (HUNYUAN, "no_think"),
        (COHERE, "False"),
    ],
    ids=range(9),
)
def test_thinking_is_switched_off(template: str, written: str, body: dict[str, Any]) -> None:
    assert rendered(template, body) == written
    assert switches_of(template).turns_off


@pytest.mark.parametrize(
    ("template", "body", "written"),
    [
        (MODE, {"thinking": {"type": "enabled"}}, "on"),
        (MODE, {"chat_template_kwargs": {"thinking_mode": "disabled", "enable_thinking": True}}, "off"),
        (MODE, {}, ""),
        (MODE, {"thinking": {"type": "adaptive"}}, "on"),
        (ADAPTIVE, {"thinking": {"type": "adaptive"}}, "may"),
        (ADAPTIVE, {"chat_template_kwargs": {"thinking_mode": "adaptive"}}, "may"),
        (ADAPTIVE, {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking_mode": "enabled"}}, "on"),
        (ADAPTIVE, {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}}, "off"),
        (ADAPTIVE, {"enable_thinking": True}, "on"),
        (AUTO, {"thinking": {"type": "adaptive"}}, "auto"),
        (AUTO, {"enable_thinking": True}, "auto"),
        (AUTO, {"thinking": {"type": "disabled"}}, "off"),
        ("{{ thinking_type in ['enabled', 'disabled'] }}", {"thinking": {"type": "adaptive"}}, "True"),
        ("{{ thinking }}", {"thinking": {"type": "adaptive"}}, "True"),
        (HUNYUAN, {}, "no_think"),
        (HUNYUAN, {"enable_thinking": True}, "high"),
        (HUNYUAN, {"reasoning_effort": "low"}, "low"),
        (HUNYUAN, {"reasoning_effort": "medium"}, "high"),
        (HUNYUAN, {"reasoning_effort": "minimal"}, "low"),
        (KIMI, {"reasoning_effort": "medium"}, "True,high"),
        (KIMI, {"reasoning": {"effort": "low"}}, "True,low"),
        (KIMI, {"reasoning_effort": "none"}, "False,none"),
        (SOLAR, {"reasoning_effort": "none"}, "off"),
        (SOLAR, {"enable_thinking": False}, "off"),
        (SOLAR, {"reasoning_effort": "medium"}, "medium"),
        ("{{ reasoning_strength }}", {"reasoning_effort": "low"}, "low"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "xhigh"}, "xhigh"),
    ],
    ids=range(27),
)
def test_efforts_and_modes(template: str, body: dict[str, Any], written: str) -> None:
    assert rendered(template, body) == written


def test_budgets_reach_the_template() -> None:
    assert rendered(BUDGET, {}, 512) == "512"
    assert rendered(BUDGET, {"chat_template_kwargs": {"thinking_budget": 7}}, 512) == "7"


@pytest.mark.parametrize(
    "template", ["", "{{ messages }}", "{{ reasoning_effort }}", "{% if", "{{ m.enable_thinking }}"]
)
def test_templates_without_a_switch_are_known(template: str) -> None:
    assert not switches_of(template).turns_off
    assert switches_of(template).has_efforts == ("effort" in template)
