"""Chat templates, held against transformers' own results, and those that would do harm."""

import resource
from pathlib import Path
from typing import Any

import pytest

from kvern.errors import InvalidRequest
from kvern.text import template_sandbox
from kvern.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_level, reference, save

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
        "\n{% endfor %}\n{% if add_generation_prompt %}\n{{- '<|im_start|>assistant\n' }}\n{% endif %}\n"
    ),
    "trimmed blocks": (
        "{{ bos_token }}\n    {% for message in messages %}\n    {% if loop.first %}\n first\n    {% endif %}\n"
        "  {{ message.content | trim }}\n{% endfor %}\n"
    ),
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% continue %}{% endif %}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{{ message.content }}{% endfor %}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function.parameters | tojson(indent=2) }}"
        "{% endfor %}{% endif %}{% for m in messages %}{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson(sort_keys=true) }}{% endfor %}{% else %}"
        "{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace and macro": (
        "{%- set ns = namespace(system='', count=0) -%}{%- macro turn(role, text) -%}[{{ role }}]{{ text }}"
        "{{ eos_token }}{%- endmacro -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{%- set ns.system = m.content -%}{%- else -%}{%- set ns.count = ns.count + 1 -%}{{ turn(m.role, m.content) }}"
        "{%- endif -%}{%- endfor -%}{{ ns.system }}{{ ns.count }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "undefined names": (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
        "{{ custom_tools }}{{ unk_token }}{{ messages[0].missing }}{{ messages[-1]['content'].split('o')[0] }}"
    ),
    "switch": "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}",
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": " hello <b>&amp;</b> 'quoted' 你好 😀 "}],
    "system": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "<é>"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_prompts_are_those_of_transformers(tmp_path: Path, name: str, conversation: str) -> None:
    folder = save(tmp_path, byte_level(), template=TEMPLATES[name])
    messages = CONVERSATIONS[conversation]
    if name == "tools":
        messages = [*messages, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
    options: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False}
    expected = reference(folder).apply_chat_template(messages, tokenize=False, **options)
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_prompt(messages, **options) == expected
    assert tokenizer.chat_prompt_ids(messages, **options) == tokenizer.encode(expected, add_special_tokens=False)


def test_template_for_tools_is_chosen_when_tools_are_given(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=templates))
    messages = CONVERSATIONS["short"]
    assert tokenizer.chat_prompt(messages) == "plain"
    assert tokenizer.chat_prompt(messages, tools=[]) == "plain"
    assert tokenizer.chat_prompt(messages, tools=[TOOL]) == "1"


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "at least one message"),
    ("hello", "must be a list"),
    (["hello"], "message 0 must be an object"),
    ([{"content": "hello"}], "message 0 has no role"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "message 1 has content of type int"),
]


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES)
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any, reason: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template="x"))
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.chat_prompt(messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot be compiled"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
    ],
)
def test_failing_templates_are_bad_requests(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.chat_prompt(CONVERSATIONS["short"])


BIG = "{% set ns = namespace(x='a' * 1000000, y=['a' * 1000000] * 1000000) %}"
DOUBLED = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "template",
    [
        *(
            DOUBLED.replace("EXPRESSION", expression)
            for expression in (
                "ns.x ~ ns.x",
                "ns.x + ns.x",
                "'%s%s' % (ns.x, ns.x)",
                "'{}{}'.format(ns.x, ns.x)",
                "'{0}{0}'.format_map({'0': ns.x}) ~ ns.x ~ ns.x",
                "[ns.x, ns.x] | join",
                "ns.x.join([ns.x, ns.x])",
                "ns.x | replace('a', 'aa')",
                "ns.x.replace('a', 'aa')",
                "[ns.x, ns.x] | string",
                "[ns.x, ns.x] | tojson",
                "'%s%s' | format(ns.x, ns.x)",
                "ns.x.encode() + ns.x.encode()",
            )
        ),
        "{{ 'a'.center(10 ** 5 * 10 ** 5) }}",
        "{% set n = 100000000000 %}{{ 'a'.ljust(n) }}",
        "{% set n = 100000000000 %}{{ 'a'.zfill(n) }}",
        "{% set n = 100000000000 %}{{ 'a' | center(n) }}",
        "{% set n = 100000000000 %}{{ 'a' | indent(n, true) }}",
        "{% set n = 100000000000 %}{{ [[]] | tojson(indent=n) }}",
        "{% set n = 100000000000 %}{{ '\t'.expandtabs(n) }}",
        "{% set n = 100000000000 %}{{ (1).to_bytes(n, 'big') }}",
        "{% set n = 100000000000 %}{{ 1 | round(n, 'ceil') }}",
        "{{ '%100000000000d' % 1 }}",
        "{% set n = 100000000000 %}{{ '%*d' % (n, 1) }}",
        "{{ '{:100000000000}'.format(1) }}",
        "{% set n = 100000000000 %}{{ '{:{}}'.format(1, n) }}",
        BIG + "{{ ns.y }}",
        BIG + "{{ ns.y ~ '' }}",
        BIG + "{{ ns.y | join }}",
        BIG + "{{ ns.y | map('trim') | join }}",
        BIG + "{{ ('\\n' * 1000) | indent(ns.x, blank=true) }}",
        BIG + "{{ ns.x.translate({97: ns.x}) }}",
        BIG + "{% for i in range(90000) %}{{ ns.x }}{% endfor %}",
        BIG + "{% macro m() %}{% for i in range(90000) %}{{ ns.x }}{% endfor %}{% endmacro %}{{ m() | length }}",
        BIG + "{% set t %}{% for i in range(90000) %}{{ ns.x }}{% endfor %}{% endset %}",
        BIG + "{% set ns.y = [] %}{% for i in range(90000) %}{% set ns.y = ns.y + [ns.x ~ i] %}{% endfor %}",
        "{{ lipsum(100000000) }}",
    ],
)
def test_templates_that_would_fill_the_memory(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="refused the messages"):
        tokenizer.chat_prompt(CONVERSATIONS["short"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% set x = -1 in range(99999)|list %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in range(99999) %}{{ -1 is in l }}{% endfor %}",
        "{% set count_round = joiner() %}" + 2 * "{% for a in range(99999) %}" + 2 * "{% endfor %}",
    ],
)
def test_templates_that_would_compute_for_hours(tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST_SECONDS", 0.2)
    with pytest.raises(InvalidRequest, match=r"it computes for more than 0\.2 s"):
        Tokenizer(save(tmp_path, byte_level(), template=template)).chat_prompt(CONVERSATIONS["short"])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ 'ab' | center(6) }}|{{ 'ab'.ljust(4) }}|{{ '%5.1f|%s' % (2.25, 'x') }}", "  ab  |ab  |  2.2|x"),
        ("{{ '{:>4}{a}'.format(1700000000, a='b') }}", "1700000000b"),
        ("{{ 'a\nb' | indent(2, true) }}{{ {'a': [1]} | tojson(indent=2) }}", '  a\n  b{\n  "a": [\n    1\n  ]\n}'),
        ("{{ [1, 2] | map('string') | join(', ') }}{{ 'a-b'.replace('-', '+') }}", "1, 2a+b"),
        ("{% macro m(x) %}{{ x + '!' }}{% endmacro %}{% for x in 'ab' %}{{ m(x) }}{% endfor %}", "a!b!"),
    ],
)
def test_templates_that_make_little(tmp_path: Path, template: str, expected: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    for _ in range(2):
        assert tokenizer.chat_prompt(CONVERSATIONS["short"]) == expected


def test_model_without_template_says_so(tmp_path: Path) -> None:
    byte = Tokenizer(save(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte.chat_prompt(CONVERSATIONS["short"])
