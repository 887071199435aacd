"""Which of the tests of all families that read images belong to the default selection."""

from typing import Any

import pytest

CARRIERS = {"mistral3", "qwen3_vl", "qwen3_5"}
"""The families with which everything is tested; the others are tested with all of it at night."""
SAMPLE = {
    "test_pixels_are_those_of_transformers",
    "test_answers_are_those_of_transformers",
    "test_what_is_left_out_changes_answers",
}
SIBLINGS = {"idefics3", "llava", "llava_siglip", "qwen3_vl_moe"}
"""Families whose parts the sample tries with others; their pixels alone are compared by day."""
OF_SPANS = {
    "test_chunks_end_anywhere_within_an_image",
    "test_switches_change_nothing",
    "test_the_cache_knows_images_by_their_content",
}
OF_SERVERS = {"test_all_apis_take_images", "test_the_server_refuses_bad_images"}
"""What does not depend on how a family reads images: with one of them."""


def is_of_the_night(name: str, kind: str, params: dict[str, Any]) -> bool:
    """Whether a test of a family is left to the night."""
    if name in OF_SERVERS:
        return kind != "qwen3_5"
    if name == "test_switches_change_nothing":  # layers of taps are divided over ranks and stages
        options = params["options"]
        divided = "tensor_parallel_size" in options or "pipeline_parallel_size" in options
        return kind not in ({"qwen3_vl"} if divided else {"qwen3_vl", "gemma4"})
    if name == "test_chunks_end_anywhere_within_an_image" and kind == "mistral3":
        return True
    if name == "test_answers_are_those_of_transformers" and kind not in CARRIERS:
        pictures = sum(not isinstance(part, str) for part in params["parts"])
        if pictures != (3 if params["kernels"] else 2):
            return True
    sample = SAMPLE | OF_SPANS if kind == "gemma4" else SAMPLE
    if kind in SIBLINGS:
        sample = {"test_pixels_are_those_of_transformers"}
    return kind not in CARRIERS and name not in sample


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the rest of a family that is no carrier to the night."""
    for item in items:
        call = getattr(item, "callspec", None)
        kind = None if call is None else call.params.get("kind")
        if kind is not None and is_of_the_night(getattr(item, "originalname", ""), kind, call.params):
            item.add_marker(pytest.mark.nightly)
