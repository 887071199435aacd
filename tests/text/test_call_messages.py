"""Calls in a conversation come out of every chat template, in the form that it takes."""

from pathlib import Path
from typing import Any

import pytest

from kvern.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_level, save

EACH = "{% for message in messages %}{% if message.role == 'assistant' and 'tool_calls' in message %}"
ONLY_NULL = EACH.replace(" %}{% if", " %}{% if message.content is none and")
CALLS = "{% for tool in message.tool_calls %}{% set function = tool.function %}{{ '<' + function.name + '>' }}"
DEEPSEEK = f"{CALLS}{{{{ '```json\n' + function.arguments + '\n```' }}}}"
PAIRS = f"{CALLS}{{% for key, value in function.arguments.items() %}}{{{{ key }}}}={{{{ value }}}};{{% endfor %}}"
SAID = "{% elif message.content %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
END = "{% endfor %}" + SAID
ARGUMENTS: dict[str, Any] = {"city": "Århus", "days": [1]}
WRITTEN = '{"city": "Århus", "days": [1]}'
TEMPLATES = {
    "objects": (f"{EACH}{CALLS}{{{{ function.arguments | tojson }}}}{END}", f"<f>{WRITTEN}"),
    "pairs": (f"{EACH}{PAIRS}{END}", "<f>city=Århus;days=[1];"),
    "texts": (f"{EACH}{DEEPSEEK}{END}", f"<f>```json\n{WRITTEN}\n```"),
    "texts, where content is null": (f"{ONLY_NULL}{DEEPSEEK}{END}", f"<f>```json\n{WRITTEN}\n```"),
    "as they come": (f"{EACH}{CALLS}{{{{ function.arguments }}}}{END}", f"<f>{WRITTEN}"),
    "not at all": (f"{EACH}no call{SAID}", "no call"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("told", [[], [{"role": "system", "content": "Be short."}]], ids=["", "system"])
def test_calls_come_out(name: str, told: list[dict[str, Any]], tmp_path: Path) -> None:
    template, written = TEMPLATES[name]
    save(tmp_path, byte_level(), template)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    messages: list[dict[str, Any]] = [
        *told,
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    text = Tokenizer(tmp_path).chat_prompt(messages)
    assert text == f"{'[system]Be short.' if told else ''}[user]Hm?{written}[tool]rain"
    assert messages[-2]["tool_calls"][0]["function"]["arguments"] is ARGUMENTS
