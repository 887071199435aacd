"""Which decodes are grouped by what they begin with."""

from hypothesis import given
from hypothesis import strategies as st

from kvern.runner.decode_graphs import LEAST_KEYS, common_length, find_shared_prefixes, tiles_for

BLOCK_SIZE = 64
PREFIX = [7, 3, 9, 1]  # 256 keys


def test_a_group_is_cut_into_tiles() -> None:
    tables = [[*PREFIX, 20 + index] for index in range(6)] + [[90, 91, 92, 93, 94]]
    groups = find_shared_prefixes(tables, [300] * 7, BLOCK_SIZE, members=4)
    assert groups is not None
    assert groups.members == [[0, 1, 2, 3], [4, 5]]
    assert groups.tile_keys == [256, 256]
    assert groups.keys == [256] * 6 + [0]


def test_a_query_is_never_in_its_own_prefix() -> None:
    """A prompt that is all shared: its last token is computed again, and is no part of what lies before it."""
    assert find_shared_prefixes([PREFIX] * 8, [255] * 8, BLOCK_SIZE, 4) is None


def test_few_requests_or_few_keys_are_left_alone() -> None:
    assert find_shared_prefixes([PREFIX] * 3, [400] * 3, BLOCK_SIZE, 4) is None
    assert find_shared_prefixes([PREFIX[:3]] * 8, [400] * 8, BLOCK_SIZE, 4) is None


tables = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=40)


@given(tables, st.integers(1, 16), st.integers(0, 900))
def test_what_is_grouped_is_shared(tables: list[list[int]], members: int, start: int) -> None:
    groups = find_shared_prefixes(tables, [start] * len(tables), BLOCK_SIZE, members)
    if groups is None:
        return
    assert len(groups.members) == len(groups.tile_keys) <= tiles_for(len(tables), members)
    grouped = [index for tile in groups.members for index in tile]
    assert len(set(grouped)) == len(grouped)
    assert {index for index, keys in enumerate(groups.keys) if keys} == set(grouped)
    for tile, keys in zip(groups.members, groups.tile_keys, strict=True):
        assert 0 < len(tile) <= members
        assert LEAST_KEYS <= keys <= start
        assert keys % BLOCK_SIZE == 0
        for index in tile:
            assert groups.keys[index] == keys
            assert tables[index][: keys // BLOCK_SIZE] == tables[tile[0]][: keys // BLOCK_SIZE]


@given(tables)
def test_common_length(tables: list[list[int]]) -> None:
    common = common_length(tables)
    assert all(table[:common] == tables[0][:common] for table in tables)
    assert any(len(table) == common for table in tables) or len({table[common] for table in tables}) > 1
