"""Llama 3: the answer is {"name": "f", "parameters": {...}} and nothing else; several are separated by semicolons."""

import json
from collections.abc import Container

from kvern.tools.buffered import BLANKS, BufferedParser
from kvern.tools.json_call import JsonCall
from kvern.tools.tool_format import GrammarPieces, ToolParser, ToolSchemas

TAG = "<|python_tag|>"


class Llama:
    """The format; see ToolFormat."""

    name = "llama"
    markers = (TAG,)
    stops = ()
    trigger = None
    opening = "{"

    def matches(self, template: str) -> bool:
        """What the template tells the model to write."""
        return '{"name": function name, "parameters":' in template

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """JSON can also be an answer: only calls of the request's tools count."""
        return LlamaParser(tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """One after the other."""
        heads = {name: write.literal(f'{{"name": {json.dumps(name)}, "parameters": ') for name in tools}
        one = " | ".join(f"{heads[name]} {write.json(schema)}" for name, schema in tools.items())
        call = f'({one}) "}}"'
        return f'{call} ("; " {call})*' if several else call


class LlamaParser(BufferedParser):
    """Decides at the beginning of the answer."""

    def __init__(self, names: Container[str]) -> None:
        super().__init__()
        self._names = names
        self._before = ""
        self.state = self._beginning_state

    def content_state(self) -> bool:
        """All that is left."""
        self.content(self.take(len(self.buffer)))
        return False

    def _beginning_state(self) -> bool:
        tagged = self.expect(TAG)
        if tagged:
            self._before = self.take(self.buffer.index(TAG) + len(TAG))
        if tagged is not None:
            self.state = self._open_state
        return tagged is not None

    def _open_state(self) -> bool:
        """Before what may be a call; what came before it is `_before`."""
        blanks = len(self.buffer) - len(self.buffer.lstrip(BLANKS))
        if blanks == len(self.buffer) and not self.ended:
            return False
        self._before += self.take(blanks)
        self._call = JsonCall(self, self._names)
        self.state = self._call_state
        return True

    def _call_state(self) -> bool:
        result = self._call.read()
        if result is None and not self.ended:
            return False
        if not self._call.begun:
            self.content(self._before)
            self.state = self.content_state
        elif result:
            self._before = ""
            self.state = self._next_state
        else:
            if result is None:
                self._call.end()
            self.state = self.content_state
        return True

    def _next_state(self) -> bool:
        found = self.expect(";")
        if found is None:
            return False
        if found:
            self._before = self.take(self.buffer.index(";") + 1)
        self.state = self._open_state
        return True
