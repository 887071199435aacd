"""What is told of drafts when a run ends."""

from kvern.observe.exposition import engines_text
from kvern.observe.metrics import DraftFigures, Metrics
from kvern.request.events import EngineStatistics


def test_figures_of_what_was_verified_meanwhile() -> None:
    before = EngineStatistics(drafts_by_position=(5, 2), accepted_by_position=(4, 1))
    after = EngineStatistics(drafts_by_position=(9, 6, 2), accepted_by_position=(7, 2, 0))
    figures = DraftFigures.between(before, after)
    assert (figures.by_position, figures.accepted_by_position) == ((4, 4, 2), (3, 1, 0))
    assert (figures.count, figures.accepted, figures.runs, figures.tokens_a_step) == (10, 4, 4, 2.0)
    assert figures.rows() == [
        ("drafts that were right", "4 of 10 (40.0%)"),
        ("right at the 1st, 2nd ... place", "75% 25% 0%"),
        ("tokens of a step with drafts", "2.00"),
    ]
    assert DraftFigures().rows() == []


def test_metrics_count_by_position() -> None:
    metrics = Metrics("m")
    for steps, drafts, accepted in ((1, (2,), (1,)), (2, (3, 1), (2, 1)), (2, (9,), (9,))):
        metrics.step(EngineStatistics(steps=steps, drafts_by_position=drafts, accepted_by_position=accepted), 0.1)
    text = engines_text([metrics]).decode()
    for line in (
        'drafts_total{model_name="m"} 3.0',
        'draft_tokens_total{model_name="m"} 4.0',
        'accepted_tokens_total{model_name="m"} 3.0',
        'draft_tokens_per_pos_total{model_name="m",position="1"} 1.0',
        'accepted_tokens_per_pos_total{model_name="m",position="0"} 2.0',
    ):
        assert f"kvern:spec_decode_num_{line}" in text
