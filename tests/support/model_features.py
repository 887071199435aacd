"""What works with which model type, as data: `python -m tests.support.model_features` writes them into docs/models.md.

Every cell is a test, of `test_model_features.py` or of the files named at `EVERYWHERE`. Features are tried when a
family is new, and what was found is kept in model_features.json, which the tests hold against what they find.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.errors import ConfigError, UnsupportedModel
from kvern.models.image_models import VISION
from kvern.models.loader import load_model
from kvern.models.pooling import POOLING_FILE
from kvern.quantize import job
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.scheme import INT8
from tests.support.cache_folder import load_kernels
from tests.support.families import CPU_ALONE, FAMILIES, make_checkpoint, reference_logits, reference_state
from tests.support.internals import core_of, runner_of
from tests.support.interruptions import goes_on_where_it_was
from tests.support.model_outputs import PROMPT, logits
from tests.support.peft_adapters import make_adapter, merge
from tests.support.rank_features import NOT_DIVIDED, OF_EXPERTS
from tests.support.speculation import speculating
from tests.support.tiers import HOST, PAGE_TOKENS, figures, forget, trust
from tests.support.uniform_plans import uniform_plan

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RECORD = Path(__file__).with_name("model_features.json")
BEGIN, END = "<!-- python -m tests.support.model_features -->\n", "<!-- the end of the table -->\n"
OPTIONS: dict[str, Any] = {
    "threads": 1,
    "max_model_len": 64,
    "kv_cache_tokens": 256,
    "block_size": 4,
    "max_batch_requests": 4,
    "prefix_cache": False,
}
PROMPTS = [PROMPT[:length] for length in (13, 30, 5)]
QUERIES = r"(?!.*(vision|visual|audio)).*\.(q_proj|q_b_proj|v_proj|qkv_proj|query_key_value)"


def log_probabilities(folder: Path, **options: Any) -> torch.Tensor:
    """Log-probabilities of the tokens of all prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, params)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries])


def stays_near(folder: Path, **options: Any) -> bool:
    """Log-probabilities change, and most of them by little; False: an option is refused."""
    plain = log_probabilities(folder, dtype="float32")
    try:
        other = log_probabilities(folder, dtype="float32", **options)
    except ConfigError as error:
        if not any(name in str(error) for name in options):
            raise
        return False
    off = (other - plain).abs()
    assert 0 < off.median() < 0.1 * plain.std()
    return True


def captures(folder: Path) -> bool:
    """Steps of decodes are captured, and answer as those that are not."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(str(folder), **OPTIONS, dtype="float32") as llm:
        runner = runner_of(llm)
        found = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
        captured, runner._captured = runner._captured, None
        expected = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert [(answer.token_ids, answer.logprobs) for answer in found] == [
        (answer.token_ids, answer.logprobs) for answer in expected
    ]
    return captured is not None and bool(captured._sizes)


def is_deterministic(folder: Path) -> bool:
    """Alone and beside others, tokens have the same log-probabilities to the last bit; False: it is refused."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    try:
        llm = LLM(str(folder), **OPTIONS, dtype="bfloat16", deterministic=True)
    except ConfigError as error:
        if "deterministic" not in str(error):
            raise
        return False
    with llm:
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
        together = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert [(answer.token_ids, answer.logprobs) for answer in alone] == [
        (answer.token_ids, answer.logprobs) for answer in together
    ]
    return True


def is_quantized(folder: Path) -> bool:
    """True if the result of `kvern quantize` is close to the plain model; False: the model is refused."""
    try:
        checkpoint = Checkpoint(folder, torch.device("cpu"))
    except UnsupportedModel as error:
        if "through which calibrations do not go" not in str(error):
            raise
        return False
    settings = job.Settings(uniform_plan(checkpoint, INT8), job.make_method("int8"))
    plain = log_probabilities(folder, dtype="float32")
    with tempfile.TemporaryDirectory() as made:
        job.quantize(checkpoint, settings, Calibration(torch.tensor([PROMPTS[0]]), "a prompt"), Path(made) / "out")
        off = (log_probabilities(Path(made) / "out", dtype="float32") - plain).abs()
    assert 0 < off.median() < 0.1 * plain.std()
    return True


def takes_adapters(folder: Path) -> bool:
    """A LoRA adapter of queries and values gives the logits of the model it is merged into."""
    with tempfile.TemporaryDirectory() as made:
        adapter = make_adapter(folder, Path(made) / "adapter", 3, r=5, target_modules=QUERIES)
        decoder = load_model(folder)
        bank = AdapterBank(decoder, places=2, rank=8, kernels=False)
        bank.load(1, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
        merged = merge(folder, adapter, Path(made) / "merged")
        expected = reference_logits(merged, PROMPT)
    found = logits(decoder, PROMPT, bank.select([1], [len(PROMPT)], None))
    assert (found - expected).abs().max() < 1e-4 and not torch.equal(found, logits(decoder, PROMPT))
    return True


def verifies_drafts(folder: Path) -> bool:
    """Answers whose drafts are verified, right ones and wrong ones, are those without drafts; False: it is refused."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    try:
        llm = LLM(str(folder), **OPTIONS, dtype="float32", proposer="ngram")
    except ConfigError as error:
        if "proposer" not in str(error):
            raise
        return False
    with llm:
        core_of(llm).drafting = None
        expected = llm.generate(PROMPTS, params)
        with speculating(llm, expected, 0.7):
            found = llm.generate(PROMPTS, params)
            statistics = llm.statistics()  # counted by who guesses
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    return True


def uses_a_tier(folder: Path) -> bool:
    """Prompts whose blocks came back from a tier are answered as before; False: it is refused."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = OPTIONS | {"prefix_cache": True, "kv_cache_tokens": 64, "kv_tier": HOST}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PAGE_TOKENS, 8)
        try:
            llm = LLM(str(folder), **options)
        except ConfigError as error:
            if "kv_tier" not in str(error):
                raise
            return False
        with llm:
            trust(llm)
            answers = []
            for _ in range(2):
                answers.append([llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS])
                forget(llm)
            assert answers[0] == answers[1]
            assert figures(llm).hit_tokens
    return True


def embeds(folder: Path) -> bool:
    """A text's vector is the last state that transformers computes."""
    (folder / POOLING_FILE).parent.mkdir()
    (folder / POOLING_FILE).write_text('{"pooling_mode_lasttoken": true}')
    with LLM(str(folder), **OPTIONS) as llm:
        found = torch.tensor(llm.embed(PROMPTS))
    states = torch.stack([reference_state(folder, prompt) for prompt in PROMPTS])
    assert (found - states / states.norm(dim=1, keepdim=True)).abs().max() < 1e-4
    return True


FEATURES: Mapping[str, Callable[[Path], bool]] = {
    "captured decodes": captures,
    "deterministic": is_deterministic,
    "weights in INT8": lambda folder: stays_near(folder, quantization="int8"),
    "`kvern quantize`": is_quantized,
    "KV cache in INT8": lambda folder: stays_near(folder, kv_cache_dtype="int8"),
    "adapters": takes_adapters,
    "KV tier": uses_a_tier,
    "drafts": verifies_drafts,
    "interruptions": goes_on_where_it_was,
    "embeddings": embeds,
}
"""The check of each feature with the tiny model in a folder, on a CPU, with kernels where there are any."""
EVERYWHERE: Mapping[str, Collection[str]] = {
    "logits": FAMILIES,
    "chunks, prefix cache": FAMILIES,
    "GPU": FAMILIES.keys() - {*CPU_ALONE},
    "tp 2": FAMILIES,
    "pp 2": FAMILIES.keys() - NOT_DIVIDED.keys(),
    "ep 2": OF_EXPERTS,
}
"""Features that other tests check for these families.

They are `test_model_parity.py`, `test_parity_matrix.py`, `test_gpu.py`, `test_tensor_parallel.py` and
`test_pipeline_parallel.py`.
"""


def recorded() -> dict[str, dict[str, bool]]:
    """The recorded features of each family."""
    found: dict[str, dict[str, bool]] = json.loads(RECORD.read_text())
    return found


def record() -> None:
    """Try each feature with the families that nobody tried, and forget those that are gone."""
    known = recorded()
    load_kernels("cpu_sampling", 1)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as made:
            missing = FEATURES.keys() - known.get(family, {}).keys()
            folder = make_checkpoint(family, Path(made)) if missing else Path(made)
            tried = {name: FEATURES[name](folder) for name in FEATURES if name in missing}
        known[family] = {name: (known.get(family, {}) | tried)[name] for name in FEATURES}
        lines = [f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in FAMILIES if name in known]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table() -> str:
    """The table in Markdown: for each feature, the model types all of whose families have it."""
    known = recorded()
    types: dict[str, list[str]] = {}
    for family, (model_type, _) in FAMILIES.items():
        types.setdefault(model_type, []).append(family)
    having = {
        **{name: set(shown) for name, shown in EVERYWHERE.items()},
        **{name: {family for family in FAMILIES if known[family][name]} for name in FEATURES},
    }
    rows = [["feature", "model types"], ["---", "---"]]
    for name, families in having.items():
        has = {model_type: families.issuperset(theirs) for model_type, theirs in sorted(types.items())}
        few = 2 * sum(has.values()) < len(has)
        named = ", ".join(f"`{model_type}`" for model_type in has if has[model_type] == few)
        rows.append([name, f"{'only' if few else 'all but'} {named}" if named else "all"])
    rows.append(["[images](images.md)", f"only {', '.join(f'`{model_type}`' for model_type in sorted(VISION))}"])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def page() -> str:
    """docs/models.md with the table as it has to be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    record()
    PAGE.write_text(page())
