"""A conversation with a system message, and a tool that the model calls."""

from kvern import LLM, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens=100)
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

with LLM() as llm:
    messages = [
        {"role": "system", "content": "You extract records as JSON."},
        {"role": "user", "content": "John Weaver is 30 years old. He lives in Berlin."},
    ]
    print(llm.chat(messages, greedy)[0].outputs[0].text)

    question = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    asked = llm.chat(question, greedy, tools=[weather])[0].outputs[0].message
    assert asked is not None
    [call] = asked.tool_calls
    print(call.name, call.arguments)

    function = {"name": call.name, "arguments": call.arguments}
    question += [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": '{"temperature": 24, "condition": "sunny"}'},
    ]
    print(llm.chat(question, greedy, tools=[weather])[0].outputs[0].text)
