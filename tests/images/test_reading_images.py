"""Models that read images, against transformers: pixels, prompts, answers, the prefix cache, and what they refuse."""

import base64
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kvern import LLM, PromptInput, RequestOutput, SamplingParams
from kvern.cli.chat import CONTROL_CHARACTERS, Conversation
from kvern.errors import InvalidRequest
from kvern.images.file import ImageFile, read_file
from kvern.images.settings import ImageSettings, settings_of
from kvern.images.spans import largest_image
from kvern.images.views import Grid
from kvern.layers.embedding import EmbeddedTokens
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of, runner_of
from tests.support.served import Served, serving
from tests.support.vision_models import FAMILIES, expected_logprobs, expected_pixels, make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
SIZES = [(1, 1), (1, 40), (40, 1), (2, 199), (27, 28), (28, 28), (29, 27), (140, 140), (141, 139)]
SIZES += [(3 + 17 * number % 230, 5 + 41 * number % 310) for number in range(30)]


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(kind, tmp_path_factory.mktemp("vision") / kind)


PARTS_OF_FAMILIES = {
    "mistral3": set[str](),
    "qwen3_vl": {"axes", "taps"},
    "qwen3_vl_moe": {"axes", "taps"},
    "qwen3_5": {"axes"},
    "qwen2_vl": {"axes"},
    "qwen2_5_vl": {"axes", "windows"},
    "gemma3": {"spans"},
    "gemma4": {"spans"},
    "gemma4_e": set[str](),
    "glm4v": {"axes", "between"},
    "glm4v_moe": {"axes", "between"},
    "kimi_k25": {"between"},
    "llava": set[str](),
    "llava_siglip": set[str](),
    "llava_next": set[str](),
    "internvl": set[str](),
    "smolvlm": set[str](),
    "idefics3": set[str](),
}
"""The parts of each family among `LEFT_OUT`."""
LEFT_OUT: dict[str, Any] = {"axes": False, "taps": None, "windows": None, "between": "corners", "spans": False}
"""Fields of VisionSpec, and what they are where a part is left out; rows of taps are made, and not added."""


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), **{"dtype": "float32", "threads": 1, "max_model_len": 512, "max_batch_requests": 8} | options
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain_llm(folder: Path) -> Iterator[LLM]:
    """Without compiled kernels."""
    with engine(folder, cpu_kernels=False) as llm:
        yield llm


def talk(*parts: Image.Image | str) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def check(kind: str, folder: Path, output: RequestOutput, images: list[Image.Image]) -> None:
    """The answer's log-probabilities are those of transformers."""
    answer, begin = output.outputs[0], len(output.prompt_token_ids)
    expected = expected_logprobs(kind, folder, [*output.prompt_token_ids, *answer.token_ids], images)
    assert answer.logprobs is not None and len(answer.token_ids) == 6
    for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert entry[token].logprob == pytest.approx(float(expected[begin + place - 1, token]), abs=1e-4)
        if token < len(FAMILIES[kind].special):
            return  # transformers takes what is drawn for content that is not there


def saved(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.sample(9)
def test_pixels_are_those_of_transformers(kind: str, folder: Path) -> None:
    spec = vision_of(read_config(folder))
    assert spec is not None
    settings = settings_of(folder, spec)
    for size in SIZES:
        check_pixels(kind, settings, picture(*size))


def check_pixels(kind: str, settings: ImageSettings, image: Image.Image) -> None:
    file = read_file(saved(image), "x")
    grids, expected = settings.grids(file), expected_pixels(kind, image)
    pieces = expected if isinstance(expected, list) else [expected]
    patch, unit = settings.patch, FAMILIES[kind].unit
    assert settings.tokens(file) == Grid(grids[0].rows * patch // unit, grids[0].columns * patch // unit)
    patches = torch.from_numpy(settings.patches(file)).split([grid.cells for grid in grids])
    for grid, squares, piece in zip(grids, patches, pieces, strict=True):
        shown = squares.view(grid.rows, grid.columns, 3, patch, patch).permute(2, 0, 3, 1, 4)
        high, wide = grid.rows * patch, grid.columns * patch
        assert torch.equal(shown.reshape(3, high, wide), piece[:, :high, :wide]), image.size


PROMPTS: list[tuple[Image.Image | str, ...]] = [
    (picture(100, 60), "what is in this picture"),
    ("one", picture(30, 200), "and", picture(64, 64), "two"),
    (picture(20, 20, 1), picture(130, 90, 2), picture(20, 20, 1), "three"),
]


@pytest.mark.sample(9)
@pytest.mark.parametrize("parts", PROMPTS, ids=["one", "two", "three"])
@pytest.mark.parametrize("kernels", [True, False])
def test_answers_are_those_of_transformers(
    parts: tuple[Image.Image | str, ...], kernels: bool, kind: str, folder: Path, llm: LLM, plain_llm: LLM
) -> None:
    images = [part for part in parts if not isinstance(part, str)]
    [output] = (llm if kernels else plain_llm).chat(talk(*parts), PARAMS)
    check(kind, folder, output, images)


def test_the_largest_image_is_rehearsed(folder: Path, llm: LLM) -> None:
    images = runner_of(llm).model.embeddings
    largest = largest_image(images._settings)
    assert images._settings.count(largest) >= images._settings.count(ImageFile(b"", 100, 60))
    encoded = images.encoded
    images.rehearse()
    assert images.encoded == encoded


@pytest.mark.sample(1)
def test_answers_about_images_are_captured_steps(kind: str, folder: Path) -> None:
    with engine(folder) as llm:
        llm.chat(talk("what", picture(100, 60)), PARAMS)
        captured = runner_of(llm)._captured
        if captured is None or "n_routed_experts" in read_config(folder).get("text_config", {}):
            pytest.skip("no decodes are captured: layers keep states or have experts, or there are no kernels")
        assert 1 in captured._sizes


@pytest.mark.sample(1)
@pytest.mark.parametrize("some", [slice(0, None, 3), pytest.param(slice(None), marks=pytest.mark.nightly)], ids=str)
def test_chunks_end_anywhere_within_an_image(kind: str, folder: Path, some: slice) -> None:
    parts = ("what", picture(100, 60), "is", picture(60, 140), "this")
    images = [part for part in parts if not isinstance(part, str)]
    longest = FAMILIES[kind].longest_span
    sizes = (longest, longest + 1, longest + 5, 2 * longest + 7) if longest else (1, 2, 3, 5, 7, 11)
    for tokens in sizes[some]:
        with engine(folder, max_batch_tokens=tokens, max_batch_requests=1) as llm:
            [output] = llm.chat(talk(*parts), PARAMS)
            check(kind, folder, output, images)


@pytest.mark.sample(1)
def test_a_hit_ends_within_an_image(kind: str, folder: Path) -> None:
    """A request left while an image was computed, and the next one with it begins there; with another, before it."""
    if FAMILIES[kind].longest_span:
        pytest.skip("its images are computed whole")
    one, other = picture(140, 140, 11), picture(140, 140, 12)
    with engine(folder, max_batch_tokens=4, max_batch_requests=1, block_size=4) as llm:
        held, asked = engine_of(llm), llm.chat_request(talk("see", one, "what"), PARAMS).prompt
        assert isinstance(asked, PromptInput)
        first = asked.token_ids.index(FAMILIES[kind].image_id)
        gone = held.add("gone", asked, PARAMS)
        while core_of(llm).scheduler.get("gone#0").num_computed_tokens < first + 7:
            held.step()
        held.abort(["gone"])
        while held.has_work or not gone.finished:
            held.step()
        [changed] = llm.chat(talk("see", other, "what"), PARAMS)
        [again] = llm.chat(talk("see", one, "what"), PARAMS)
        has_states = "layer_types" in read_config(folder)["text_config"] and kind == "qwen3_5"
        assert changed.cached_tokens <= first and (has_states or again.cached_tokens > first + 2)
        assert again.cached_tokens < first + again.prompt_token_ids.count(FAMILIES[kind].image_id)
        check(kind, folder, changed, [other])
        check(kind, folder, again, [one])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"kv_cache_tokens": 96, "block_size": 4, "max_model_len": 96},
        {"kv_cache": "contiguous", "batching": "static"},
        {"proposer": "ngram"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_switches_change_nothing(options: dict[str, Any], kind: str, folder: Path, llm: LLM) -> None:
    conversations = [talk(picture(90, 40 + 10 * seed, seed), "what is this") for seed in range(4)]
    with engine(folder, **options) as other:
        found = other.chat(conversations, PARAMS)
        if options.get("tensor_parallel_size") is None and options.get("pipeline_parallel_size") is None:
            assert is_idle(other)
    expected = llm.chat(conversations, PARAMS)
    if "quantization" not in options:
        assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert [output.prompt_token_ids for output in found] == [output.prompt_token_ids for output in expected]


@pytest.mark.sample(2)
def test_the_cache_knows_images_by_their_content(kind: str, folder: Path) -> None:
    """Equal images are read once, and another image with the same text is another prompt."""
    one, other = picture(100, 60, 5), picture(100, 60, 6)
    with engine(folder) as llm:
        rows = runner_of(llm).model.embeddings
        first, again, changed = (llm.chat(talk("see", image, "what"), PARAMS)[0] for image in (one, one, other))
        assert first.outputs == again.outputs and first.cached_tokens == 0
        before_last = len(again.prompt_token_ids) - 1
        assert again.cached_tokens in (before_last, before_last // 16 * 16)  # states are kept after whole blocks
        before = again.prompt_token_ids.index(FAMILIES[kind].image_id)
        assert changed.cached_tokens in (before, 0) and changed.outputs[0].logprobs != first.outputs[0].logprobs
        assert rows.encoded == 2
        assert not any(images is not None and images.keys for images in rows._requests), "images that have been read"
        check(kind, folder, changed, [other])
        [behind] = llm.chat(talk("see", one, "what else is there"), PARAMS)
        assert behind.cached_tokens > before and rows.encoded == 2
        check(kind, folder, behind, [one])
        [swapped] = llm.chat(talk("a", one, other), PARAMS)
        expected = expected_logprobs(kind, folder, swapped.prompt_token_ids, [other, one])
        token, entries = swapped.outputs[0].token_ids[0], swapped.outputs[0].logprobs or []
        assert abs(float(expected[-1, token]) - entries[0][token].logprob) > 1e-3, "images that are swapped are others"


def test_several_answers_and_beams(kind: str, folder: Path, llm: LLM) -> None:
    image = picture(70, 90)
    [several] = llm.chat(talk(image, "what"), PARAMS.replace(n=3, temperature=1.0, seed=2))
    assert len({tuple(answer.token_ids) for answer in several.outputs}) > 1
    for answer in several.outputs:
        expected = expected_logprobs(kind, folder, [*several.prompt_token_ids, *answer.token_ids], [image])
        begin = len(several.prompt_token_ids)
        for place, token in enumerate(answer.token_ids):
            entry = (answer.logprobs or [])[place][token]
            assert entry.logprob == pytest.approx(float(expected[begin + place - 1, token]), abs=1e-4)
    [beams] = llm.chat(talk(image, "what"), SamplingParams(beam_width=3, n=2, max_tokens=4))
    best = beams.outputs[0]
    expected = expected_logprobs(kind, folder, [*beams.prompt_token_ids, *best.token_ids], [image])
    begin = len(beams.prompt_token_ids)
    total = sum(float(expected[begin + place - 1, token]) for place, token in enumerate(best.token_ids))
    assert best.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_placeholders_of_clients_are_text(kind: str, folder: Path, llm: LLM) -> None:
    family, image = FAMILIES[kind], picture(40, 40)
    mark, token = family.mark, family.image_id
    [output] = llm.chat(talk(f"{mark} is text", image, f"and {mark} too"), PARAMS)
    [without] = llm.chat(talk("is text", image, "and too"), PARAMS)
    assert output.prompt_token_ids.count(token) == without.prompt_token_ids.count(token) > 0
    assert f"{mark} is text" in llm.tokenizer.decode(output.prompt_token_ids, False)
    check(kind, folder, output, [image])
    [plain] = llm.chat([{"role": "user", "content": f"what is {mark}"}], PARAMS)
    assert token not in plain.prompt_token_ids
    for prompt in (f"what is {mark}", [9, token, 8], PromptInput([9, token, 8], (saved(image),))):
        with pytest.raises(InvalidRequest, match=f"the prompt has 1 times the token {re.escape(mark)}"):
            llm.generate(prompt, PARAMS)


def test_bad_images_are_refused_by_their_place(llm: LLM) -> None:
    for parts, said in (
        ([{"type": "image", "image": b"x"}], r"messages\[0\].content\[0\]: this is no image"),
        ([{"type": "text", "text": "a"}, {"type": "image", "image": 5}], r"messages\[0\].content\[1\]: the image is 5"),
        ([{"type": "image", "image": picture(8, 8)}] * 33, "the conversation has 33 images: at most 32 are read"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            llm.chat([{"role": "user", "content": parts}], PARAMS)
    lying = saved(picture(64, 64))
    broken, good = [{"type": "image", "image": lying[:2000]}], talk(picture(30, 30), "what")
    found = llm.chat([[{"role": "user", "content": broken}], good], PARAMS, on_error="return")
    assert "cannot be decoded" in str(found[0].failure) and found[1].failure is None
    assert is_idle(llm)


def test_images_do_not_fit_a_short_context(kind: str, folder: Path) -> None:
    with engine(folder, max_model_len=32) as llm, pytest.raises(InvalidRequest, match="32"):
        llm.chat(talk(*[picture(140, 140)] * 3, "what"), PARAMS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    options = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512", "--served-model-name", "sees")
    with serving("--model", str(folder), *options) as served:
        yield served


def test_all_apis_take_images(server: Served, llm: LLM) -> None:
    image = picture(100, 60)
    plain = base64.b64encode(saved(image)).decode()
    url = f"data:image/png;base64,{plain}"
    [output] = llm.chat(talk(image, "what"), SamplingParams(temperature=0, max_tokens=6))
    expected, tokens = output.outputs[0].text, len(output.prompt_token_ids)
    client = server.client()
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    chat = client.chat.completions.create(
        model="sees", messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=6
    )
    assert chat.choices[0].message.content == expected and chat.usage and chat.usage.prompt_tokens == tokens

    def post(path: str, body: dict[str, Any]) -> Any:
        found = httpx.post(server.url + path, json={"model": "sees", **body}, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()

    inputs = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what"}]
    asked = [{"role": "user", "content": inputs}]
    answer = post("/v1/responses", {"input": asked, "temperature": 0, "max_output_tokens": 6})
    assert answer["output"][0]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "image/png", "data": plain}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what"}]
    answer = post(
        "/v1/messages", {"max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    )
    assert answer["content"][0]["text"] == expected
    options = {"stream": False, "options": {"num_predict": 6, "temperature": 0}}
    answer = post("/api/chat", {"messages": [{"role": "user", "content": "what", "images": [plain]}], **options})
    assert answer["message"]["content"] == expected
    assert post("/api/generate", {"prompt": "what", "images": [plain], **options})["response"] == expected
    assert "vision" in post("/api/show", {})["capabilities"]


def test_the_server_refuses_bad_images(server: Served) -> None:
    for url, said in (
        ("https://example.org/a.png", "this server opens no addresses"),
        ("data:image/png;base64,aGVsbG8=", "this is no image"),
    ):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "sees", "messages": [{"role": "user", "content": parts}]}
        found = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        assert found.status_code == 400 and "messages[0].content[0]: " in found.text and said in found.text


@pytest.mark.sample(1)
def test_a_checkpoint_without_its_encoder_reads_text(
    folder: Path, llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [{"role": "user", "content": "what is this"}]
    expected = llm.chat(asked, PARAMS)[0].outputs
    with engine(folder) as fresh:
        found = hits(fresh)
    assert max(cached or 0 for cached, _ in found) > 64
    text_alone = tmp_path / "model"
    shutil.copytree(folder, text_alone)
    tensors = load_file(text_alone / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"visual|vision|multi_modal", name)}
    assert len(kept) < len(tensors)
    save_file(kept, text_alone / "model.safetensors", metadata={"format": "pt"})
    for lost in ("weights", "settings"):
        if lost == "settings":
            shutil.copy(folder / "model.safetensors", text_alone / "model.safetensors")
            (text_alone / "preprocessor_config.json").unlink()
        caplog.clear()
        with engine(text_alone) as other:
            assert other.chat(asked, PARAMS)[0].outputs == expected
            with pytest.raises(
                InvalidRequest, match=r"messages\[0\].content\[0\] is of kind image: this model reads text"
            ):
                other.chat(talk(picture(9, 9)), PARAMS)
            assert hits(other) == found, "an encoder beside the model costs texts their place in the cache"
        assert "the model reads no images here" in caplog.text


def hits(llm: LLM) -> list[tuple[int | None, list[int]]]:
    """What the prefix cache has of texts that begin alike, and their answers."""
    text = list(range(40, 140))
    prompts = [text, text, [*text, 7, 8, 9], [*text[:50], *text[:30]], text[:64]]
    outputs = [llm.generate([PromptInput(prompt)], PARAMS)[0] for prompt in prompts]
    return [(output.cached_tokens, output.outputs[0].token_ids) for output in outputs]


@pytest.mark.sample(3)
def test_what_is_left_out_changes_answers(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above would notice."""
    spec = vision_of(read_config(folder))
    assert spec is not None
    had = {name: getattr(spec, name) for name in LEFT_OUT}
    assert {name for name, value in had.items() if value and value != LEFT_OUT[name]} == PARTS_OF_FAMILIES[kind]
    image = picture(100, 130)
    for part in PARTS_OF_FAMILIES[kind]:
        with monkeypatch.context() as patch:
            if part == "taps":
                patch.setattr(EmbeddedTokens, "deepened", lambda self, layer, hidden, wanted: hidden)
            else:
                other = replace(spec, **{part: LEFT_OUT[part]})
                patch.setattr("kvern.models.image_models.vision_of", lambda _, other=other: other)
            with engine(folder) as llm:
                [output] = llm.chat(talk("what", image, "is this"), PARAMS)
        expected = expected_logprobs(kind, folder, output.prompt_token_ids, [image])
        token, entries = output.outputs[0].token_ids[0], output.outputs[0].logprobs or []
        assert abs(float(expected[-1, token]) - entries[0][token].logprob) > 1e-3


def test_prompts_of_token_ids_are_cached_by_their_images_too(folder: Path, llm: LLM) -> None:
    """A program that makes a prompt itself need not name its images."""
    one, other = picture(60, 60, 8), picture(60, 60, 9)
    [asked] = llm.chat(talk("what", one, "is in this picture " * 8), PARAMS)
    prompts = [PromptInput(asked.prompt_token_ids, (saved(image),)) for image in (one, other, one)]
    first, changed, again = (llm.generate(prompt, PARAMS)[0] for prompt in prompts)
    tokens = [output.outputs[0].token_ids for output in (asked, first, again)]
    assert tokens == tokens[:1] * 3
    assert changed.cached_tokens < first.cached_tokens and changed.outputs[0].logprobs != first.outputs[0].logprobs


def test_the_terminal_shows_a_picture(llm: LLM, tmp_path: Path) -> None:
    image = picture(50, 40)
    (tmp_path / "a.png").write_bytes(saved(image))
    (tmp_path / "b.png").write_text("no picture")
    params, written, told = SamplingParams(temperature=0, max_tokens=6), list[str](), list[str]()
    conversation = Conversation(llm, params, None, written.append, told.append)
    for line in (f"/image {tmp_path / 'b.png'}", "/image", f"/image {tmp_path / 'a.png'}", "what is this"):
        assert conversation.take(line)
    shown = "".join(told)
    assert "b.png is no picture: " in shown and "/image is no picture" in shown
    assert "a.png, 50 x 40 pixels, goes with the next message" in shown
    [expected] = llm.chat(talk(image, "what is this"), params)
    assert "".join(written).rstrip("\n") == expected.outputs[0].text.translate(CONTROL_CHARACTERS)
    conversation.take(f"/save {tmp_path / 'talk.json'}")
    told.clear()
    again = Conversation(llm, params, None, written.append, told.append)
    again.take(f"/load {tmp_path / 'talk.json'}")
    assert again.messages == conversation.messages and "error" not in "".join(told)
    again.take("/show")
    assert f"context    {len(llm.chat_request(again.messages, params).prompt):,} of" in "".join(told)
