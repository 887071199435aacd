"""Content keys: what they depend on, what not, and that other processes find the same ones."""

import hashlib
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern import LLM
from kvern.cache.keys import (
    KEY_BYTES,
    block_key,
    block_keys,
    contents_in,
    contents_of,
    digest,
    edge_key,
    edge_of,
    edges_of,
    model_identity,
    root_key,
)
from kvern.cache.manager import KVCacheManager
from kvern.cache.radix import Node
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams, SamplingParams
from tests.support.peft_adapters import make_adapter

IDENTITY = bytes(range(16))


def test_the_wire_format() -> None:
    """Caches outside of the process know blocks by these bytes: they never change."""
    root = root_key(IDENTITY, b"tenant")
    assert root == hashlib.blake2b(IDENTITY + b"tenant", digest_size=16, person=b"kvern kv root").digest()
    assert root.hex() == "590492495d465cd19510b64f496227e5"
    data = root + struct.pack("<4i", 1, -1, 70000, 2**31 - 1) + digest(b"image")
    key = block_key(root, contents_of([1, 9, 70000, 2**31 - 1], {1: b"image"}))
    assert key == hashlib.blake2b(data, digest_size=16, person=b"kvern kv block").digest()
    assert key.hex() == "265161967712c53efa8c3198e30d7716"


def test_keys_are_the_same_in_another_process() -> None:
    program = "from kvern.cache.keys import *; print(block_key(root_key(b'm' * 16, b'n'), [5, 6, 7]).hex())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == block_key(root_key(b"m" * 16, b"n"), [5, 6, 7]).hex()


tokens_of_edges = st.lists(st.one_of(st.integers(0, 2**31 - 1), st.sampled_from((0, 255, 256))), max_size=9)
digests = st.dictionaries(st.integers(0, 8), st.sampled_from((b"", b"a", b"b")), max_size=3)


@given(st.tuples(tokens_of_edges, digests), st.tuples(tokens_of_edges, digests))
def test_edges_sort_and_begin_as_what_they_stand_for(
    one: tuple[list[int], dict[int, bytes]], other: tuple[list[int], dict[int, bytes]]
) -> None:
    first, second = (
        tuple(contents_of(tokens, {place: data for place, data in marked.items() if place < len(tokens)}))
        for tokens, marked in (one, other)
    )
    edge, another = edge_of(first), edge_of(second)
    assert contents_in(edge) == first and edge_key(IDENTITY, edge) == block_key(IDENTITY, first)
    assert (edge < another) == (first < second) and edge.startswith(another) == (first[: len(second)] == second)


@given(st.integers(1, 3), st.integers(0, 500), st.sets(st.integers(0, 499), max_size=2))
def test_the_edges_of_a_long_prompt_are_those_of_its_blocks(size: int, length: int, marked: set[int]) -> None:
    contents = contents_of([*range(length)], {place: b"image" for place in marked if place < length})
    starts = range(0, length - size + 1, size)
    assert [*edges_of(contents, size)] == [edge_of(contents[start : start + size]) for start in starts]


prompts = st.lists(st.integers(0, 2), max_size=9)
marks = st.dictionaries(st.integers(0, 8), st.sampled_from((b"", b"a", b"b")), max_size=3)


@given(st.tuples(prompts, marks), st.tuples(prompts, marks), st.integers(1, 4))
def test_two_blocks_have_one_key_if_all_up_to_their_ends_is_the_same(
    one: tuple[list[int], dict[int, bytes]], other: tuple[list[int], dict[int, bytes]], size: int
) -> None:
    def described(tokens: list[int], marked: dict[int, bytes]) -> tuple[list[object], list[bytes]]:
        marked = {position: data for position, data in marked.items() if position < len(tokens)}
        held: list[object] = [marked.get(position, token) for position, token in enumerate(tokens)]
        return held, list(block_keys(root_key(b"", b""), contents_of(tokens, marked), size))

    (first, keys), (second, others) = described(*one), described(*other)
    assert len(keys) == len(first) // size and all(len(key) == KEY_BYTES for key in keys)
    for index in range(min(len(keys), len(others))):
        end = (index + 1) * size
        assert (keys[index] == others[index]) == (first[:end] == second[:end])
    assert len({*keys}) == len(keys)


def computed(cache: KVCacheManager, request: Request, step: int = 1) -> list[Node]:
    """The nodes of a request that has computed all its tokens."""
    cache.register(request)
    assert cache.admit(request, step) is not None
    request.num_computed_tokens = len(request.token_ids)
    cache.publish(request, step)
    return request.nodes


def asking(tokens: list[int], marks: dict[int, bytes] | None = None, namespace: bytes = b"") -> Request:
    prompt = PromptInput(tokens, block_keys=tuple((marks or {}).items()))
    return Request(RequestSpec("", prompt, ResolvedParams(), 1, namespace=namespace))


def test_the_nodes_of_the_tree_have_the_keys_of_their_content() -> None:
    cache = KVCacheManager(8, 4, identity=IDENTITY)
    request = asking(list(range(14)), {5: b"image"}, b"n")
    nodes = computed(cache, request)
    contents = contents_of(request.token_ids, dict(request.spec.prompt.block_keys))
    assert [cache.tree.key(node) for node in reversed(nodes)] == [
        *reversed(list(block_keys(root_key(IDENTITY, b"n"), contents, 4)))
    ]
    cache.check_integrity([request])


@pytest.mark.parametrize(("position", "hit"), [(0, 0), (1, 1), (5, 5), (8, 8)])
def test_another_image_in_the_same_place_is_another_prefix(position: int, hit: int) -> None:
    cache = KVCacheManager(16, 4)
    tokens = [7] * 10
    computed(cache, asking(tokens, {position: b"one"}))
    for data, expected in ((b"one", 9), (b"two", hit)):
        request = asking(tokens, {position: data})
        assert cache.cached_tokens(request) == min(expected, 8)
    assert cache.cached_tokens(asking(tokens)) == min(hit, 8)


def test_a_model_is_known_by_its_files_wherever_they_lie(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert model_identity(copy, "bfloat16", 16) == model_identity(tiny_model, "bfloat16", 16)
    assert model_identity(copy, "bfloat16", 8) != model_identity(copy, "bfloat16", 16)
    before = model_identity(copy)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-(len(data) // 4) :] = bytes(len(data) // 4)
    weights.write_bytes(data)
    trained = model_identity(copy)
    assert trained != before, "the same shapes with other weights are another model"
    (copy / "config.json").write_bytes((copy / "config.json").read_bytes() + b" ")
    edited = model_identity(copy)
    assert edited not in (before, trained)
    (copy / "kvern_model.json").write_text("{}")
    assert model_identity(copy) != edited, "another description is another model"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_an_adapter_is_known_by_its_files_whatever_it_is_called(tiny_model: Path, tmp_path: Path) -> None:
    one, other = (make_adapter(tiny_model, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    llm = LLM(tiny_model, max_adapters=2, threads=1, dtype="float32", block_size=4, max_model_len=64)
    params = SamplingParams(max_tokens=1, temperature=0)
    prompt = list(range(20, 40))

    def cached(path: Path, name: str) -> int:
        llm.load_adapter(name, str(path))
        (output,) = llm.generate([prompt], params, adapter=name)
        llm.unload_adapter(name)
        return output.cached_tokens

    assert [cached(one, "a"), cached(other, "b"), cached(one, "c")] == [0, 0, 19]
