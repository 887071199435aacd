"""Tool calls and thinking: read from an answer while it streams, and forced by a grammar if the request says so.

`chat.py` turns a conversation into a prompt, parameters and a reader of the answer. `formats.py` has the table of all
formats, `FORMATS`, and finds the one that a chat template uses. `thinking.py` finds the marks of thinking,
`thinking_switches.py` turns it on and off, and `thinking_splitter.py` reads it; `answer_grammar.py` joins the grammars
of thinking, calls and a structured answer, and `checks.py` checks the tools of a request.

To add a format of tool calls: a subclass of `ToolFormat` (`tool_format.py`) in a file of its own, an instance of it in
`FORMATS`, and its name among the choices of `tool_parser` in `kvern/config.py`. Its `parser` reads calls as they stream
(mostly a `BufferedParser`, `buffered.py`), its `calls` is their grammar, and `matches` recognises templates that render
no calls. A template that does render them takes the first of `FORMATS` whose parser reads what it renders, so special
formats stand before general ones. Most new formats need no class: calls that are JSON objects are learnt from the
template (`json_calls.py`), and calls in tags are a row of `xml_functions.py` with its name in `XML_FORMATS` there: with
a tag around each parameter, or with `in_json=True` around one JSON object, as `FUNCTIONARY`.

Imports text, request and structured; knows nothing of engines. Begin with `tool_format.py`, then `mistral.py`.
"""
