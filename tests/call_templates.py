"""Small chat templates, each with one trait of how a family of models writes calls."""

JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TEMPLATE = """\
{%- if tools %}{{ '<|turn|>system\\n' }}PROSE{{ tools | tojson }}<|over|>{% endif %}
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}BEFORE{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}
{{- BEGIN }}
{%- for call in message.tool_calls %}{% set f = call.function %}CALL
{%- if not loop.last %}{{ BETWEEN }}{% endif %}{% endfor %}
{{- END }}
{%- endif %}
{{- '<|over|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""


def template(call: str, begin: str = "", between: str = "", end: str = "", prose: str = "", before: str = "") -> str:
    """A template with these pieces; `before` stands at the beginning of the assistant's messages."""
    pieces = {"PROSE": prose, "BEFORE": before, "CALL": call}
    pieces |= {name: repr(text) for name, text in (("BEGIN", begin), ("BETWEEN", between), ("END", end))}
    text = TEMPLATE
    for name, piece in pieces.items():
        text = text.replace(name, piece)
    return text


NUMBERED = (
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
)
LINED = '{\n  "name": "{{ f.name }}",\n  "arguments": {{ f.arguments | tojson(indent=2) }}\n}'
ONE_ONLY = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
OBJECTS = {
    "each between marks": template(JSON, "\n<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "without line breaks": template(JSON, "<tool_call>", "</tool_call><tool_call>", "</tool_call>"),
    "a list between marks": template(JSON, "<tool_calls>[", ", ", "]</tool_calls>", "Do not write <tool_call>."),
    "lines between marks": template(JSON, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "a list behind a mark": template(LINED, "<|tool_call|>[\n", ",\n", "\n]"),
    "a mark before each": template(JSON, "\n<function_call> ", "\n<function_call> ", "\n"),
    "two marks": template(JSON, "<|action_start|><|plugin|>\n", "<|action_end|><|action_start|><|plugin|>\n",
                          "<|action_end|>"),
    "numbers in calls": template(NUMBERED, "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    "a headline": template(LINED, "\nAction:\n```json\n[\n", ",\n", "\n]```"),
    "names as keys": template('{"{{ f.name }}": {{ f.arguments | tojson }}}', "<|tools_prefix|>[", ", ",
                              "]<|tools_suffix|>"),
    "behind thinking": template(JSON, "<TOOLCALL>[", ", ", "]</TOOLCALL>", "<tool_call>",
                                "{{ '<think>\\n\\n</think>\\n\\n' }}"),
    "as a message": template(JSON + ONE_ONLY, "<|over|>\n\nfunction call<|role|>\n"),
    "a bare list": template(JSON, "[", ", ", "]", "Prefix calls with <tool_call>."),
    "bare objects": template(JSON, "", ",", ""),
    "bare parameters": template('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + ONE_ONLY),
    "ids": template('{"id": "{{ call.id }}", "name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
                    "<calls>", ";", "</calls>"),
}  # fmt: skip
