"""LLM in the words of other libraries: mappings of parameters, and calls as pipelines of transformers have them."""

from collections.abc import Iterator

import pytest

from kvern import LLM, SamplingParams
from kvern.errors import InvalidParameter

TALK = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, max_model_len=256) as llm:
        yield llm


def test_parameters_may_be_a_mapping(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate(["Once", "Long ago"], greedy)
    for params in ({"temperature": 0, "max_tokens": 8}, [greedy, {"temperature": 0, "max_tokens": 8}]):
        found = llm.generate(["Once", "Long ago"], params)
        assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert llm.chat(TALK, {"temperature": 0})[0].outputs[0].text == "4"
    *_, last = llm.stream("Once", {"temperature": 0, "max_tokens": 8})
    assert last.outputs == expected[0].outputs
    with pytest.raises(InvalidParameter, match="no sampling parameter 'temprature': did you mean temperature"):
        llm.generate("Once", {"temprature": 0})
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate("Once", {"temperature": "hot"})


def test_a_call_is_that_of_a_pipeline(llm: LLM) -> None:
    [plain] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=6))
    text = plain.outputs[0].text
    assert llm("Once upon a time", max_new_tokens=6, do_sample=False) == [{"generated_text": "Once upon a time" + text}]
    several = llm(["Once upon a time"] * 2, max_new_tokens=6, do_sample=False, return_full_text=False)
    assert several == [[{"generated_text": text}]] * 2
    [said] = llm(TALK, temperature=0)
    assert said["generated_text"] == [*TALK, {"role": "assistant", "content": "4"}]
    assert len(llm("Once", num_return_sequences=3, max_new_tokens=2, seed=1)) == 3
    with pytest.raises(InvalidParameter, match="do_sample is false"):
        llm("Once", do_sample=False, temperature=0.5)
    assert llm.get_tokenizer() is llm.tokenizer
