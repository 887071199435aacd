"""CLIP, SigLIP and SigLIP 2: vectors of texts and of images as transformers makes them, alone and in any batch."""

import base64
import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvern import LLM
from kvern.errors import InvalidRequest, RequestFailed, UnsupportedModel
from kvern.images.naflex import Flexible
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.request.request import PromptInput
from kvern.spec.model import ModelSpec, Rename
from kvern.text.tokenizer import Tokenizer
from tests.support.two_towers import BEGIN, END, LENGTHS, expected_image, expected_text, make_two_towers
from tests.support.vision_models import picture

TOLERANCE = 1e-4
KINDS = list(LENGTHS)
TEXTS = ["a photo of a cat", "", "two dogs, and the third bird", "A PHOTO of another cat?", "日本語"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("towers")
    return {kind: make_two_towers(kind, parent / kind) for kind in KINDS}


def described(folder: Path) -> ModelSpec:
    return spec_from_config(read_config(folder))


def texts(kind: str, seed: int, count: int = 12) -> list[list[int]]:
    """Of random lengths, with or without the token that ends texts, also at several places."""
    chance, longest = random.Random(seed), LENGTHS[kind]
    lengths = [1, longest, 16, *(chance.randint(1, longest) for _ in range(count - 3))]
    found = [[chance.randrange(300) for _ in range(length)] for length in lengths]
    for number, text in enumerate(found[3:]):
        for _ in range(number % 3):
            text[chance.randrange(len(text))] = END
    return found


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_transformers(kind: str, kernels: bool, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders[kind])
    given = texts(kind, 3) + [tokenizer.encode(text) for text in TEXTS]
    with LLM(str(folders[kind]), threads=1, cpu_kernels=kernels, max_batch_tokens=70) as llm:
        together = llm.embed(given)
        for token_ids, vector in zip(given, together, strict=True):
            assert vector == pytest.approx(expected_text(folders[kind], token_ids), abs=TOLERANCE)
            assert vector == pytest.approx(llm.embed(token_ids)[0], abs=1e-5)
        for vector, same in zip(llm.embed(TEXTS), together[-len(TEXTS) :], strict=True):
            assert vector == pytest.approx(same, abs=1e-5)
        assert abs(cosine(together[-1], together[-2])) < 0.99
        assert llm.statistics().steps < 2 * len(given), "texts share steps"


@pytest.mark.parametrize("end", [2, END, 7])
def test_the_state_of_the_token_that_ends_a_text(end: int, tmp_path: Path) -> None:
    """Of the highest id where an old file names 2, else of the first that the file names, or the first of all."""
    folder = make_two_towers("clip", tmp_path, end=end)
    given = [[BEGIN, 5, END, 9, END, 4], [5, 7, 2, 311, 7, 20], [9, 2, 8, 2], [3, 290, 290, 1], [4, 4, 4]]
    with LLM(str(folder), threads=1) as llm:
        for token_ids, vector in zip(given, llm.embed(given), strict=True):
            assert vector == pytest.approx(expected_text(folder, token_ids), abs=TOLERANCE), token_ids


def test_settings_of_old_files(tmp_path: Path) -> None:
    """`text_config_dict` takes precedence, and defaults stand for what it leaves out, as transformers reads it."""
    folder = make_two_towers("clip", tmp_path, end=2)
    config = read_config(folder)
    sizes = {name: config["text_config"][name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    sizes |= {name: config["text_config"][name] for name in ("num_attention_heads", "num_hidden_layers")}
    sizes |= {"max_position_embeddings": 40, "projection_dim": 20}
    spec = spec_from_config(config | {"text_config_dict": sizes})
    assert spec.encoder is not None and spec.encoder.end_token == 49407
    plain = spec_from_config(config)
    assert plain.encoder is not None and plain.encoder.end_token == -1
    assert spec.layers == plain.layers


def test_what_defaults_stand_for() -> None:
    """Published files leave out what is usual."""
    clip = spec_from_config({"model_type": "clip", "text_config": {}, "vision_config": {}})
    assert (clip.hidden_size, clip.max_position_embeddings, len(clip.layers)) == (512, 77, 12)
    assert clip.encoder is not None and clip.encoder.projection is not None and clip.encoder.projection.width == 512
    for kind in ("siglip", "siglip2"):
        spec = spec_from_config({"model_type": kind, "text_config": {"vocab_size": 256000}, "vision_config": {}})
        assert spec.vocab_size == 256000 and spec.encoder is not None and spec.encoder.padded == 64
    with pytest.raises(UnsupportedModel, match="CLIPForImageClassification is not supported"):
        spec_from_config({"model_type": "clip", "architectures": ["CLIPForImageClassification"]})


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_too_long(kind: str, folders: dict[str, Path]) -> None:
    longest = LENGTHS[kind]
    with LLM(str(folders[kind]), threads=1) as llm:
        with pytest.raises(InvalidRequest, match=f"the text has {longest + 1} tokens, and {kind} reads {longest} at"):
            llm.embed([5] * (longest + 1))
        long = "a photo of a cat " * 30
        token_ids = Tokenizer(folders[kind]).encode(long)
        cut = [*token_ids[: longest - 1], END]
        [vector] = llm.embed(long, truncate_prompt_tokens=-1)
        assert vector == pytest.approx(expected_text(folders[kind], cut), abs=TOLERANCE)
        assert llm.embed(long, truncate_prompt_tokens=9)[0] == pytest.approx(
            expected_text(folders[kind], [*token_ids[:8], END]), abs=TOLERANCE
        )


def test_padding_needs_a_token(tmp_path: Path) -> None:
    folder = make_two_towers("siglip", tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with LLM(str(folder), threads=1) as llm:
        with pytest.raises(InvalidRequest, match="siglip pads texts to 24 tokens by pad_token, which its tokenizer"):
            llm.embed("a")
        assert llm.embed([[5] * 24])


def test_texts_of_siglip_are_in_lower_case(folders: dict[str, Path]) -> None:
    for kind in KINDS:
        with LLM(str(folders[kind]), threads=1) as llm:
            same = llm.embed("A Photo OF a CAT") == llm.embed("a photo of a cat")
        assert same is (kind != "clip")


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_vectors_point_the_same_way(quantization: Any, folders: dict[str, Path]) -> None:
    given = texts("clip", 7, 6)
    with LLM(str(folders["clip"]), threads=1, quantization=quantization) as llm:
        for token_ids, vector in zip(given, llm.embed(given), strict=True):
            assert cosine(vector, expected_text(folders["clip"], token_ids)) > 0.9


@pytest.mark.parametrize("change", [{"causal": True}, {"padded": 0}, {"pooling": "cls"}, {"first_norm": True}])
def test_a_mistake_in_the_description_is_noticed(
    change: dict[str, Any], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SigLIP's texts see what follows, are padded, and end with the token that is read; there is no first norm."""
    folder, given = folders["siglip"], [[5, 9, 17, END], [7, 8, END]]
    spec = described(folder)
    assert spec.encoder is not None
    if "causal" in change:
        wrong = replace(spec, layers=tuple(replace(x, mixer=replace(x.attention, **change)) for x in spec.layers))
    else:
        wrong = replace(spec, encoder=replace(spec.encoder, **change))
        if "first_norm" in change:  # the first layer's stands in its place
            norm = Rename(r"^model\.layers\.0\.input_layernorm\.", "model.embed_norm.")
            wrong = replace(wrong, renames=(*spec.renames, norm))
    monkeypatch.setattr("kvern.engine.factory.describe_model", lambda *_: wrong)
    with LLM(str(folder), threads=1) as llm:
        found = llm.embed(given)
    assert any(
        vector != pytest.approx(expected_text(folder, token_ids), abs=0.01)
        for token_ids, vector in zip(given, found, strict=True)
    )


# Images


SIZES = [(32, 32), (90, 60), (31, 200), (300, 7), (1, 1), (64, 64)]


def pictures() -> list[Image.Image]:
    return [picture(width, height, number) for number, (width, height) in enumerate(SIZES)]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_those_of_transformers(kind: str, kernels: bool, folders: dict[str, Path]) -> None:
    """Alone, and among others and texts, in the order in which they are given."""
    folder, images, words = folders[kind], pictures(), texts(kind, 4, 6)
    given: list[Any] = [
        item for pair in zip(({"type": "image", "image": one} for one in images), words, strict=True) for item in pair
    ]
    with LLM(str(folder), threads=1, cpu_kernels=kernels) as llm:
        found = llm.embed(given)
        for vector, image in zip(found[::2], images, strict=True):
            assert vector == pytest.approx(expected_image(folder, image), abs=TOLERANCE), image.size
        for vector, token_ids in zip(found[1::2], words, strict=True):
            assert vector == pytest.approx(expected_text(folder, token_ids), abs=TOLERANCE)
        for image, vector in zip(images, found[::2], strict=True):
            assert llm.embed({"image": image})[0] == pytest.approx(vector, abs=1e-5)
        statistics = llm.statistics()
        assert (statistics.decoded_images, statistics.encoded_images, statistics.waiting) == (12, 12, 0)
    assert cosine(found[0], found[2]) < 0.99


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_pixels_beyond_whole_patches_are_not_seen(kind: str, tmp_path: Path) -> None:
    """As in SigLIP's so400m, whose pictures of 384 pixels have 27 patches of 14 on a side."""
    folder = make_two_towers(kind, tmp_path, side=37)
    images = pictures()
    with LLM(str(folder), threads=1) as llm:
        for image, vector in zip(images, llm.embed([{"image": image} for image in images]), strict=True):
            assert vector == pytest.approx(expected_image(folder, image), abs=TOLERANCE), image.size


def test_images_are_the_same_bits_in_any_company(folders: dict[str, Path]) -> None:
    given: list[Any] = [{"image": image} for image in pictures()]
    for kind in KINDS:
        with LLM(str(folders[kind]), threads=2, deterministic=True, dtype="bfloat16") as llm:
            assert llm.embed(given) == [llm.embed(image)[0] for image in given]


def test_random_weights_and_fewer_bits(folders: dict[str, Path]) -> None:
    image = picture(30, 30)
    with LLM(str(folders["siglip2"]), threads=1, load_format="dummy") as llm:
        assert len(llm.embed({"image": image})[0]) == len(llm.embed("a")[0]) == 32
    for kind, options in (("clip", {"quantization": "int8"}), ("siglip", {"dtype": "bfloat16"})):
        with LLM(str(folders[kind]), threads=1, **options) as llm:
            assert cosine(llm.embed({"image": image})[0], expected_image(folders[kind], image)) > 0.98


def test_forms_of_images(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, image = folders["clip"], picture(50, 40)
    file = tmp_path / "picture.png"
    image.save(file)
    data = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    given: list[Any] = [
        {"type": "image", "image": file},
        {"image": file.read_bytes()},
        {"type": "image_url", "image_url": {"url": data}},
        {"prompt": "", "multi_modal_data": {"image": image}},
        PromptInput([], (file.read_bytes(),)),
        {"type": "text", "text": "a photo"},
    ]
    with LLM(str(folder), threads=1) as llm:
        found = llm.embed(given)
        for vector in found[:5]:
            assert vector == pytest.approx(expected_image(folder, image), abs=TOLERANCE)
        assert found[5] == llm.embed("a photo")[0]
        assert len(llm.embed({"image": image}, dimensions=7)[0]) == 7
        for wrong, reason in (
            (
                {"image": image, "text": "a"},
                "the prompt has a text and an image: an embedding is of one text or of one",
            ),
            ({"prompt": "a", "multi_modal_data": {"image": image}}, "a prompt has 1 images and a text"),
            (
                {"prompt": "", "multi_modal_data": {"image": [image, image]}},
                "a prompt has 2 images: an embedding is of",
            ),
            ({"image": b"GIF89a"}, "the prompt: this is no image in one of the formats"),
            ({"image": "https://example.org/a.png"}, "this server opens no addresses"),
            (PromptInput([5], (b"a", b"b")), "the prompt has 2 images: an embedding is of one"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                llm.embed(wrong)


def test_images_for_models_that_read_none(tmp_path: Path) -> None:
    folder, image = make_two_towers("clip", tmp_path), picture(20, 20)
    (folder / "preprocessor_config.json").unlink()
    with LLM(str(folder), threads=1) as llm:
        with pytest.raises(InvalidRequest, match="the prompt is an image: clip reads texts alone; leave it out"):
            llm.embed({"image": image})
        assert llm.embed("a photo")


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_another_order_are_noticed(kind: str, folders: dict[str, Path]) -> None:
    one, other = picture(40, 40, 1), picture(40, 40, 2)
    with LLM(str(folders[kind]), threads=1) as llm:
        found = llm.embed([{"image": one}, {"image": other}])
    expected = [expected_image(folders[kind], image) for image in (other, one)]
    assert all(cosine(*pair) < 0.9999 for pair in zip(found, expected, strict=True))


def test_a_damaged_image_fails_alone(folders: dict[str, Path]) -> None:
    stream = io.BytesIO()
    picture(80, 80).save(stream, "PNG")
    damaged = stream.getvalue()[:-400]
    given: list[Any] = [{"image": picture(30, 30)}, {"image": damaged}, "a photo"]
    with LLM(str(folders["siglip"]), threads=1) as llm:
        with pytest.raises(RequestFailed, match=r"1 of 3 requests failed.*its content cannot be read: an image cannot"):
            llm.embed(given)
        assert llm.embed({"image": picture(30, 30)})[0] == pytest.approx(
            expected_image(folders["siglip"], picture(30, 30)), abs=TOLERANCE
        )


@pytest.mark.parametrize("width", [1, 16, 37, 500, 4000])
def test_sizes_of_pictures_that_keep_their_shape(width: int) -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    for height in (1, 20, 33, 480, 3999):
        for most in (1, 20, 256):
            expected = get_image_size_for_max_num_patches(height, width, 16, most)
            assert Flexible(16, most).size(width, height) == expected[::-1]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("siglip2", {"between": "corners"}),
        ("siglip2", {"between": "cubic"}),
        ("siglip", {"projector": {"heads": 4}}),
        ("siglip2", {"tower": {"renames": None}}),
    ],
)
def test_a_mistake_in_the_encoder_of_images_is_noticed(
    kind: str, change: dict[str, Any], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions between learned ones, heads, and the order of colours; the picture is no square."""
    spec = vision_of(read_config(folders[kind]))
    assert spec is not None
    for name, value in change.items():
        inner = getattr(spec, name)
        if value == {"renames": None}:
            value = {"renames": inner.renames[:-1]}
        spec = replace(spec, **{name: replace(inner, **value) if isinstance(value, dict) else value})
    monkeypatch.setattr("kvern.engine.factory.vision_here", lambda *_: spec)
    image = picture(90, 60)
    with LLM(str(folders[kind]), threads=1) as llm:
        assert llm.embed({"image": image})[0] != pytest.approx(expected_image(folders[kind], image), abs=10 * TOLERANCE)
