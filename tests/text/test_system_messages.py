"""System messages go where a model's chat template takes them, and nowhere else; what is cached stays good."""

from pathlib import Path
from typing import Any

import pytest

from kvern.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_level, save

TURN = "{{ '[' + message.role + ']' + message.content }}"
TEMPLATES = {
    "everything": f"{{% for message in messages %}}{TURN}{{% endfor %}}",
    "only first, or raise": (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning') }}{% endif %}" + TURN + "{% endfor %}"
    ),
    "only first, others dropped": (
        "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
        + TURN
        + "{% endif %}{% endfor %}"
    ),
    "all at the front": (
        "{% for message in messages if message.role == 'system' %}" + TURN + "{% endfor %}"
        "{% for message in messages if message.role != 'system' %}" + TURN + "{% endfor %}"
    ),
    "none, and turns alternate": (
        "{{ bos_token + '' }}{% for message in messages %}{% if message.role == 'system' or "
        "(message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
        + TURN
        + "{% endfor %}"
    ),
    "none, silently": (
        "{% for message in messages %}{% if message.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
    ),
}
ONLY_FIRST = "only first, or raise"


def says(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


SEVERAL = [says("system", "S"), says("system", "T"), says("user", "a")]
LATER = [says("system", "S"), says("user", "a"), says("system", "T"), says("assistant", "b"), says("user", "c")]
EXPECTED = {
    "everything": ("[system]S[system]T[user]a", "[system]S[user]a[system]T[assistant]b[user]c"),
    ONLY_FIRST: ("[system]S\n\nT[user]a", "[system]S[user]a\n\nT[assistant]b[user]c"),
    "only first, others dropped": ("[system]S\n\nT[user]a", "[system]S[user]a\n\nT[assistant]b[user]c"),
    "all at the front": ("[system]S[system]T[user]a", "[system]S[user]a\n\nT[assistant]b[user]c"),
    "none, and turns alternate": ("<s>[user]S\n\nT\n\na", "<s>[user]S\n\na\n\nT[assistant]b[user]c"),
    "none, silently": ("[user]S\n\nT\n\na", "[user]S\n\na\n\nT[assistant]b[user]c"),
}


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(save(folder, byte_level(), template=template, bos_token="<s>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_system_message_is_refused_or_lost(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[name])
    assert (tokenizer.chat_prompt(SEVERAL), tokenizer.chat_prompt(LATER)) == EXPECTED[name]
    for turns in range(2, len(LATER)):  # a conversation that goes on begins as it did: what is cached stays good
        assert tokenizer.chat_prompt(LATER).startswith(tokenizer.chat_prompt(LATER[:turns]))


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([says("user", "a"), says("assistant", "b"), says("system", "S")], "[user]a[assistant]b[user]S"),
        ([says("user", "a"), says("assistant", "b"), says("system", "S"), says("user", "c")], "S\n\nc"),
        ([says("user", "a"), says("assistant", ""), says("system", "S"), says("tool", "r")], "[tool]S\n\nr"),
        ([says("user", "a"), says("assistant", ""), says("tool", "r"), says("system", "S")], "[tool]r\n\nS"),
        ([says("user", "a"), says("system", "S"), says("system", ""), says("system", "T")], "[user]a\n\nS\n\nT"),
        ([says("user", "a"), says("assistant", "b"), says("system", None)], "[user]a[assistant]b"),
        ([says("system", "S")], "[system]S"),
    ],
)
def test_what_a_template_does_not_take_goes_to_its_neighbour(
    tmp_path: Path, messages: list[dict[str, Any]], prompt: str
) -> None:
    assert tokenizer_of(tmp_path, TEMPLATES[ONLY_FIRST]).chat_prompt(messages).endswith(prompt)


def test_contents_in_parts_stay_parts(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ message.content if message.content is string else message.content | map(attribute='text') | join('|') }}"
        "{% endfor %}"
    )
    messages = [says("system", "S"), says("user", [{"type": "text", "text": "a"}])]
    assert tokenizer_of(tmp_path, template).chat_prompt(messages) == "S|a"


def test_a_request_cannot_change_what_is_believed_of_a_template(tmp_path: Path) -> None:
    template = "{% if broken %}{{ raise_exception('no') }}{% endif %}" + TEMPLATES[ONLY_FIRST]
    tokenizer = tokenizer_of(tmp_path, template)
    with pytest.raises(ValueError, match="refused"):
        tokenizer.chat_prompt(SEVERAL, broken=True)
    assert tokenizer.chat_prompt(SEVERAL) == EXPECTED[ONLY_FIRST][0]
