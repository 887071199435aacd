"""Prompts that ask for what is missing between two texts, in the form of each family."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from kvern.errors import InvalidRequest
from kvern.text.infill import infill_of, needed_infill
from kvern.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import byte_level, save, sentencepiece

FORMS = [
    ("Qwen2.5-Coder", "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"),
    ("StarCoder2", "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"),
    ("SantaCoder", "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>"),
    ("CodeLlama", "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>"),
    ("DeepSeek-Coder", "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>"),
    ("Seed-Coder", "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>"),
    ("Codestral", "[SUFFIX]{suffix}[PREFIX]{prefix}"),
]


def markers_of(form: str) -> list[str]:
    return [part.partition("}")[2] or part for part in form.split("{") if part.partition("}")[2] or "}" not in part]


def made(folder: Path, backend: tokenizers.Tokenizer, tokens: list[str], **config: str) -> Tokenizer:
    backend.add_special_tokens(tokens)
    return Tokenizer(save(folder, backend, **config))


@pytest.mark.parametrize(("family", "form"), FORMS, ids=[name for name, _ in FORMS])
def test_the_form_is_found_by_its_tokens(tmp_path: Path, family: str, form: str) -> None:
    """Each part is encoded for itself."""
    tokenizer = made(tmp_path, byte_level(), [*markers_of(form), "<|file_sep|>", "<other>"])
    infill = needed_infill(tokenizer, "a")
    assert infill.prompt("def f(x):\n", "    return y") == tokenizer.encode(
        form.format(prefix="def f(x):\n", suffix="    return y"), add_special_tokens=False
    )
    ends = {tokenizer.id_to_token(token) for token in infill.ends}
    assert ends == {*markers_of(form), "<|file_sep|>"}


def test_a_sentencepiece_suffix_has_no_space_of_its_own(tmp_path: Path) -> None:
    backend = sentencepiece()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = made(tmp_path, backend, ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    ids = needed_infill(tokenizer, "a").prompt("hello ", "world")
    pieces = [backend.id_to_token(token) for token in ids]
    assert pieces[:2] == ["<s>", "▁<PRE>"] and pieces[-1] == "▁<MID>"
    at = pieces.index("▁<SUF>")
    assert "".join(pieces[2:at]) == "▁hello▁" and "".join(pieces[at + 1 : -1]) == "world"


def test_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    named = {"prefix_token": "<a>", "suffix_token": "<b>", "middle_token": "<c>"}
    tokenizer = made(tmp_path, byte_level(), list(named.values()), **named)
    assert tokenizer.decode(needed_infill(tokenizer, "s").prompt("p", "s"), skip_special_tokens=False) == "<a>p<b>s<c>"


def test_models_without_such_tokens(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, byte_level(), ["<|fim_prefix|>", "<|fim_suffix|>"])
    assert infill_of(tokenizer) is None, "one of them is missing"
    with pytest.raises(InvalidRequest, match="suffix is 'b': this model's tokenizer has no tokens for filling gaps"):
        needed_infill(tokenizer, "b")
