"""Small chat templates, each with one trait of how a family of models writes calls."""

JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TEMPLATE = """\
{%- if tools %}{{ '<|turn|>system\\n' }}@PROSE@{{ tools | tojson }}<|over|>{% endif %}
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}@BEFORE@{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}
{{- @BEGIN@ }}
{%- for call in message.tool_calls %}{% set f = call.function %}@CALL@
{%- if not loop.last %}{{ @BETWEEN@ }}{% endif %}{% endfor %}
{{- @END@ }}
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
        text = text.replace(f"@{name}@", piece)
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


def tags(parameter: str, function: str, closes: str, gap: str = "\n", between: str = "\n", **outer: str) -> str:
    """A template with a tag for each parameter, where {k} is its name, {v} its value and {t} its type."""
    words = "{{ 'true' if v is string else 'false' }}"
    kinds = "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else 'array' }}"
    for mark, said in (("{k}", "{{ k }}"), ("{v}", VALUE), ("{s}", words), ("{t}", kinds)):
        parameter = parameter.replace(mark, said)
    loop = "{% for k, v in f.arguments.items() %}" + parameter + f"{{{{ {gap!r} }}}}" + "{% endfor %}"
    return template(function + loop + closes, between=between, **outer)


VALUE = "{{ v if v is string else v | tojson }}"
TREE = """\
{%- macro tree(v) -%}{%- if v is mapping -%}{%- for k, x in v.items() -%}
]<]mark[>[<{{ k }}>{{ tree(x) }}]<]mark[>[</{{ k }}>{%- endfor -%}
{%- elif v is iterable and v is not string -%}
{%- for x in v -%}]<]mark[>[<item>{{ tree(x) }}]<]mark[>[</item>{%- endfor -%}
{%- else -%}VALUE{%- endif -%}{%- endmacro -%}""".replace("VALUE", VALUE).replace("mark", "minimax")
SPACE = "]<]minimax[>["
XML = {
    "seed": tags("<parameter={k}>{v}</parameter>", "<seed:tool_call>\n<function={{ f.name }}>\n",
                 "</function>\n</seed:tool_call>"),
    "qwen, close together": tags("<parameter={k}>\n{v}\n</parameter>", "<tool_call>\n<function={{ f.name }}>\n",
                                 "</function>\n</tool_call>", between=""),
    "dsml": tags('<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>',
                 '<｜DSML｜invoke name="{{ f.name }}">\n', "</｜DSML｜invoke>", begin="\n\n<｜DSML｜function_calls>\n",
                 end="\n</｜DSML｜function_calls>"),
    "dsml 4": tags('<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>',
                   '<｜DSML｜invoke name="{{ f.name }}">\n', "</｜DSML｜invoke>", begin="\n\n<｜DSML｜tool_calls>\n",
                   end="\n</｜DSML｜tool_calls>"),
    "attributes": tags('<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>',
                       '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>', "<|close|>call<|sep|>", "",
                       "", begin="<|open|>tools<|sep|>", end="<|close|>tools<|sep|>"),
    "no outer tags": tags('<param name="{k}">{v}</param>', '<function name="{{ f.name }}">', "</function>", ""),
    "names in tags": TREE + tags("]<]minimax[>[<{k}>{{ tree(v) }}]<]minimax[>[</{k}>",
                                 f'{SPACE}<invoke name="{{{{ f.name }}}}">', f"{SPACE}</invoke>", "",
                                 begin=f"{SPACE}<tool_call>\n", end=f"\n{SPACE}</tool_call>"),
    "hy": tags("<arg_key:opensource>{k}</arg_key:opensource>\n<arg_value:opensource>{v}</arg_value:opensource>",
               "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n", "</tool_call:opensource>",
               begin="<tool_calls:opensource>\n", end="\n</tool_calls:opensource>"),
    "glm": tags("<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "<tool_call>{{ f.name }}\n", "</tool_call>"),
    "glm, close together": tags("<arg_key>{k}</arg_key><arg_value>{v}</arg_value>", "<tool_call>{{ f.name }}",
                                "</tool_call>", "", ""),
    "muse": tags('<atem:parameter name="{k}">{v}</atem:parameter>',
                 "{{ ' to=' + f.name + '<|message|>' }}<atem:function_calls>\n"
                 '<atem:invoke name="{{ f.name }}">\n',
                 "</atem:invoke>\n</atem:function_calls>", between="<|eom|><|start|>assistant"),
}  # fmt: skip
NAMED = {
    "name and id": template("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}"),
    "name first": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", prose="No [CALL_ID] here."),
    "list": template(JSON, "[TOOL_CALLS] [", ", ", "]", "Not f[ARGS]."),
    "sections": template("<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
                         "{{ f.arguments | tojson }}<|tool_call:end|>", "<|tool_calls|>"),
    "fenced": template("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
                       "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
                       "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "not fenced": template("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
                           "<｜tool▁call▁end｜>",
                           begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", prose="Write no ```json."),
    "json in a tag": template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "recipients": template("{{ f.name }}\n{{ f.arguments | tojson }}", ">>>", ">>>")
    .replace("{{ message.content }}", "{{ '>>>all\\n' + message.content }}")
    .replace("assistant\\n' }}{% endif %}", "assistant\\n>>>' }}{% endif %}"),
}  # fmt: skip
