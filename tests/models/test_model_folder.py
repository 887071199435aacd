"""Options that stand in for files of a model: tokenizer, chat template, configuration, defaults of sampling."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.errors import ConfigError
from kvern.models.changed_folder import merged
from kvern.models.folder import model_folder
from kvern.text.tokenizer import Tokenizer
from tests.support.cache_folder import cache_folder
from tests.support.tiny_model import CONFIG, make_tiny_model

MESSAGES = [{"role": "user", "content": "fox"}]
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = cache_folder(tmp_path / "cache" / "kvern")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(folder)


def test_an_unchanged_model_is_its_own_folder(model: Path, cache: Path) -> None:
    assert model_folder(EngineConfig(str(model))) == model
    assert [file.name for file in cache.iterdir()] == ["cpu"]


@pytest.mark.parametrize("as_file", [True, False])
def test_chat_template_is_a_file_or_a_text(model: Path, tmp_path: Path, as_file: bool) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    folder = model_folder(EngineConfig(str(model), chat_template=str(file) if as_file else TEMPLATE))
    assert Tokenizer(folder).chat_template.render(MESSAGES, None, True, {}) == "[fox]"
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    assert model_folder(EngineConfig(str(model), chat_template=TEMPLATE)) == folder


def test_a_template_goes_before_those_inside_tokenizer_config(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    inline = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": inline}))
    tokenizer = Tokenizer(model_folder(EngineConfig(str(own), chat_template=TEMPLATE)))
    assert tokenizer.chat_template.source(tools=True) == TEMPLATE
    assert tokenizer.eos_token == "</s>"


def test_the_tokenizer_of_another_folder_brings_its_template(model: Path) -> None:
    folder = model_folder(EngineConfig(str(model), tokenizer="kvern-1m"))
    other = Tokenizer(model_folder(EngineConfig("kvern-1m")))
    assert Tokenizer(folder).encode("What is 17 + 25?") == other.encode("What is 17 + 25?")
    assert Tokenizer(folder).chat_template.source(tools=False) == other.chat_template.source(tools=False)


def test_an_engine_runs_with_overridden_values(model: Path) -> None:
    with LLM(
        str(model),
        hf_overrides={"max_position_embeddings": 64},
        override_generation_config={"temperature": 0.0},
        chat_template=TEMPLATE + "{{ mood }}",
        chat_template_kwargs={"mood": "calm"},
    ) as llm:
        assert llm.tokenizer.chat_prompt(MESSAGES) == "[fox]calm"
        assert llm.tokenizer.chat_prompt(MESSAGES, mood="wild") == "[fox]wild"
        assert llm.spec.max_position_embeddings == 64
        first, second = (llm.chat([MESSAGES], SamplingParams(max_tokens=8))[0].outputs[0].token_ids for _ in range(2))
    assert first == second


def test_generation_config_none_keeps_only_what_ends_an_answer(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5, "eos_token_id": [1, 7]}))
    for given, expected in (("none", {"eos_token_id": [1, 7]}), (str(own), None)):
        folder = model_folder(EngineConfig(str(own), generation_config=given, override_generation_config={"top_k": 9}))
        stored = json.loads((folder / "generation_config.json").read_text())
        assert stored == (expected or {"temperature": 0.3, "eos_token_id": [1, 7]}) | {"top_k": 9}


def test_an_engine_takes_the_defaults_of_its_model(model: Path) -> None:
    """Where a request says nothing; 0 and 1 are something."""
    plain = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    neutral = plain.replace(min_p=0.0, repetition_penalty=1.0)
    with LLM(str(model)) as llm:
        usual, best = (
            [
                llm.generate("the fox", params.replace(temperature=t))[0].outputs[0].token_ids
                for params in (plain, given)
            ]
            for t, given in ((1.0, plain.replace(min_p=1.0)), (0.0, plain.replace(repetition_penalty=9.0)))
        )
    assert usual[0] != usual[1] and best[0] != best[1]
    for defaults, temperature, (without, expected) in (
        ({"min_p": 1.0}, 1.0, usual),
        ({"repetition_penalty": 9.0}, 0.0, best),
    ):
        with LLM(str(model), override_generation_config=defaults) as llm:
            asked = [params.replace(temperature=temperature) for params in (plain, neutral)]
            outputs = llm.generate(["the fox"] * 2, asked)
        assert [output.outputs[0].token_ids for output in outputs] == [expected, without]


@pytest.mark.parametrize(
    ("stored", "override", "ends", "goes_on"),
    [
        ({"eos_token_id": [50]}, {}, 50, 40),
        ({"eos_token_id": [50]}, {"eos_token_id": 60}, 60, 50),
        ({"eos_token_id": 50}, {"eos_token_id": None}, 40, 50),
        ({}, {}, 40, 50),
        ({"eos_token_id": 50}, {}, 1, 40),
    ],
)
def test_ends_of_an_answer_are_those_of_the_generation_config(
    model: Path, tmp_path: Path, stored: dict[str, object], override: dict[str, object], ends: int, goes_on: int
) -> None:
    """Beside the tokenizer's own; config.json is asked where the former names none."""
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "generation_config.json").write_text(json.dumps(stored))
    overrides = {"eos_token_id": 40}
    free = SamplingParams(temperature=0, max_tokens=3)
    with LLM(str(own), hf_overrides=overrides, override_generation_config=override) as llm:
        asked = [free.replace(logit_bias={token: 1000.0}) for token in (ends, goes_on)]
        asked += [asked[0].replace(ignore_eos=True), asked[0].replace(ignore_eos=True, stop_token_ids=[ends])]
        answers = [output.outputs[0] for output in llm.generate(["the fox"] * len(asked), asked)]
    assert [(answer.token_ids, answer.finish_reason, answer.stop_reason) for answer in answers] == [
        ([ends], "stop", None),
        ([goes_on] * 3, "length", None),
        ([ends] * 3, "length", None),
        ([ends], "stop", ends),
    ]


def test_overrides_reach_into_inner_configurations_alone() -> None:
    values = {"text_config": {"a": 1, "b": 2}, "rope_scaling": {"rope_type": "linear", "factor": 2}}
    overrides = {"text_config": {"b": 3}, "rope_scaling": {"rope_type": "yarn"}}
    assert merged(values, overrides) == {"text_config": {"a": 1, "b": 3}, "rope_scaling": {"rope_type": "yarn"}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chat_template": "nowhere.jinja"}, "neither a file nor a template"),
        ({"chat_template": "{% for %}"}, "chat_template cannot be compiled"),
        ({"tokenizer": "/"}, "there is no tokenizer.json"),
        ({"generation_config": "nowhere"}, "it must be auto, none, or a folder"),
        ({"override_generation_config": {"presence_penalty": 1.1}}, "holds 'presence_penalty'"),
        ({"override_generation_config": {"eos_token_id": ["</s>"]}}, "must be a token id, or a list of some"),
        ({"override_generation_config": {"temperature": "0.5"}}, "temperature is '0.5': it must be a number"),
        ({"hf_overrides": {"x": {1, 2}}}, "is not JSON: Object of type set"),
        ({"hf_overrides": '{"x": 1}'}, "hf_overrides is '{\"x\": 1}': it must map names to values"),
        ({"hf_overrides": {"x": 1}, "cache_dir": "/dev/null"}, "cannot be written"),
    ],
)
def test_what_cannot_be_used_is_named(model: Path, options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        model_folder(EngineConfig(str(model), **options))  # type: ignore[arg-type]


def test_a_start_that_fails_leaves_nothing(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        model_folder(EngineConfig(str(model), hf_overrides={"max_position_embeddings": 64}))
    assert not list((cache / "models").iterdir())


def test_the_model_itself_is_not_touched(model: Path) -> None:
    model_folder(EngineConfig(str(model), hf_overrides={"max_position_embeddings": 64}))
    assert json.loads((model / "config.json").read_text()) == CONFIG
