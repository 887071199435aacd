"""The options that name stores: sizes, ages, kinds, and what is said about wrong ones."""

from collections.abc import Callable

import pytest

from kvern.config import EngineConfig
from kvern.errors import ConfigError, without_passwords
from kvern.tiers.store import Identity, make_store, read_age, read_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("500GB", 500_000_000_000), ("1.5 tb", 1_500_000_000_000), ("64GiB", 64 << 30), ("7kB", 7000)],
)
def test_a_size_has_a_unit(text: str, count: int) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("3600", 3600), ("90m", 5400), ("12h", 43200), ("7d", 604_800), ("2s", 2)]
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert read_age(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "5XB", "0.0MB", "1e9", "nan", "1,5GB", "0d", "5 y"])
@pytest.mark.parametrize("read", [read_bytes, read_age])
def test_a_wrong_size_or_age_is_named(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="must be a") as caught:
        read(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("option", ["", "disk", "nothing:/a", ":/a"])
def test_an_unknown_kind_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="KIND:REST"):
        make_store(option, Identity(bytes(16)))


@pytest.mark.parametrize("password", ["secret", "p@ss", "a/b", "x:y"])
def test_messages_leave_out_passwords(password: str) -> None:
    option = f"valkey://me:{password}@host:1/0"
    assert without_passwords(f"disk:/a/b@c:5GB {option}") == "disk:/a/b@c:5GB valkey://me:***@host:1/0"
    with pytest.raises(ConfigError) as caught:
        EngineConfig(kv_tier=(option,), prefix_cache=False)
    assert "valkey://me:***@host" in str(caught.value) and password not in str(caught.value)


def test_an_age_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="kv_tier_max_age is 7d, and there is no kv_tier"):
        EngineConfig(kv_tier_max_age="7d")
