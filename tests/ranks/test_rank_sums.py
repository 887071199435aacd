"""Which way ranks sum: what the first of them measured or knows, on all; and stores of processes with other pasts."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore

from kvern.device.measurements import Measurements
from kvern.layers import halves
from kvern.models.share import share_of
from kvern.ranks.peer_memory import _Counted, on_all
from kvern.ranks.peer_sums import TIMED_ROWS, PeerExchange, PeerSums, Way
from kvern.runner.ranks import rank_sums
from kvern.runner.ranks.rank_sums import choose_exchange, choose_sums, described, share_norms
from kvern.spec.model import MlpSpec
from tests.kernels.models import spec_of

CPU = torch.device("cpu")
WAYS: list[Way] = ["whole", "whole", "whole", "parts", "parts", "nccl", "nccl", "nccl"]


@pytest.fixture(autouse=True)
def memory_is_what_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in ("PeerSums", "PeerExchange"):
        monkeypatch.setattr(rank_sums, made, lambda memory, *_: memory)


class Peers(PeerSums):
    """Memory that is nowhere, and measurements that are given."""

    def __init__(self, found: list[Way]) -> None:
        self._found, self._width, self._dtype = found, 32, torch.bfloat16
        self.asked = 0

    def fastest(self, *given: Any) -> list[Way]:
        self.asked += 1
        return self._found

    def compile_sums(self) -> None:
        assert self.ways


class Exchange(PeerExchange):
    """Likewise, of rows."""

    def __init__(self, found: int) -> None:
        self._found, self._width, self._dtype = found, 32, torch.bfloat16
        self.asked = self.compiled = 0

    def fastest(self, *given: Any) -> int:
        self.asked += 1
        return self._found

    def gather(self, x: Tensor) -> Tensor:
        return x

    def sum_scattered(self, x: Tensor) -> Tensor:
        self.compiled += 1
        return x


class OneOfTwo:
    """Ranks of which the first tells `told`; None: this is it."""

    size = 2
    peers: PeerSums | None = None
    exchange: PeerExchange | None = None
    norms: object = None

    def map_norms(self, *given: Any) -> object:
        return given

    def __init__(self, mapped: PeerSums | PeerExchange | None, told: list[list[int]] | None = None) -> None:
        self._mapped, self._told = mapped, told

    def map_peers(self, *given: Any) -> PeerSums | PeerExchange:
        if self._mapped is None:
            raise RuntimeError("not every GPU reaches the memory of all others")
        return self._mapped

    def group_sum(self, x: Tensor) -> Tensor:
        return x

    def first(self, x: Tensor) -> Tensor:
        return x if self._told is None else torch.tensor(self._told.pop(0))


def choose(ranks: Any, folder: Path, width: int = 32) -> list[str]:
    return choose_sums(ranks, width, torch.bfloat16, CPU, Measurements(folder, CPU))


def test_what_was_measured_is_used_and_known_to_the_next_start(tmp_path: Path) -> None:
    peers, again = Peers(WAYS), Peers(WAYS)
    ranks = OneOfTwo(peers)
    assert choose(ranks, tmp_path) == ["sums of ranks: whole up to 16 rows, parts up to 64 rows, NCCL above"]
    assert ranks.peers is peers and peers.ways == WAYS
    choose(OneOfTwo(again), tmp_path)
    assert (peers.asked, again.asked, again.ways) == (1, 0, WAYS)
    other = Peers(WAYS)
    choose(OneOfTwo(other), tmp_path, 64)
    assert other.asked == 1, "rows of another width"


def test_all_do_what_the_first_found(tmp_path: Path) -> None:
    choose(OneOfTwo(Peers(WAYS)), tmp_path)
    peers = Peers(["nccl"] * len(TIMED_ROWS))
    ranks = OneOfTwo(peers, [[3] * len(TIMED_ROWS), [2] * len(TIMED_ROWS)])
    assert choose(ranks, tmp_path) == ["sums of ranks: parts up to 512 rows, NCCL above"]
    assert peers.asked == 1, "the first did not know what this one knows"
    known = Peers(WAYS)
    choose(OneOfTwo(known, [[1] * len(TIMED_ROWS)]), tmp_path / "empty")
    assert (known.asked, known.ways) == (0, ["whole"] * len(TIMED_ROWS))


def test_nccl_sums_what_is_not_faster_otherwise(tmp_path: Path) -> None:
    ranks = OneOfTwo(Peers(["nccl"] * len(TIMED_ROWS)))
    assert choose(ranks, tmp_path) == ["sums of ranks: NCCL"] and ranks.peers is None
    assert choose(OneOfTwo(None), tmp_path) == [
        "sums of ranks: NCCL, since not every GPU reaches the memory of all others"
    ]
    assert choose(OneOfTwo(Peers(WAYS)), tmp_path, 40) == ["sums of ranks: NCCL, since rows are 40 of torch.bfloat16"]


def test_rows_are_exchanged_as_the_first_found(tmp_path: Path) -> None:
    given = 32, torch.bfloat16, CPU, Measurements(tmp_path, CPU)
    first, again, other = Exchange(64), Exchange(8), Exchange(8)
    ranks = OneOfTwo(first)
    assert choose_exchange(ranks, *given) == ["rows between ranks: own kernels up to 64 of each, NCCL above"]  # type: ignore[arg-type]
    assert ranks.exchange is first and (first.rows, first.compiled) == (64, 1)
    choose_exchange(OneOfTwo(again), *given)  # type: ignore[arg-type]
    assert (again.asked, again.rows) == (0, 64)
    choose_exchange(OneOfTwo(other, [[-1], [256]]), *given)  # type: ignore[arg-type]
    assert (other.asked, other.rows) == (1, 256), "the first did not know what this one knows"
    ranks = OneOfTwo(Exchange(0), [[0]])
    assert choose_exchange(ranks, *given) == ["rows between ranks: NCCL"] and ranks.exchange is None  # type: ignore[arg-type]
    assert choose_exchange(OneOfTwo(None), *given) == [  # type: ignore[arg-type]
        "rows between ranks: NCCL, since not every GPU reaches the memory of all others"
    ]


@pytest.mark.parametrize(
    ("family", "rows", "mapped"),
    [
        ("llama", 8192, 4096),
        ("llama", 2049, 1152),
        ("llama", 1023, None),
        ("gemma2", 8192, None),
        ("qwen3_moe", 8192, None),
    ],
)
def test_norms_are_shared_by_ranks_of_models_that_are_computed_in_halves(
    family: str, rows: int, mapped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, spec = OneOfTwo(None), spec_of(family)
    assert share_norms(ranks, spec, rows, torch.bfloat16, CPU) == [] and ranks.norms is None  # type: ignore[arg-type]
    ranks.peers = Peers(WAYS)
    monkeypatch.setattr(rank_sums, "are_right", lambda *_: True)
    assert share_norms(ranks, spec, rows, torch.bfloat16, CPU) == []  # type: ignore[arg-type]
    assert ranks.norms is None, "so small layers are never computed in halves"
    monkeypatch.setattr(halves, "HALVED_WORK", 1)
    monkeypatch.setattr(rank_sums, "are_right", lambda *_: False)
    told = share_norms(ranks, spec, rows, torch.bfloat16, CPU)  # type: ignore[arg-type]
    assert ranks.norms is None and len(told) == (mapped is not None)
    monkeypatch.setattr(rank_sums, "are_right", lambda *_: True)
    assert share_norms(ranks, spec, rows, torch.bfloat16, CPU) == []  # type: ignore[arg-type]
    assert ranks.norms == (None if mapped is None else (mapped, spec.hidden_size, torch.bfloat16, CPU))


def test_norms_are_shared_from_the_rows_on_that_a_ranks_weights_say(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = share_of(spec_of("llama"), 2)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    heads = 2 * attention.heads + 2 * attention.kv_heads
    weights = spec.hidden_size * (heads * attention.head_dim + 3 * mlp.width)
    monkeypatch.setattr(rank_sums, "are_right", lambda *_: True)
    for least, is_shared in ((2048, True), (2049, False)):
        monkeypatch.setattr(halves, "HALVED_WORK", least * weights)
        ranks = OneOfTwo(None)
        ranks.peers = Peers(WAYS)
        assert share_norms(ranks, spec, 2048, torch.bfloat16, CPU) == []  # type: ignore[arg-type]
        assert (ranks.norms is not None) == is_shared


@pytest.mark.parametrize(
    ("x", "rows", "taken"),
    [
        (torch.zeros(4, 32), 4, False),
        (torch.zeros(4, 32).bfloat16(), 4, True),
        (torch.zeros(16, 32).bfloat16(), 8, True),
        (torch.zeros(9, 32).bfloat16(), 9, False),
        (torch.zeros(0, 32).bfloat16(), 0, False),
        (torch.zeros(4, 64).bfloat16(), 4, False),
        (torch.zeros(4, 64).bfloat16()[:, :32], 4, False),
    ],
)
def test_rows_that_are_exchanged(x: Tensor, rows: int, taken: bool) -> None:
    exchange = Exchange(8)
    exchange.rows = 8
    assert exchange.takes(x, rows) is taken


def test_a_stored_answer_that_is_none_is_measured_anew(tmp_path: Path) -> None:
    known = Measurements(tmp_path, CPU)
    known.remember("sums of ranks", {"2 ranks, 32, torch.bfloat16": ["whole", 7]})
    known.save()
    peers = Peers(WAYS)
    choose(OneOfTwo(peers), tmp_path)
    assert peers.asked == 1 and peers.ways == WAYS


def test_a_way_between_others_is_told() -> None:
    ways: list[Way] = ["nccl", "whole", "whole", "whole", "nccl", "parts", "parts", "parts"]
    assert described(ways) == (
        "sums of ranks: NCCL up to 1 rows, whole up to 32 rows, NCCL up to 64 rows, parts up to 512 rows, NCCL above"
    )


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.zeros(1, 32), False),
        (torch.zeros(1, 32).bfloat16(), True),
        (torch.zeros(64, 32).bfloat16(), True),
        (torch.zeros(65, 32).bfloat16(), False),
        (torch.zeros(1000, 32).bfloat16(), False),
        (torch.zeros(0, 32).bfloat16(), False),
        (torch.zeros(4, 48).bfloat16(), False),
        (torch.zeros(4, 64).bfloat16()[:, :32], False),
        (torch.zeros(2, 2, 32).bfloat16(), False),
    ],
)
def test_what_is_summed_in_memory_of_each_other(x: Tensor, taken: bool) -> None:
    peers = Peers(WAYS)
    peers.ways = WAYS
    assert peers.takes(x) == taken


def test_what_fails_on_one_rank_is_made_on_none(tmp_path: Path) -> None:
    """All learn why, so that none waits for another in a way of its own."""

    def make(rank: int, fails: bool) -> int:
        if fails:
            raise RuntimeError(f"rank {rank} has no memory\nCall stack")
        return rank

    def run(name: str, failing: int | None) -> list[int | str]:
        def one(rank: int) -> int | str:
            try:
                return on_all(PrefixStore(name, store), rank, 2, lambda: make(rank, rank == failing))
            except RuntimeError as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, range(2)))

    store = HashStore()
    assert run("well", None) == [0, 1]
    (first, second) = run("badly", 1)
    assert first == second and str(first).startswith("their GPUs share no memory: RuntimeError: rank 1 has no memory")
    assert "\n" not in str(first)


def test_processes_that_have_met_others_before_find_each_other(tmp_path: Path) -> None:
    stores: list[Any] = [_Counted(FileStore(str(tmp_path / "store"), 2)) for _ in range(2)]
    for round_ in range(2):
        keys = [f"CUDASymmetricMemory/{round_}/0", f"CUDASymmetricMemory/{7 + round_}/1"]
        for store, key in zip(stores, keys, strict=True):
            store.set(key, key.encode())
        for store, past in zip(stores, (0, 7), strict=True):
            wanted = [f"CUDASymmetricMemory/{past + round_}/{rank}" for rank in range(2)]
            assert store.multi_get(wanted) == [key.encode() for key in keys]
            assert [store.get(key) for key in wanted] == [key.encode() for key in keys]
