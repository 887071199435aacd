"""Print an answer while it is being made."""

from kvern import LLM, SamplingParams

with LLM() as llm:
    shown = 0
    for output in llm.stream_chat(
        [{"role": "user", "content": "Tell me a short story."}], SamplingParams(max_tokens=200, seed=1)
    ):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()
