"""A tiny model with tokens and a chat template for thinking."""

import json
from pathlib import Path

from tests.support.tiny_model import make_tiny_model

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}<|assistant|>"
    "{% if open is not defined %}{% elif open %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{# </think> <tool_call> #}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def thinking_model(folder: Path, special: bool) -> Path:
    """The tiny model with marks for thinking and calls as tokens of their own."""
    make_tiny_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for mark, old in zip(MARKS, sorted(vocabulary, key=vocabulary.get)[-4:], strict=True):
        token = vocabulary.pop(old)
        tokenizer["model"]["merges"] = [
            merge for merge in tokenizer["model"]["merges"] if "".join(merge) != old and old not in merge
        ]
        vocabulary[mark] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token, "content": mark, "special": special, **flags})
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
