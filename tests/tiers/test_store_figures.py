"""Figures of stores for people: the rows of a final table."""

from kvern.request.store_figures import StoreFigures, store_rows


def test_rows_say_what_a_store_gave_and_what_a_load_costs() -> None:
    well = StoreFigures(hit_tokens=12_800, stored_tokens=64, latency_seconds=0.0005, bandwidth=4e9)
    ill = StoreFigures(refused_tokens=3, late_tokens=4, corrupt_pages=1, failures=3, bandwidth=2e8, is_on=False)
    assert store_rows({"host": well, "disk": ill}) == [
        ("KV tier host", "12,800 tokens loaded, 64 stored, 0.5 ms + 4.0 GB/s a load"),
        (
            "KV tier disk",
            "0 tokens loaded, 0 stored, 7 computed instead, 1 corrupt pages, 3 failures, 0.0 ms + 0.2 GB/s a load, off",
        ),
    ]
    assert store_rows({}) == []
