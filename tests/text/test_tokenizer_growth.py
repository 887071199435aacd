"""Tokenizers of hostile folders: what makes much of little is refused when it is read, or when a text is."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

from kvern.errors import CorruptCheckpoint, InvalidRequest
from kvern.text.tokenizer import Tokenizer as Ours
from kvern.text.tokenizer import load_backend
from tests.support.tiny_tokenizer import byte_level, save, sentencepiece


def changed(folder: Path, backend: Tokenizer, **parts: Any) -> Path:
    """The tokenizer's file with other parts, of which the library made nothing yet."""
    file = save(folder, backend) / "tokenizer.json"
    state = json.loads(file.read_text())
    state["model"].update(parts.pop("model", {}))
    file.write_text(json.dumps(state | parts))
    return file


def replace(text: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: text}, "content": content}


def charsmap(*texts: str) -> str:
    strings = b"".join(text.encode() + b"\0" for text in texts)
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + strings).decode()


def sequence(of: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", of: [*steps]}


DOUBLE = replace("a", "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [TEXT], "pair": [TEXT], "special_tokens": {}}
MARK = {"SpecialToken": {"id": "<s>", "type_id": 0}}
MARKS = {"<s>": {"id": "<s>", "ids": [0] * 100, "tokens": ["<s>"] * 100}}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"normalizer": sequence("normalizers", *[DOUBLE] * 22)}, "normalizer makes 128 .* step 7, .*Replace"),
        ({"normalizer": sequence("normalizers", *[sequence("normalizers", *[DOUBLE] * 4)] * 2)}, "step 7"),
        ({"normalizer": sequence("normalizers", *[{"pattern": {"String": "a"}, "content": "aa"}] * 22)}, "step 7"),
        ({"normalizer": replace("a", "b" * 65)}, "makes 65"),
        ({"normalizer": sequence("normalizers", *[replace("", "b")] * 9)}, "step 7"),
        ({"normalizer": sequence("normalizers", *[replace("(?=.)", "b", "Regex")] * 9)}, "step 7"),
        ({"normalizer": sequence("normalizers", *[replace(" ", "\ufdfa"), {"type": "NFKD"}] * 2)}, "step 3"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 65}}, "Prepend"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 2000)}}, "Precompiled"),
        ({"normalizer": sequence("normalizers", *[{"type": "ByteLevel"}] * 9)}, "step 5"),
        ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 65)}, "in 64 steps"),
        ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 9)}, "pre_tokenizer .* step 5"),
        ({"decoder": sequence("decoders", *[replace("a", "aa")] * 9)}, "decoder .* step 7"),
        ({"decoder": sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 9)}, "decoder .* step 7"),
        ({"post_processor": TEMPLATE | {"single": [TEXT] * 65}}, "post_processor makes 65"),
        ({"post_processor": TEMPLATE | {"single": [MARK] * 11, "special_tokens": MARKS}}, "post_processor makes 69"),
        ({"model": {"continuing_subword_prefix": "#" * 300}}, "model.continuing_subword_prefix .* at most 256"),
        ({"model": {"end_of_word_suffix": "#" * 300}}, "model.end_of_word_suffix"),
        ({"model": {"max_input_chars_per_word": 100_000}}, "model.max_input_chars_per_word is 100000"),
        (
            {
                "normalizer": sequence("normalizers", *[DOUBLE] * 5),
                "post_processor": TEMPLATE | {"single": [TEXT] * 3},
            },
            "make 96 tokens",
        ),
    ],
)  # fmt: skip
def test_what_makes_much_of_little_is_refused(tmp_path: Path, parts: dict[str, Any], named: str) -> None:
    file = changed(tmp_path, byte_level(), **parts)
    with pytest.raises(CorruptCheckpoint, match=f"{file}: .*{named}"):
        load_backend(file)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),  # Llama 2
        normalizers.Replace(" ", "▁"),  # Gemma
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), "▁")]),  # T5
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]),
        normalizers.BertNormalizer(),
        normalizers.Sequence([normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents()]),
        normalizers.Replace(Regex(r"""[!"\#\$%\&'\(\)\*\+,\-.:;=\?@\[\\\]\^_`\{\|\}\~]"""), ""),  # SigLIP
    ],
)
def test_ordinary_tokenizers_are_held_to_nothing(tmp_path: Path, normalizer: normalizers.Normalizer) -> None:
    backend = sentencepiece()
    backend.normalizer = normalizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert load_backend(save(tmp_path, backend) / "tokenizer.json")[1] == 1
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    assert load_backend(save(tmp_path, backend) / "tokenizer.json")[1] == 1


def test_texts_that_would_become_too_long_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 6)
    tokenizer = Ours(save(tmp_path, backend))
    assert len(tokenizer.encode("ab")) == 65
    with pytest.raises(InvalidRequest, match="may make 4194368 characters of this text, 64 of one: at most 4194304"):
        tokenizer.encode_each(["a" * 65000, "b" * 537])
    with pytest.raises(InvalidRequest, match="shorten"):
        tokenizer.encode_pair("a" * 65000, "b" * 537)


def test_a_regular_expression_that_gives_up_is_a_refusal(tmp_path: Path) -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex("(a+)+$"), "")
    tokenizer = Ours(save(tmp_path, backend))
    assert tokenizer.encode("ab")
    with pytest.raises(InvalidRequest, match="the model's tokenizer cannot read this text: Onig"):
        tokenizer.encode("a" * 40 + "b")
