"""Several questions at once with asyncio: they share the engine's batches."""

import asyncio

from kvern import AsyncLLM, SamplingParams

QUESTIONS = ["What is paged attention?", "What is 348 + 577?", "Tell me a short story."]


async def ask(llm: AsyncLLM, question: str) -> str:
    text = ""
    async for output in llm.stream_chat(
        [{"role": "user", "content": question}], SamplingParams(max_tokens=100, seed=1)
    ):
        text = output.outputs[0].text
    return text


async def main() -> None:
    async with AsyncLLM() as llm:
        answers = await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {answer}\n")


asyncio.run(main())
