"""Tool calls in XML, as Qwen, GLM and MiniMax models write them."""

PLAN = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
        "list": {"type": "array"},
        "mark": {"type": "string", "format": "date"},
        "either": {"type": ["string", "number"]},
    },
    "required": ["text"],
    "$defs": {"word": {"type": "string"}},
}


def qwen_call(*pairs: tuple[str, str], end: str = "</function>\n</tool_call>") -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=plan>\n{parameters}{end}"


def glm_call(*pairs: tuple[str, str], end: str = "</tool_call>", line: str = "") -> str:
    parameters = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in pairs)
    return f"<tool_call>plan{line}{parameters}{end}"


def minimax_call(*pairs: tuple[str, str], end: str = "</invoke>\n</minimax:tool_call>") -> str:
    parameters = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<minimax:tool_call>\n<invoke name="plan">\n{parameters}{end}'
