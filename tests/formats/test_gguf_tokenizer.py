"""A GGUF file's tokenizer encodes as the one that it was written from, and its chat template stays."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from kvern.config import EngineConfig
from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.formats.gguf.files import PATTERNS
from kvern.models.folder import model_folder
from kvern.models.hub import resolve_model
from kvern.text.infill import infill_of
from kvern.text.tokenizer import Tokenizer
from tests.support.families import make_checkpoint
from tests.support.gguf_files import add_tokenizer, write_gguf

TEXTS = [
    "Hello, world! It's 2024 and we've 1234567 things.",
    "  two  spaces\n\n\tand a tab \r\n end ",
    "naïve café — Größe, 東京, привет, 👩‍👩‍👧 é",
    "<|user|>hi<|end|>x = [i**2 for i in range(10)]\n",
    "",
]


def tokenizer_of(tmp_path: Path, describe: Callable[[gguf.GGUFWriter], None]) -> Tokenizer:
    made = write_gguf(make_checkpoint("llama", tmp_path / "model"), tmp_path, describe=describe)
    return Tokenizer(model_folder(EngineConfig(str(made.file), cache_dir=str(tmp_path / "cache"))))


def test_a_byte_level_tokenizer_and_its_template_come_back(tmp_path: Path) -> None:
    folder = resolve_model("kvern-1m")
    own, found = Tokenizer(folder), tokenizer_of(tmp_path, add_tokenizer(folder, "smollm"))
    for text in TEXTS:
        for special in (True, False):
            assert found.encode(text, special) == own.encode(text, special)
        assert found.decode(own.encode(text)) == own.decode(own.encode(text))
    assert found.is_byte_level and found.vocab_size == own.vocab_size
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert found.chat_prompt_ids(messages) == own.chat_prompt_ids(messages)
    assert [found.bos_token, found.pad_token] == [own.bos_token, own.pad_token]


def cut(name: str, text: str) -> list[str]:
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    return [piece for piece, _ in tokenizers.pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PATTERNS)
def test_texts_are_cut_by_every_known_pattern(name: str) -> None:
    for text in TEXTS:
        pieces = cut(name, text)
        assert "".join(pieces) == text and (len(pieces) > 3 or not text)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("hunyuan-dense", ["123", "45", " a", "/bAb"]),
        ("hunyuan", ["1", "2", "3", "4", "5", " a", "/bAb"]),
        ("minimax-m2", ["123", "45", " a", "/b", "Ab"]),
    ],
)
def test_texts_are_cut_as_llama_cpp_does(name: str, pieces: list[str]) -> None:
    assert cut(name, "12345 a/bAb") == pieces


def pieces_of_words(count: int) -> dict[str, float]:
    """A vocabulary as SentencePiece's BPE has one: control tokens, bytes, pieces by falling score, characters."""
    rng = random.Random(0)
    found = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0} | {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    words = ["".join(rng.choices("▁abcde", k=rng.randint(2, 6))) for _ in range(count)]
    for word in words:  # of a word also what it is joined from
        for end in range(2, len(word) + 1):
            found.setdefault(word[:end], -float(len(found)))
    return found | {letter: -float(len(found) + index) for index, letter in enumerate("▁abcde")}


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as it is defined: the neighbours that make the best piece are joined, the first such pair."""
    parts = list(text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        pairs = [(scores.get(piece, -1e9), -at) for at, piece in enumerate(joined)]
        best = max(pairs, default=(-1e9, 0))
        if best[0] == -1e9:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    as_bytes = ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
    return [token for tokens in as_bytes for token in tokens]


def sentence_piece(scores: dict[str, float], **values: Any) -> Callable[[gguf.GGUFWriter], None]:
    def describe(writer: gguf.GGUFWriter) -> None:
        kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(scores))
        writer.add_token_scores(list(scores.values()))
        writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(scores) - len(kinds))])
        writer.add_unk_token_id(0)
        for name, value in values.items():
            getattr(writer, name)(value)

    return describe


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_are_joined_by_score(prefix: bool, tmp_path: Path) -> None:
    scores = pieces_of_words(60)
    found = tokenizer_of(tmp_path, sentence_piece(scores, add_add_space_prefix=prefix))
    ids, rng = {token: index for index, token in enumerate(scores)}, random.Random(1)
    for _ in range(100):
        text = "".join(rng.choices("abcde  é", k=rng.randint(1, 30)))
        expected = joined_by_score(f" {text}" if prefix else text, scores)
        assert found.encode(text, False) == [ids[token] for token in expected]
        assert found.encode(text) == [1, *found.encode(text, False)]
        assert found.decode(found.encode(text)) == text


def test_every_end_of_an_answer_is_known(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(resolve_model("kvern-1m"), "smollm")(writer)
        writer.add_eot_token_id(5)

    found = tokenizer_of(tmp_path, describe)
    assert found.eos_token_ids == (1, 5)


@pytest.mark.parametrize("kind", [gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL])
def test_ends_of_an_answer_are_known_by_their_text(kind: int, tmp_path: Path) -> None:
    """Some files type them as tokens of the text, after which answers would go on."""
    vocabulary = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0} | {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    scores = vocabulary | {"a": -1.0, "<|im_end|>": -2.0, "<tool>": -3.0}

    def describe(writer: gguf.GGUFWriter) -> None:
        sentence_piece(scores)(writer)
        writer.add_eos_token_id(2)
        kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
        writer.add_token_types([*kinds, gguf.TokenType.NORMAL, kind, gguf.TokenType.USER_DEFINED])

    found = tokenizer_of(tmp_path, describe)
    end, tool = len(scores) - 2, len(scores) - 1
    assert found.eos_token_ids == (2, end)
    assert found.encode("a<|im_end|>", False)[-1] == end and found.is_special(end) and not found.is_special(tool)


@pytest.mark.parametrize(
    ("name", "says", "begins"),
    [
        ("llama-bpe", None, True),
        ("falcon3", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("glm4", True, False),
    ],
)
def test_texts_begin_with_the_bos_of_their_kind(name: str, says: bool | None, begins: bool, tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(resolve_model("kvern-1m"), name)(writer)
        writer.add_bos_token_id(1)
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token", None)
        if says is not None:
            writer.add_add_bos_token(says)

    assert (tokenizer_of(tmp_path, describe).encode("a")[0] == 1) == begins


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"add_tokenizer_model": "bert"}, UnsupportedModel, "tokenizer.ggml.model is 'bert'.*give --tokenizer"),
        ({"add_tokenizer_pre": "unheard-of"}, UnsupportedModel, "tokenizer.ggml.pre is 'unheard-of'.*--tokenizer"),
        ({"add_token_merges": ["no merge"]}, CorruptCheckpoint, "merges holds pairs that are no tokens"),
        ({"add_token_types": [1, 1]}, CorruptCheckpoint, "tokens, and kinds of 2"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(
    values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(resolve_model("kvern-1m"), "smollm")(writer)
        for name, value in values.items():
            getattr(writer, name)(value)

    with pytest.raises(error, match=message):
        tokenizer_of(tmp_path, describe)


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")], ids=str)
def test_tokens_for_filling_gaps_are_those_of_the_header(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Whatever they are called."""
    scores = pieces_of_words(20)
    tokens = list(scores)[-3:]

    def describe(writer: gguf.GGUFWriter) -> None:
        sentence_piece(scores)(writer)
        for name, token in zip(names, tokens, strict=True):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", list(scores).index(token))

    found = tokenizer_of(tmp_path, describe)
    infill = infill_of(found)
    assert infill is not None
    before, after, middle = (found.token_to_id(token) for token in tokens)
    ids = infill.prompt("ab", "ba")
    assert [token for token in ids if token in (before, after, middle)] == [before, after, middle]
    assert ids[-1] == middle and set(infill.ends) == {before, after, middle}
