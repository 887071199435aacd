"""Each feature with each family: the table in docs/models.md, cell by cell."""

from pathlib import Path

import pytest

from tests.support.cache_folder import load_kernels
from tests.support.families import FAMILIES, make_checkpoint
from tests.support.model_features import FEATURES, PAGE, page, recorded

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
BY_DAY = {
    ("llama", "deterministic"),
    ("qwen3_moe", "weights in INT8"),
    ("gemma3", "KV tier"),
    ("gpt_neox", "embeddings"),
    ("qwen3_5", "interruptions"),
    ("gpt_oss", "interruptions"),
    ("deepseek_v3", "interruptions"),
    ("gemma4_vision", "interruptions"),
}
EACH = [
    pytest.param(family, name, marks=[] if (family, name) in BY_DAY else pytest.mark.nightly)
    for family in FAMILIES
    for name in FEATURES
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "name"), EACH)
def test_a_family_has_the_features_that_the_record_says(family: str, name: str, tmp_path: Path) -> None:
    load_kernels("cpu_sampling", 1)
    assert FEATURES[name](make_checkpoint(family, tmp_path)) == recorded()[family][name]


def test_every_feature_was_tried_with_every_family_and_the_table_says_so() -> None:
    assert {family: [*found] for family, found in recorded().items()} == {family: [*FEATURES] for family in FAMILIES}
    assert PAGE.read_text() == page(), "run python -m tests.support.model_features"
