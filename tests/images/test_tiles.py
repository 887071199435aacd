"""Families that read images in tiles: prompts as transformers' processors write them, choices of tiles, controls."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tokenizers
import torch
from PIL import Image

from kvern import LLM, SamplingParams
from kvern.images.anyres import USUAL, Anyres
from kvern.images.file import ImageFile
from kvern.images.idefics import Splitting
from kvern.images.internvl import BestShape
from kvern.images.prompt import ImageReader
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from kvern.text.tokenizer import Tokenizer
from tests.support.vision_models import FAMILIES, expected_logprobs, make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
TILED = ("smolvlm", "idefics3", "internvl", "llava_next")
SIZES = [(1, 1), (1, 60), (199, 2), (32, 32), (33, 32), (64, 32), (96, 96), (100, 60), (60, 140), (250, 90)]


def engine(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", threads=1, max_model_len=512, max_batch_requests=2)


def talk(text: str, image: Image.Image) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": image}]}]


def shown(width: int, height: int) -> ImageFile:
    """A file of a size that nobody decodes."""
    return ImageFile(b"", width, height)


@pytest.fixture(scope="module", params=TILED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(kind, tmp_path_factory.mktemp("tiles") / kind)


def text_of_transformers(kind: str, width: int, height: int) -> str:
    """What its processor writes for an image."""
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    processor, mark = FAMILIES[kind].processor(), FAMILIES[kind].mark
    if kind == "internvl":
        return "<img>" + mark * 4 * int(processor.get_number_of_image_patches(height, width)) + "</img>"
    if kind == "llava_next":
        own: Any = SimpleNamespace(image_processor=processor, patch_size=8, num_additional_image_tokens=0)
        features: Any = LlavaNextProcessor._get_unpadded_features
        own._get_unpadded_features = lambda *sizes: features(own, *sizes)
        return mark * int(LlavaNextProcessor._get_number_of_features(own, height, width, 32, 32))
    found = processor(picture(width, height), return_row_col_info=True)
    [[rows]], [[columns]] = found["rows"], found["cols"]
    write: Any = get_image_prompt_string
    return str(write(rows, columns, 4, "<fake_token_around_image>", mark, "<global-img>"))


def test_prompts_are_those_of_transformers(kind: str, folder: Path) -> None:
    spec = vision_of(read_config(folder))
    assert spec is not None
    reader = ImageReader.of(folder, spec, Tokenizer(folder))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = set()
    for width, height in SIZES:
        found = reader.tokens(shown(width, height))
        assert found == backend.encode(text_of_transformers(kind, width, height), add_special_tokens=False).ids
        lengths.add(len(found))
    assert len(lengths) > 2


def test_tiles_in_another_order_are_another_image(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(90, 60, 3)
    with engine(folder) as llm:
        [output] = llm.chat(talk("what", image), PARAMS)
    token, entries = output.outputs[0].token_ids[0], output.outputs[0].logprobs or []

    def distance() -> float:
        expected = expected_logprobs(kind, folder, output.prompt_token_ids, [image])
        return abs(float(expected[-1, token]) - entries[0][token].logprob)

    assert distance() < 1e-4
    inputs = FAMILIES[kind].inputs
    assert inputs is not None

    def swapped(found: Any) -> dict[str, torch.Tensor]:
        given = inputs(found)
        axis = 0 if given["pixel_values"].dim() == 4 else 1
        return given | {"pixel_values": given["pixel_values"].flip(axis)}

    monkeypatch.setitem(FAMILIES, kind, FAMILIES[kind].__class__(**{**vars(FAMILIES[kind]), "inputs": swapped}))
    assert distance() > 1e-3


def test_a_layer_too_many_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA reads the last layer but one."""
    folder, image = make_vision_model("llava", tmp_path / "llava"), picture(50, 40)
    monkeypatch.setattr("kvern.models.families.llava.chosen_layers", lambda config, layers: layers)
    with engine(folder) as llm:
        [output] = llm.chat(talk("what", image), PARAMS)
    expected = expected_logprobs("llava", folder, output.prompt_token_ids, [image])
    token, entries = output.outputs[0].token_ids[0], output.outputs[0].logprobs or []
    assert abs(float(expected[-1, token]) - entries[0][token].logprob) > 1e-3


def test_choices_of_tiles_at_published_sizes() -> None:
    """Of equally good choices, too, the same are taken as in transformers."""
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    generator = numpy.random.default_rng(0)
    sizes = [(int(width), int(height)) for width, height in generator.integers(1, 4000, (300, 2))]
    sizes += [(448 * wide, 448 * high) for wide in range(1, 6) for high in range(1, 6)]
    shapes, canvases = BestShape(448, 1, 12), Anyres(tuple((wide, high) for high, wide in USUAL), 336, 24)
    points, processor = list(map(list, USUAL)), SmolVLMImageProcessorPil()
    split = Splitting(4 * 364, 364, True)
    for width, height in sizes:
        pieces = shapes.views(width, height)[0].pieces
        assert (pieces.columns, pieces.rows) == get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        wide, high = canvases.views(width, height)[1].canvas
        assert [high, wide] == list(select_best_resolution((height, width), points))
        if max(width, height) < 30 * min(width, height):
            found = split.views(width, height)[0].pieces if len(split.views(width, height)) > 1 else None
            _, rows, columns = processor.get_number_of_image_patches(height, width)
            assert found is None or (found.rows, found.columns) == (rows, columns)


def test_an_image_may_be_read_without_tiles(tmp_path: Path) -> None:
    folder = make_vision_model("smolvlm", tmp_path / "smolvlm")
    settings = (folder / "preprocessor_config.json").read_text().replace('"max', '"do_image_splitting": false, "max')
    (folder / "preprocessor_config.json").write_text(settings.replace('"do_image_splitting": true, ', ""))
    params = SamplingParams(max_tokens=1)
    with engine(folder) as llm:
        [output] = llm.chat(talk("what", picture(90, 60)), params)
    assert output.prompt_token_ids.count(3) == 4
