"""Texts and images in /v1/embeddings, by a model that embeds both."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, serving
from tests.support.two_towers import expected_image, expected_text, make_two_towers
from tests.support.vision_models import picture

TOLERANCE = 1e-4
IMAGE = picture(60, 44)


def saved(image: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_two_towers("siglip", tmp_path_factory.mktemp("served") / "towers")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    named = (
        "--served-model-name",
        "towers",
        "--allowed-media-domains",
        "localhost",
        "--data-dir",
        str(folder.parent / "data"),
    )
    with serving(str(folder), "--threads", "1", "--dtype", "float32", *named) as found:
        yield found


def ask(server: Served, status: int = 200, **body: Any) -> Any:
    found, _, content = server.raw("POST", "/v1/embeddings", json.dumps(body).encode())
    assert found == status, content
    return content


def test_texts_and_images_of_one_request(server: Served, folder: Path) -> None:
    other = picture(20, 70, 3)
    given: list[Any] = [
        "a photo",
        {"image": url(saved(IMAGE))},
        {"text": "a cat"},
        [5, 6, 7],
        {"type": "image_url", "image_url": {"url": url(saved(other))}},
        {"image": base64.b64encode(saved(IMAGE)).decode()},
    ]
    answer = ask(server, input=given)
    vectors = [entry["embedding"] for entry in answer["data"]]
    for place, image in ((1, IMAGE), (4, other), (5, IMAGE)):
        assert vectors[place] == pytest.approx(expected_image(folder, image), abs=TOLERANCE)
    assert vectors[3] == pytest.approx(expected_text(folder, [5, 6, 7]), abs=TOLERANCE)
    assert vectors[0] == pytest.approx(ask(server, input="a photo")["data"][0]["embedding"], abs=1e-6)
    assert answer["usage"] == {
        "prompt_tokens": 3 * 24 + 3 * 16,
        "total_tokens": 3 * 24 + 3 * 16,
        "prompt_tokens_details": {"image_tokens": 3 * 16},
    }
    assert server.figure("images_encoded_total") == server.figure("images_decoded_total") >= 3


def test_the_client_of_openai(server: Served, folder: Path) -> None:
    client = server.client()
    found: Any = client.embeddings.create(model="towers", input=[{"image": url(saved(IMAGE))}, "a photo"], dimensions=8)  # type: ignore[list-item]
    assert [len(entry.embedding) for entry in found.data] == [8, 8]
    whole: Any = client.embeddings.create(model="towers", input={"image": url(saved(IMAGE))})  # type: ignore[arg-type]
    assert whole.data[0].embedding == pytest.approx(expected_image(folder, IMAGE), abs=TOLERANCE)
    [model] = client.models.list().data
    assert model.model_dump()["architecture"]["input_modalities"] == ["text", "image"]


def test_messages_as_vllm_has_them(server: Served, folder: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": url(saved(IMAGE))}}
    for content in ([part], [{"type": "input_image", "image_url": url(saved(IMAGE))}]):
        answer = ask(server, messages=[{"role": "user", "content": content}])
        assert answer["data"][0]["embedding"] == pytest.approx(expected_image(folder, IMAGE), abs=TOLERANCE)
    plain = ask(server, input="a photo")["data"]
    for said in ("a photo", [{"type": "text", "text": "a photo"}]):
        assert ask(server, messages=[{"role": "user", "content": said}])["data"] == plain
    for messages, reason in (
        ([{"role": "user", "content": [part, {"type": "text", "text": "a"}]}], "messages[0].content has 2 parts: an"),
        ([{"role": "system", "content": "a"}], "messages is "),
        ([{"role": "user", "content": "a"}] * 2, "messages is "),
    ):
        assert ask(server, 400, messages=messages)["error"]["message"].startswith(reason)
    assert ask(server, 400, messages=[{"role": "user", "content": "a"}], input="a")["error"]["param"] == "messages"


def test_files_of_the_server(server: Served, folder: Path) -> None:
    client = server.client()
    file = client.files.create(file=("a.png", saved(IMAGE)), purpose="vision")
    answer = ask(server, input=[{"type": "input_image", "file_id": file.id}, "a"])
    assert answer["data"][0]["embedding"] == pytest.approx(expected_image(folder, IMAGE), abs=TOLERANCE)
    missing = ask(server, 400, input=["a", {"type": "input_image", "file_id": "file-none"}])["error"]["message"]
    assert missing.startswith("input[1]: there is no file 'file-none' of this key")


def test_what_is_refused(server: Served) -> None:
    for wrong, reason in (
        ({"image": url(saved(IMAGE)), "text": "a"}, "input[1] has a text and an image: an embedding is of one text or"),
        ({"image": url(b"no image")}, "input[1]: this is no image in one of the formats JPEG, PNG, WEBP, GIF"),
        ({"image": "file:///etc/passwd"}, "input[1]: "),
        ({"image": "https://localhost/a.png"}, "input[1]: "),
        ({"image": "https://example.org/a.png"}, "input[1]: "),
        ({"type": "input_audio", "input_audio": {}}, "input[1] is of kind audio: texts and images are embedded"),
        ({"colour": "red"}, "input[1] is {'colour': 'red'}: it must be a text, token ids,"),
        (5, "input[1] is 5: it must be a text"),
        ({"image": url(saved(IMAGE)[:-300])}, "its content cannot be read: an image cannot be decoded"),
    ):
        message = ask(server, 400, input=[{"text": "a"}, wrong])["error"]["message"]
        assert reason in message, message
    assert (
        ask(server, 400, input=[{"text": "a"}] * 2049)["error"]["message"] == "input holds 2049 prompts: at most 2048"
    )
    found, _, content = server.raw("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}')
    assert found == 400 and content["error"]["message"].startswith("siglip is an encoder")


@pytest.mark.nightly
def test_an_engine_that_is_killed_is_replaced(server: Served, folder: Path) -> None:
    server.kill_engine()
    answer = ask(server, input=[{"image": url(saved(IMAGE))}] * 100)
    assert len(answer["data"]) == 100
    assert answer["data"][-1]["embedding"] == pytest.approx(expected_image(folder, IMAGE), abs=TOLERANCE)
