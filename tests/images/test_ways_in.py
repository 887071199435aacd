"""The ways in for images: what requests may ask of them, what answers say of them, and what is refused."""

import base64
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from kvern import LLM, SamplingParams
from kvern.batch.images import ImageFolder
from kvern.batch.job import BatchJob
from kvern.batch.requests import RowRules
from kvern.errors import BatchFileError, InvalidRequest
from kvern.images.file import read_file
from kvern.images.limits import LARGEST_FILE, LOW
from kvern.images.settings import settings_of
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from tests.support.served import Served, eventually, serving
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


@pytest.mark.nightly
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


def keyed(server: Served, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    url, headers = server.url.removesuffix("/v1") + path, {"authorization": f"Bearer {key}"}
    return httpx.post(url, json={"model": "sees", **body}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def walled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two keys, each of which may have 64 MiB of images in flight."""
    options = ("--dtype", "float32", "--max-model-len", "512", "--threads", "1", "--served-model-name", "sees")
    limits = ("--image-memory", str(128 << 20), "--allowed-media-domains", "localhost,*.a.org")
    data = tmp_path_factory.mktemp("walled")
    (data / "keys").write_text("alice:alice\nbob:bob admin=1\n")
    with serving(
        "--model", str(folder), *options, *limits, "--api-key-file", str(data / "keys"), "--data-dir", str(data)
    ) as server:
        yield server


@pytest.mark.nightly
def test_files_of_the_server_are_read_by_their_key(llm: LLM, walled: Served) -> None:
    """And no address of this machine is, though its host is allowed."""
    server, image = walled, picture(60, 60)
    [output] = llm.chat(asked(shown(image), "what"), PARAMS)
    client = server.client("alice")
    files = [client.files.create(file=("a.png", data), purpose="vision") for data in (saved(image), b"no picture")]
    files.insert(1, client.files.create(file=("a.png", saved(image)), purpose="user_data"))
    assert [file.purpose for file in files] == ["vision", "user_data", "vision"]
    for file in files[:2]:
        parts = [{"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "what"}]
        body = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 4}
        answer = keyed(server, "alice", "/v1/responses", body).json()
        assert answer["output"][0]["content"][0]["text"] == output.outputs[0].text
        assert answer["usage"]["input_tokens"] == len(output.prompt_token_ids)
    later = {"previous_response_id": answer["id"], "input": "and now", "max_output_tokens": 4}
    for _ in range(2):
        answer = keyed(server, "alice", "/v1/responses", later).json()
        assert answer["usage"]["input_tokens_details"]["image_tokens"] > 0
        later["previous_response_id"] = answer["id"]
    blocks = [{"type": "image", "source": {"type": "file", "file_id": files[0].id}}, {"type": "text", "text": "what"}]
    body = {"max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    said = keyed(server, "alice", "/v1/messages", body).json()
    assert said["content"][0]["text"] == output.outputs[0].text
    counted = keyed(server, "alice", "/v1/messages/count_tokens", body).json()
    assert counted["input_tokens"] == len(output.prompt_token_ids)
    assert keyed(server, "bob", "/v1/messages", body).status_code == 400, "files are of their key alone"
    chat = "/v1/chat/completions"
    for part, text in (
        ({"type": "input_image", "file_id": files[2].id}, "this is no image"),
        ({"type": "input_image", "file_id": "file-none"}, "there is no file 'file-none' of this key"),
        ({"type": "input_image", "file_id": 5}, "there is no file 5 of this key"),
        ({"type": "image_url", "image_url": {"url": "https://localhost/a"}}, "not of the public network"),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a"}}, "is not among the hosts"),
        ({"type": "image_url", "image_url": {"url": "http://b.a.org/a"}}, "an address is https"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "an address is https"),
    ):
        found = keyed(server, "alice", chat, {"messages": asked("what", part), "max_tokens": 4})
        assert found.status_code == 400 and "messages[0].content[1]: " in found.text and text in found.text
    client.files.delete(files[0].id)
    assert keyed(server, "alice", "/v1/messages", body).status_code == 400
    many = asked(*[{"type": "input_image", "file_id": files[1].id}] * 33)
    assert "names 33 images" in keyed(server, "alice", chat, {"messages": many}).text


@pytest.mark.nightly
def test_images_of_requests_have_a_bound(walled: Served) -> None:
    """A key has its share of the memory, and gets it back when its requests end."""
    data = saved(picture(1900, 1900))
    fitting = (64 << 20) // len(data)
    assert 4 <= fitting <= 8
    parts, bodies = {}, {}
    for key in ("alice", "bob"):
        file = walled.client(key).files.create(file=("a.png", data), purpose="vision")
        part = parts[key] = {"type": "input_image", "file_id": file.id, "detail": "low"}
        bodies[key] = {"messages": asked(part, "what"), "max_tokens": 1}

    def status(key: str) -> int:
        return keyed(walled, key, "/v1/chat/completions", bodies[key]).status_code

    def running() -> int:
        return int(
            httpx.get(f"http://{walled.host}:{walled.port}/load", headers={"x-api-key": "bob"}).json()["server_load"]
        )

    assert status("alice") == 200
    with ThreadPoolExecutor(fitting + 1) as threads:
        with walled.held():
            waiting = [threads.submit(status, "alice") for _ in range(fitting)]
            eventually(lambda: running() == fitting)
            refused = keyed(walled, "alice", "/v1/chat/completions", bodies["alice"])
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "the images of requests that wait or run fill the memory for them" in refused.text
            assert keyed(walled, "alice", "/v1/completions", {"prompt": "x", "max_tokens": 0}).status_code != 429
            waiting.append(threads.submit(status, "bob"))
            eventually(lambda: running() == fitting + 1)
        assert [each.result() for each in waiting] == [200] * (fitting + 1)
    assert status("alice") == 200 and walled.figure("requests_refused_total", "bob", reason="images") == 1
    refused = keyed(walled, "bob", "/v1/chat/completions", {"messages": asked(*[parts["bob"]] * 12)})
    assert refused.status_code == 400 and "the images have more than 67108864 bytes" in refused.text


def test_rows_of_jobs_name_images_below_a_folder(llm: LLM, tmp_path: Path) -> None:
    image, folder = picture(60, 60), tmp_path / "images"
    (folder / "cats").mkdir(parents=True)
    (folder / "cats/a b.png").write_bytes(saved(image))
    (tmp_path / "outside.png").write_bytes(saved(image))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "inner.png").symlink_to(folder / "cats/a b.png")
    (folder / "large.png").write_bytes(bytes(LARGEST_FILE + 1))
    os.mkfifo(folder / "pipe.png")
    [expected] = llm.chat(asked(shown(image), "what"), PARAMS)
    whole = (
        "cats/a b.png",
        "./inner.png",
        f"{folder}/cats/a b.png",
        f"file://{folder}/cats/a%20b.png",
        data_url(image),
    )
    refused = {
        "link.png": "lies outside of",
        "../outside.png": "lies outside of",
        f"{tmp_path}/outside.png": "lies outside of",
        f"file://{tmp_path}/outside.png": "lies outside of",
        "file://host/a.png": "opens no addresses",
        "https://example.org/a.png": "opens no addresses",
        "cats": "cannot be read: Is a directory",
        "pipe.png": "cannot be read: it is not a regular file",
        "none.png": "cannot be read: No such file",
        "a\0b.png": "cannot be read: ",
        "large.png": f"at most {LARGEST_FILE} are read",
    }
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    rows: list[dict[str, Any]] = []
    for number, path in enumerate([*whole, *refused]):
        messages = asked({"type": "image_url", "image_url": {"url": path}}, "what")
        row = {"messages": messages, **params}
        openai = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": row}
        rows.append(openai if number % 2 else row)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules, images = RowRules(SamplingParams()), ImageFolder(folder)
    result = BatchJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl", rules, {}, images=images).run(llm)
    assert result.totals.failed == len(refused)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [
        answer["response"]["body"]["choices"][0]["message"]["content"] if number % 2 else answer["answer"]
        for number, answer in enumerate(answers)
    ]
    assert texts == [expected.outputs[0].text] * len(whole)
    errors = [json.loads(line)["error"] for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    for error, said in zip(errors, refused.values(), strict=True):
        assert "messages[0].content[0]: " in error and said in error
    with pytest.raises(BatchFileError, match=r"media_dir .* is no folder"):
        ImageFolder(folder / "none")
    without = BatchJob(tmp_path / "in.jsonl", tmp_path / "without.jsonl", rules, {}).run(llm)
    assert without.totals.failed == len(rows) - 1, "paths are read below a folder alone"


def test_prompts_have_images_as_vllm_has_them(kind: str, llm: LLM) -> None:
    one, other = picture(60, 60), picture(90, 40)
    mark = FAMILIES[kind].written
    [expected] = llm.chat(asked("what", shown(one), "and", shown(other)), PARAMS)
    text = f"user: what{mark}and{mark};"
    token_ids = llm.tokenizer.encode(text)
    for prompt in ({"prompt": text}, {"prompt_token_ids": token_ids}):
        for images in ([one, other], (saved(one), data_url(other))):
            [output] = llm.generate({**prompt, "multi_modal_data": {"image": images}}, PARAMS)
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            sums = [each.outputs[0].cumulative_logprob for each in (output, expected)]
            assert sums[0] == pytest.approx(sums[1], abs=1e-4)
    [alone] = llm.generate([{"prompt": f"user: {mark}", "multi_modal_data": {"image": one}}], PARAMS)
    assert alone.prompt_token_ids.count(FAMILIES[kind].image_id) > 0
    for media, said in (
        ({"image": one}, "the prompt has 2 times .* for 1 images"),
        ({"video": one}, "multi_modal_data has video: it may have"),
        ({"image": [one, other], "audio": 1}, "multi_modal_data has image, audio: it may have"),
        ({"image": [one, 5]}, "image 1: the image is 5"),
        (7, "multi_modal_data has 7: it may have"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            llm.generate({"prompt": text, "multi_modal_data": media}, PARAMS)
    with pytest.raises(InvalidRequest, match="give prompt or prompt_token_ids alone"):
        llm.generate({"prompt": text, "multi_modal_uuids": {}, "x": 1}, PARAMS)
