"""Encoding, decoding and streaming, held against tokenizers' and transformers' own results."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from kvern.errors import CorruptCheckpoint, InvalidRequest
from kvern.text.chat_template import ChatTemplate
from kvern.text.detokenizer import IncrementalDetokenizer
from kvern.text.tokenizer import Tokenizer
from tests.support.sampling import examples
from tests.support.tiny_tokenizer import byte_level, reference, save, sentencepiece


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {"byte": save(root / "byte", byte_level()), "pieces": save(root / "pieces", sentencepiece())}


@pytest.fixture(scope="module")
def byte(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["byte"])


@pytest.fixture(scope="module")
def pieces(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["pieces"])


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], skip)
    return [*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 340), max_size=60), skip=st.booleans())
def test_byte_level_stream_is_the_full_decode_for_any_ids(byte: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(byte, ids, skip=skip)) == byte.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_byte_level_stream_gives_back_any_text(byte: Tokenizer, text: str) -> None:
    assert "".join(stream(byte, byte.encode(text), skip=False)) == text


@given(text=st.text(alphabet=st.sampled_from("hello world 你好😀é\n"), max_size=40))
@settings(max_examples=examples(200))
def test_sentencepiece_stream_gives_back_any_text(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text)
    assert "".join(stream(pieces, ids)) == pieces.decode(ids)


@given(text=st.text(alphabet=st.sampled_from("hello you 你😀"), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_sentencepiece_stream_continues_its_prompt(pieces: Tokenizer, text: str, cut: int) -> None:
    ids = pieces.encode(text)
    prompt, answer = ids[: min(cut, len(ids))], ids[min(cut, len(ids)) :]
    whole = next(end for end in range(len(prompt), -1, -1) if "�" not in pieces.decode(prompt[:end]))
    before = pieces.decode(prompt[:whole])
    assert before + "".join(stream(pieces, answer, prompt)) == pieces.decode(ids)


def test_no_piece_ends_inside_a_character(byte: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (byte, pieces):
        ids = tokenizer.encode("a 🦙🏽 b")
        assert len(ids) > len("a 🦙🏽 b")
        assert not any("�" in piece for piece in stream(tokenizer, ids))


def test_unfinished_character_appears_at_flush(byte: Tokenizer) -> None:
    ids = byte.encode("x🦙")[:-1]
    assert stream(byte, ids)[-1] == "�"
    assert stream(byte, byte.encode("x"))[-1] == ""


@pytest.mark.parametrize("kind", ["byte", "pieces"])
def test_forks_go_on_by_themselves(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("aé🙂 fox", add_special_tokens=False)
    for cut in range(len(ids) + 1):
        first = IncrementalDetokenizer(tokenizer)
        before = first.append(ids[:cut])
        second = first.fork()
        texts = []
        for detokenizer, rest in ((first, ids[::-1]), (second, ids[cut:])):
            texts.append(before + detokenizer.append(rest) + detokenizer.flush())
        expected = ["".join(stream(tokenizer, [*ids[:cut], *rest])) for rest in (ids[::-1], ids[cut:])]
        assert texts == expected


def test_garbage_does_not_wait_for_ever(pieces: Tokenizer) -> None:
    lone = pieces.token_to_id("<0xE4>")
    assert lone is not None
    shown = "".join(stream(pieces, [lone] * 50)[:-1])
    assert len(shown) >= 45


def test_stream_of_several_tokens_at_once(byte: Tokenizer) -> None:
    ids = byte.encode("你好 hello")
    detokenizer = IncrementalDetokenizer(byte)
    assert detokenizer.append(ids[:4]) + detokenizer.append(ids[4:]) + detokenizer.flush() == "你好 hello"


def test_special_tokens_are_skipped_or_written(byte: Tokenizer) -> None:
    ids = byte.encode("<|user|>hello</s>")
    assert byte.decode(ids) == "hello"
    assert "".join(stream(byte, ids)) == "hello"
    assert "".join(stream(byte, ids, skip=False)) == "<|user|>hello</s>"


def test_ids_beyond_the_vocabulary_are_skipped(byte: Tokenizer) -> None:
    ids = [*byte.encode("a"), byte.vocab_size + 7, *byte.encode("b")]
    assert "".join(stream(byte, ids)) == byte.decode(ids) == "ab"


def test_bytes_of_tokens_join_to_the_text(byte: Tokenizer, pieces: Tokenizer) -> None:
    text = "naïve 😀"
    assert b"".join(map(byte.id_to_bytes, byte.encode(text))).decode() == text
    assert b"".join(map(pieces.id_to_bytes, pieces.encode(text))).decode() == " " + text
    llama = byte.encode("🦙")
    assert byte.id_to_token(llama[0]) == "�"


def test_special_tokens_and_ends_of_answers(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), eos_token={"content": "</s>", "lstrip": False})
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.eos_token_ids == (1,)
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert Tokenizer(folder).eos_token_ids == (1, 5)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 4, "text_config": {"eos_token_id": 5}}))
    assert Tokenizer(folder).eos_token_ids == (1, 4)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert Tokenizer(folder).eos_token_ids == (1, 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CorruptCheckpoint, match=r"eos_token_id is '</s>': it must be a token id"):
        Tokenizer(folder)


@pytest.mark.parametrize("switches", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [True, False])
def test_tokens_around_a_prompt_are_those_of_transformers(
    tmp_path: Path, switches: dict[str, bool], processor: bool
) -> None:
    backend = byte_level()
    if processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    tokenizer = Tokenizer(save(tmp_path, backend, **switches))
    assert tokenizer.encode("hello world") == reference(tmp_path)("hello world")["input_ids"]
    assert tokenizer.encode("hello", add_special_tokens=False) == backend.encode("hello", add_special_tokens=False).ids


def test_folder_without_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.available
    assert tokenizer.eos_token_ids == (5,)
    assert stream(tokenizer, [1, 2, 3]) == ["", "", "", ""]
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json: send token ids"):
        tokenizer.encode("hello")
    with pytest.raises(InvalidRequest, match="token ids"):
        tokenizer.decode([1])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).write_text("{ truncated")
    with pytest.raises(CorruptCheckpoint, match=name):
        Tokenizer(tmp_path)


def test_lone_surrogate_is_refused(byte: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair, which is no character"):
        byte.encode("ab\ud83d")


def test_added_tokens_keep_their_spelling(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer = Tokenizer(save(tmp_path, backend))
    ids = tokenizer.encode("a<tool call>b")
    assert "".join(stream(tokenizer, ids)) == "a<tool call>b"


def token(content: str, **flags: bool) -> dict[str, object]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


NAMED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "special alone": ({}, {}),
    "new ones with ids": ({"added_tokens_decoder": {"326": token("<b>", special=False), "325": token("<a>")}}, {}),
    "one list": ({"additional_special_tokens": ["<|user|>", "<a>"], "pad_token": "[PAD]"}, {}),
    "names of its own": ({"extra_special_tokens": {"user_token": "<|user|>", "a_token": "<a>"}}, {}),
    "names of its own and a list": ({"a_token": "<a>", "b_token_id": 5, "extra_special_tokens": ["<b>"]}, {}),
    "names of its own as saved": ({"model_specific_special_tokens": {"a_token": "<a>"}}, {}),
    "flags": ({"mask_token": {"__type": "AddedToken", **token("<a>", lstrip=True, rstrip=True)}}, {}),
    "added_tokens.json": ({"pad_token": "<b>"}, {"added_tokens.json": {"<b>": 326, "<a>": 325}}),
    "the map": ({"eos_token": "</s>"}, {"special_tokens_map.json": {"eos_token": "<|user|>", "sep_token": "<a>"}}),
    "both lists": (
        {"additional_special_tokens": ["<b>"]},
        {"special_tokens_map.json": {"additional_special_tokens": ["<a>"], "mask_token": "<|user|>"}},
    ),
    "a map that does not count": (
        {"added_tokens_decoder": {"0": token("<s>")}},
        {"special_tokens_map.json": {"eos_token": "<|user|>", "mask_token": "<a>"}},
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_tokens_that_other_files_name_are_added(tmp_path: Path, kind: str) -> None:
    """``tokenizer.json`` has some in its vocabulary as plain tokens, and others not at all."""
    config, files = NAMED[kind]
    folder = save(tmp_path, byte_level(), **config)
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["added_tokens"] = [one for one in definition["added_tokens"] if one["content"] in ("<call>", "漢字")]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    own, other = Tokenizer(folder), reference(folder)
    assert (own.vocab_size, own.eos_token_id, own.pad_token_id) == (len(other), other.eos_token_id, other.pad_token_id)
    named = "{{ bos_token }}{{ eos_token }}{{ a_token }}"
    other.chat_template = named
    own.chat_template = ChatTemplate({"default": named})
    messages = [{"role": "user", "content": "hello"}]
    assert own.chat_prompt(messages) == other.apply_chat_template(messages, tokenize=False)
    for text in ("<s>hello</s> world", "<|user|>you<|assistant|>", "me  <a> and <b><pad>", "[PAD]<call>"):
        ids = own.encode(text)
        assert ids == other.encode(text)
        for skip in (True, False):
            assert own.decode(ids, skip) == "".join(stream(own, ids, skip=skip)) == other.decode(ids, skip)


def test_named_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), added_tokens_decoder={"400": token("<a>")})
    with pytest.raises(CorruptCheckpoint, match=r"token '<a>' is to have id 400, and its place in .* is 325"):
        Tokenizer(tmp_path)
    wrong: tuple[dict[str, object], ...] = (
        {"added_tokens_decoder": {"a": token("<a>")}},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"325": {}}},
        {"additional_special_tokens": 5},
        {"mask_token": {"content": 5}},
    )
    for config in wrong:
        save(tmp_path, byte_level(), **config)
        with pytest.raises(CorruptCheckpoint, match=r"added tokens that files in .* name cannot be read"):
            Tokenizer(tmp_path)


def test_some_special_tokens_can_stay(byte: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (byte, pieces):
        ids = tokenizer.encode("hello<|user|> you<pad>")
        kept = [tokenizer.token_to_id("<|user|>") or 0]
        detokenizer = IncrementalDetokenizer(tokenizer, kept=kept)
        shown = "".join([*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()])
        assert shown.split() == ["hello<|user|>", "you"]
