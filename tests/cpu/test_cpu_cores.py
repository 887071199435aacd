"""How PyTorch's threads wait for each other in kvern's own processes."""

import os

import pytest

from kvern.cpu.cores import limit_spinning


@pytest.mark.parametrize(
    ("asked", "found"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_pytorch_spin_briefly_unless_the_user_has_said_how_long(
    asked: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(asked))
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == found
