"""Which of the tests of all families that read images belong to the default selection."""

import pytest

CARRIERS = {"mistral3", "qwen3_vl", "qwen3_5"}
"""The families with which everything is tested; the others are tested with all of it at night."""
SAMPLE = {
    "test_pixels_are_those_of_transformers",
    "test_answers_are_those_of_transformers",
    "test_the_cache_knows_images_by_their_content",
    "test_what_is_left_out_changes_answers",
}
SIBLINGS = {"idefics3", "llava", "llava_siglip", "qwen3_vl_moe"}
"""Families whose parts the sample tries with others; their pixels alone are compared by day."""
OF_SPANS = {"test_chunks_end_anywhere_within_an_image", "test_switches_change_nothing"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the rest of a family that is no carrier to the night."""
    for item in items:
        call = getattr(item, "callspec", None)
        kind = None if call is None else call.params.get("kind")
        sample = SAMPLE | OF_SPANS if kind == "gemma4" else SAMPLE
        if kind in SIBLINGS:
            sample = {"test_pixels_are_those_of_transformers"}
        if kind is not None and kind not in CARRIERS and getattr(item, "originalname", "") not in sample:
            item.add_marker(pytest.mark.nightly)
