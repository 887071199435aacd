"""Several ranks compute together what one process does: logits here, whole engines in `test_rank_engines.py`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvern import EngineConfig
from kvern.device.ranks import Ranks
from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.models.share import share_of
from kvern.worker.rank_limits import check_ranks
from tests.families import FAMILIES, make_checkpoint
from tests.test_model_parity import PROMPT, logits

SECONDS = 60.0


def shares(folder: Path, size: int) -> list[torch.Tensor]:
    """The logits of PROMPT as each of `size` ranks has them, which are threads here."""

    def compute(rank: int) -> torch.Tensor:
        ranks = Ranks(rank, size)
        ranks.connect(folder / f"meeting-{size}", torch.device("cpu"), SECONDS)
        return logits(load_model(folder, ranks=ranks), PROMPT)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(compute, range(size)))


def shared(family: str, size: int = 2) -> bool:
    from tests.families import make_config

    try:
        share_of(spec_from_config(make_config(family).to_dict()), size)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    try:
        found = shares(folder, 2)
    except ConfigError as error:
        pytest.skip(str(error))
    expected = logits(load_model(folder), PROMPT)
    assert (found[0] - expected).abs().max() < 1e-4
    assert torch.equal(found[0], found[1]), "each rank samples from the same numbers"
