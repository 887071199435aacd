"""The ways in for images: what requests may ask of them, what answers say of them, and what is refused."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from kvern import LLM, SamplingParams
from kvern.errors import InvalidRequest
from kvern.images.file import LOW, read_file
from kvern.images.settings import settings_of
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from tests.support.served import Served, serving
from tests.support.vision_models import FAMILIES, make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
KIND = "mistral3"
KINDS = (KIND, pytest.param("qwen3_5", marks=pytest.mark.nightly))


def saved(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(saved(image)).decode()}"


def asked(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def shown(image: Image.Image, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image), **fields}}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that would see pictures of more than 512 pixels as they are."""
    folder = make_vision_model(kind, tmp_path_factory.mktemp("ways") / kind)
    settings = folder / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("140", "700").replace("25600", "490000"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", threads=1, max_model_len=1536) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--dtype", "float32", "--max-model-len", "512", "--threads", "1", "--served-model-name", "sees")
    with serving("--model", str(folder), *options, "--data-dir", str(tmp_path_factory.mktemp("data"))) as served:
        yield served


def post(server: Served, path: str, body: dict[str, Any], status: int = 200) -> Any:
    found = httpx.post(server.url.removesuffix("/v1") + path, json={"model": "sees", **body}, timeout=60)
    assert found.status_code == status, found.text
    return found.json()


def test_low_detail_is_a_smaller_picture(kind: str, llm: LLM, folder: Path) -> None:
    """The prompt is that of a picture of 512 pixels, and the prefix cache keeps both apart."""
    image = picture(700, 350)
    outputs = [llm.chat(asked(shown(image, detail=detail), "what"), PARAMS)[0] for detail in ("high", "low", "auto")]
    high, low, auto = outputs
    token = FAMILIES[kind].image_id
    counts = [output.prompt_token_ids.count(token) for output in outputs]
    small = picture(512, 256)
    [expected] = llm.chat(asked(shown(small), "what"), PARAMS)
    assert counts == [counts[0], expected.prompt_token_ids.count(token), counts[0]] and counts[1] < counts[0]
    assert low.prompt_token_ids == expected.prompt_token_ids
    assert high.outputs == auto.outputs and auto.cached_tokens > high.cached_tokens
    [again] = llm.chat(asked(shown(image, detail="low"), "what"), PARAMS)
    assert again.outputs == low.outputs and again.cached_tokens > 0
    [same_size] = llm.chat(asked(shown(small, detail="low"), "what"), PARAMS)
    assert same_size.outputs[0].token_ids == expected.outputs[0].token_ids, "a small picture is what it is"
    spec = vision_of(read_config(folder))
    assert spec is not None
    settings, reduced = settings_of(folder, spec), read_file(LOW + saved(image), "x")
    whole = image.resize(settings.resizing.size(reduced.width, reduced.height), Image.Resampling.BICUBIC)
    assert (settings.patches(reduced) == settings.patches(read_file(saved(whole), "x"))).all()
    assert reduced.digest != read_file(saved(image), "x").digest


def test_what_is_no_picture_is_refused_by_name(llm: LLM) -> None:
    image = picture(20, 20)
    for part, said in (
        (shown(image, detail="original"), r"messages\[0\].content\[1\]: detail is 'original': .* auto, high, low"),
        ({"type": "image_url", "image_url": {"url": data_url(image), "detail": 5}}, "detail is 5"),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, r"content\[1\] is of kind video"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, r"content\[1\] is of kind audio"),
        ({"type": "video", "video": "a.mp4"}, r"content\[1\] is of kind video: this model reads texts and images"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "opens no addresses"),
        ({"type": "image_url", "image_url": {"url": "FILE:/etc/passwd"}}, "opens no addresses"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            llm.chat(asked(shown(image), part), PARAMS)


def test_answers_say_how_many_tokens_are_of_images(kind: str, server: Served) -> None:
    small, large = picture(224, 224), picture(448, 448)
    client = server.client()
    messages: Any = asked(shown(small), "what")
    answer = client.chat.completions.create(model="sees", messages=messages, max_tokens=2)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    seen = (224 // FAMILIES[kind].unit) ** 2
    assert answer.usage.prompt_tokens_details.image_tokens == seen < answer.usage.prompt_tokens
    plain = client.chat.completions.create(model="sees", messages=[{"role": "user", "content": "what"}], max_tokens=2)
    assert plain.usage is not None and plain.usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens_details.image_tokens is None
    inputs = [{"type": "input_image", "image_url": data_url(small)}, {"type": "input_text", "text": "what"}]
    usage = post(server, "/v1/responses", {"input": [{"role": "user", "content": inputs}]})["usage"]
    assert usage["input_tokens_details"]["image_tokens"] == seen < usage["input_tokens"]
    counted = post(server, "/tokenize", {"messages": asked(shown(small), "what")})
    assert counted["count"] == answer.usage.prompt_tokens
    source = {"type": "base64", "media_type": "image/png", "data": data_url(small).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what"}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
    used = post(server, "/v1/messages", body)["usage"]
    counted = post(server, "/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]
    [entry] = client.models.list().data
    assert entry.model_dump()["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    refused = post(server, "/v1/chat/completions", {"messages": asked(*[shown(large)] * 5)}, 400)["error"]["message"]
    assert f"tokens, {5 * 4 * seen} of them of 5 images, and at most 511" in refused
    refused = post(server, "/v1/chat/completions", {"messages": asked(*[shown(small)] * 33)}, 400)["error"]["message"]
    assert "the conversation has 33 images: at most 32 are read" in refused
