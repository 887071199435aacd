"""Texts in pieces, however they are cut: what decoding the whole answer gives, by tokenizers of every kind."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvern.text.detokenizer import IncrementalDetokenizer
from kvern.text.tokenizer import Tokenizer
from tests.support.sampling import examples
from tests.support.tiny_tokenizer import CORPUS, SPECIAL, byte_level, save, sentencepiece


def byte_level_in_sequence() -> tokenizers.Tokenizer:
    """As some files of DeepSeek have it."""
    result = byte_level()
    result.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return result


def without_prefix_space() -> tokenizers.Tokenizer:
    """As in Gemma."""
    result = sentencepiece()
    result.normalizer = normalizers.Replace(" ", "▁")
    result.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    result.add_tokens(["\ufffd", "<0xE4>"])
    return result


def metaspace() -> tokenizers.Tokenizer:
    """As in T5: a Unigram vocabulary, without bytes."""
    result = tokenizers.Tokenizer(models.Unigram())
    result.pre_tokenizer = pre_tokenizers.Metaspace()
    result.decoder = decoders.Metaspace()
    special = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<s>", show_progress=False)
    result.train_from_iterator(CORPUS, special)
    result.add_tokens(["\ufffd"])
    return result


def word_pieces() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.WordPiece(unk_token="<s>"))
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.decoder = decoders.WordPiece()
    result.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL))
    return result


def word_ends() -> tokenizers.Tokenizer:
    """As in GPT: the end of a word is a part of its last token."""
    result = tokenizers.Tokenizer(models.BPE(unk_token="<s>", end_of_word_suffix="</w>"))
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    result.train_from_iterator(CORPUS, trainer)
    return result


KINDS = [
    byte_level, byte_level_in_sequence, sentencepiece, without_prefix_space, metaspace, word_pieces, word_ends
]  # fmt: skip
TEXT = st.text(alphabet=st.sampled_from("hello wrd\n 你好😀é\ufffd▁<0xE4>.'"), max_size=25)


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), request.param()))


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    """What a stream gives that takes `ids` in parts."""
    detokenizer, begin, found = IncrementalDetokenizer(tokenizer, (), skip), 0, list[str]()
    for end in (*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)):
        found.append(detokenizer.append(ids[begin:end]))
        begin = end
    return [*found, detokenizer.flush()]


CUTS = st.lists(st.integers(0, 1000), max_size=40)


@pytest.mark.sample(3)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_any_ids_in_any_pieces_are_the_whole(tokenizer: Tokenizer, data: Any, cuts: list[int], skip: bool) -> None:
    bytes_of = sorted(tokenizer.fallback_bytes) or [0]
    token = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(bytes_of)
    encoded = TEXT.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    ids = list(itertools.chain(*data.draw(st.lists(encoded | st.lists(token, max_size=4), max_size=5))))
    assert "".join(pieces(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(40), deadline=None)
@given(text=TEXT, cut=st.integers(0, 60), cuts=CUTS)
def test_an_answer_goes_on_where_its_prompt_ends(tokenizer: Tokenizer, text: str, cut: int, cuts: list[int]) -> None:
    """Also within a character."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, answer = ids[: min(cut, len(ids))], ids[min(cut, len(ids)) :]
    if tokenizer.is_byte_level or not answer:
        return
    written = len(prompt)
    while written and not tokenizer.decode(ids).startswith(tokenizer.decode(prompt[:written])):
        written -= 1
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    found = "".join(detokenizer.append([token_id]) for token_id in answer) + detokenizer.flush()
    assert tokenizer.decode(prompt[:written]) + found == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["\ufffd\ufffd你\ufffd好", "你\ufffd", "\ufffd", "a\ufffd😀b"])
def test_a_replacement_character_is_a_character(tmp_path: Path, text: str) -> None:
    """In bytes, beside characters of several bytes."""
    tokenizer = Tokenizer(save(tmp_path, sentencepiece()))
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, list(range(len(ids))))) == tokenizer.decode(ids) == text
