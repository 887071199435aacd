"""A KV cache whose memory moves between models: it is refused where there is one model, as it would stay small."""

import pytest

from kvern.cli.main import read_command
from kvern.cli.serve import ServeCommand
from kvern.errors import ConfigError


def test_one_model_alone_has_nobody_to_share_its_cache_with() -> None:
    command, _ = read_command(["serve", "--model", "kvern-1m", "--device", "cpu", "--elastic-kv-cache"], {})
    assert isinstance(command, ServeCommand)
    with pytest.raises(ConfigError, match="there is one model: its cache would stay as small as one sequence"):
        command._serve(None)
