"""Complete several prompts at once, greedily and by sampling."""

from kvern import LLM, SamplingParams

prompts = ["Once upon a time", "The old mill by the river", "Long ago there was a"]

with LLM() as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # Three answers to one prompt share its cached blocks; a seed makes them the same every time.
    params = SamplingParams(temperature=0.9, max_tokens=30, n=3, seed=7)
    for answer in llm.generate("Once upon a time", params)[0].outputs:
        print(answer.index, answer.text)
