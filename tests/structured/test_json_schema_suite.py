"""The official JSON Schema Test Suite: whatever schema is accepted, every answer validates.

The suite comes with the sources of the `jsonschema` package, which are fetched once from the package index.
"""

import collections
import importlib.metadata
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from kvern import LLM, SamplingParams
from kvern.errors import InvalidParameter
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer
from tests.support.internals import engine_of

DRAFTS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft4": jsonschema.Draft4Validator,
}
LEAST_ACCEPTED = {"draft2020-12": 0.8}
ANSWERS = [1, pytest.param(3, marks=pytest.mark.nightly)]
"""Of each model for each schema."""


@dataclass(frozen=True)
class Case:
    keyword: str
    description: str
    schema: Any
    valid: tuple[Any, ...]
    """Values that it allows."""


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Path:
    """The suite's folder `tests`."""
    version = importlib.metadata.version("jsonschema")
    folder = request.config.cache.mkdir("json-schema-suite")
    archive = folder / f"jsonschema-{version}.tar.gz"
    if not archive.is_file():
        wanted = ["--no-deps", "--no-binary", "jsonschema", f"jsonschema=={version}"]
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *wanted], capture_output=True, text=True
        )
        if fetched.returncode:
            pytest.skip(f"the suite cannot be fetched: {fetched.stderr.strip()[-300:]}")
    with tarfile.open(archive) as stored:
        stored.extractall(folder, filter="data")
    return folder / f"jsonschema-{version}" / "json" / "tests"


def exact(text: str) -> Decimal | float:
    """A number as it stands: as a float, 2.3 is no multiple of 0.1."""
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return float(text)


def cases_of(suite: Path, draft: str) -> list[Case]:
    """The schemas of the draft's required keywords; without a name of their draft they count as the newest."""
    name = {} if draft == "draft2020-12" else {"$schema": DRAFTS[draft].META_SCHEMA["$schema"]}
    return [
        Case(
            file.stem,
            case["description"],
            name | case["schema"] if isinstance(case["schema"], dict) else case["schema"],
            tuple(test["data"] for test in case["tests"] if test["valid"]),
        )
        for file in sorted((suite / draft).glob("*.json"))
        for case in json.loads(file.read_text())
    ]


def accepted(cases: list[Case], grammars: Grammars, draft: str) -> list[Case]:
    """Those that are; prints the share, and what was refused."""
    kept, refused = [], collections.Counter[str]()
    for case in cases:
        try:
            grammars.compile(StructuredOutput(json=case.schema))
        except InvalidParameter:
            refused[case.keyword] += 1
        else:
            kept.append(case)
    print(f"\n{draft}: {len(kept)} of {len(cases)} schemas are accepted ({len(kept) / len(cases):.1%})")
    print("refused:", ", ".join(f"{keyword} {count}" for keyword, count in refused.most_common()))
    return kept


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    model = "kvern-1m" if request.param == "embedded model" else str(tiny_model)
    with LLM(model, max_model_len=256, max_batch_requests=64, threads=1) as llm:
        yield llm


MODELS = ("random weights", "embedded model")
BY_DAY = {("embedded model", "draft2020-12")}
EACH = [
    pytest.param(model, draft, marks=[] if (model, draft) in BY_DAY else [pytest.mark.nightly])
    for model in MODELS
    for draft in DRAFTS
]


@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize(("llm", "draft"), EACH, indirect=["llm"])
def test_every_answer_validates(llm: LLM, suite: Path, draft: str, answers: int) -> None:
    cases = cases_of(suite, draft)
    folder = engine_of(llm).folder
    grammars = grammars_of(folder, llm.spec.vocab_size)
    kept = accepted(cases, grammars, draft)
    assert len(kept) >= LEAST_ACCEPTED.get(draft, 0.6) * len(cases)

    ending = set(grammars.library.eos_token_ids)
    tokenizer = Tokenizer(folder)
    for text in ('"', "}", "]", "1"):
        ending |= set(tokenizer.encode(text, add_special_tokens=False))
    params = [
        SamplingParams(
            structured=StructuredOutput(json=case.schema),
            temperature=1.0,
            max_tokens=60,
            seed=seed,
            logit_bias=dict.fromkeys(ending, 4.0),  # so that most answers end
        )
        for case in kept
        for seed in range(answers)
    ]
    outputs = llm.generate([[5 + index % 20, 6, 7] for index in range(len(params))], params)
    ended = 0
    for index, output in enumerate(outputs):
        case, [answer] = kept[index // answers], output.outputs
        assert answer.finish_reason in ("stop", "length"), (case, answer)
        if answer.finish_reason == "stop":
            ended += 1
            value = json.loads(answer.text, parse_float=exact)
            schema = json.loads(json.dumps(case.schema), parse_float=exact)
            validator = validator_for(schema, default=DRAFTS[draft])(schema)
            with localcontext(prec=1000):  # answers may have more digits than the usual 28
                assert not [error.message for error in validator.iter_errors(value)], (case, answer.text)
    assert ended > 0.8 * len(outputs)


def test_most_of_what_a_schema_allows_can_be_said(suite: Path) -> None:
    """A grammar may be narrower than its schema, but not by much."""
    folder = resolve_model("kvern-1m")
    tokenizer, grammars = Tokenizer(folder), grammars_of(folder, 4096)
    possible, counted, narrowed = 0, 0, collections.Counter[str]()
    for case in accepted(cases_of(suite, "draft2020-12"), grammars, "draft2020-12"):
        grammar = grammars.compile(StructuredOutput(json=case.schema))
        for value in case.valid:
            matcher = grammars.library.matcher(grammar)
            tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
            said = matcher.consume_tokens(tokens) and matcher.is_accepting()
            possible, counted = possible + said, counted + 1
            if not said:
                narrowed[case.keyword] += 1
    print(f"\n{possible} of {counted} values that the schemas allow can be said ({possible / counted:.1%})")
    print("not all of:", ", ".join(f"{keyword} {count}" for keyword, count in narrowed.most_common()))
    assert possible > 0.9 * counted
