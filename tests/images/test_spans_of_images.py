"""Images whose tokens see each other: what is refused, and what the prefix cache finds of them."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, PromptInput, SamplingParams
from kvern.errors import InvalidRequest
from tests.support.vision_models import FAMILIES, expected_logprobs, make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)
FAMILY = FAMILIES["gemma4"]
IMAGE = picture(100, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("gemma4", tmp_path_factory.mktemp("vision") / "gemma4")


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", threads=1, max_model_len=128, max_batch_requests=4, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder, block_size=4) as llm:
        yield llm


def ask(llm: LLM, *parts: Any) -> Any:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    [output] = llm.chat([{"role": "user", "content": content}], PARAMS)
    return output


def test_an_image_that_no_step_computes_is_refused(folder: Path) -> None:
    with engine(folder, max_batch_tokens=FAMILY.longest_span - 5) as llm:
        with pytest.raises(InvalidRequest, match=r"has \d+ tokens, which .* 7 at most: raise max_batch_tokens"):
            ask(llm, "what", IMAGE)
        assert ask(llm, "what is this in that one").outputs[0].token_ids


def test_the_prefix_cache_ends_before_an_image_or_behind_it(folder: Path, llm: LLM) -> None:
    """Blocks of the same image that hold a part of it are not used, be it the last thing of a prompt."""
    stream = io.BytesIO()
    IMAGE.save(stream, "PNG")
    whole = ask(llm, "what", IMAGE, "is this").prompt_token_ids
    first = whole.index(FAMILY.image_id)
    end = first + whole.count(FAMILY.image_id)
    for length, cached in ((end + 2, end + 1), (end + 1, end), (end, first)):
        prompt = PromptInput(whole[:length], (stream.getvalue(),))
        [output] = llm.generate(prompt, PARAMS)
        assert output.cached_tokens == cached
        token, entries = output.outputs[0].token_ids[0], output.outputs[0].logprobs or []
        expected = expected_logprobs("gemma4", folder, whole[:length], [IMAGE])[-1, token]
        assert entries[0][token].logprob == pytest.approx(float(expected), abs=1e-4)


def test_spans_are_those_of_images(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="spans"):
        llm.generate(PromptInput([9, 8, 9], spans=((0, 2),)), PARAMS)


def test_gemma3_sets_images_apart(tmp_path: Path) -> None:
    """The text is what the model's processor makes of it, also where it meets line breaks; clients cannot write it."""
    with engine(make_vision_model("gemma3", tmp_path / "model")) as llm:
        image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
        output = ask(llm, "what\n", IMAGE, "\nis this")
        text = f"user: what\n{image}\nis this;"
        assert output.prompt_token_ids == llm.tokenizer.encode(text)
        prompt = {"prompt": text.replace(image, "<start_of_image>"), "multi_modal_data": {"image": IMAGE}}
        [generated] = llm.generate(prompt, PARAMS)
        assert generated.prompt_token_ids == output.prompt_token_ids
        marked = ask(llm, "<start_of_image> and <image_soft_token>", IMAGE)
        assert marked.prompt_token_ids.count(FAMILIES["gemma3"].image_id) == 16
        assert "<start_of_image> and <image_soft_token>" in llm.tokenizer.decode(marked.prompt_token_ids, False)
