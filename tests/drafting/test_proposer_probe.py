"""A proposer of drafts, added in one file with one entry point and nothing else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.drafting import proposer
from kvern.plugins import Plugins
from tests.support.outputs import token_ids

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "kv_cache_tokens": 256}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 6, 7], [40, 41, 42, 43]]
PROPOSER = '''
"""Knows how some answers go on."""

import json
from pathlib import Path

KNOWN = json.loads(Path(__file__).with_name("known.json").read_text())


class Known:
    def propose(self, requests, most):
        return [self.following(list(request.token_ids), limit) for request, limit in zip(requests, most)]

    def following(self, tokens, limit):
        known = [answer for answer in KNOWN if answer[: len(tokens)] == tokens]
        return known[0][len(tokens) :][:limit] if known else []


def known(config, spec):
    return Known()
'''


def test_a_proposer_is_one_file_and_one_entry_point(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_model, **OPTIONS) as plain:
        expected = token_ids(plain.generate(PROMPTS, PARAMS))
    metadata = tmp_path / "known_answers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: known-answers\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvern.proposers]\nknown = known_answers:known\n")
    (tmp_path / "known_answers.py").write_text(PROPOSER)
    answers = [[*prompt, *answer] for prompt, (answer,) in zip(PROMPTS, expected, strict=True)]
    (tmp_path / "known.json").write_text(json.dumps(answers))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(proposer, "PROPOSERS", Plugins("proposer", "kvern.proposers", proposer.OWN))
    with LLM(tiny_model, proposer="known", **OPTIONS) as guessing:
        assert token_ids(guessing.generate(PROMPTS, PARAMS)) == expected
        found = guessing.statistics()
    assert found.draft_tokens > 0 and found.accepted_tokens == found.draft_tokens
    monkeypatch.delitem(sys.modules, "known_answers")
