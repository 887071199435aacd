"""Tool calls and reasoning: what models write around their answers, read as it arrives and demanded where it must be.

`chat.py` makes a conversation a prompt, parameters and a reader of the answer. `formats.py` finds the format that a
chat template speaks; each format is a file (`mistral.py`, `gemma.py`, ...) with what `tool_format.py` asks for, mostly
a `BufferedParser` (`buffered.py`). `thinking.py` reads the thinking, `grammar.py` makes one grammar of thinking,
calls and a structured answer, and `definitions.py` checks the tools of a request.

To add a format of tool calls: a file with a `ToolFormat`, its entry in `formats.py`, and its name among the choices
of `tool_parser` in `kvern/config.py`. Formats in JSON share `json_call.py`, formats between XML tags `xml_call.py`.
Imports text, request and structured; knows nothing of engines. Begin with `tool_format.py`, then `mistral.py`.
"""
