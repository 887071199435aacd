"""One grammar for an answer: thinking up to a budget, then calls of tools, a structured answer, or free text.

    start: think? (calls | answer)

Schemas remain separate grammars, which this grammar references.
"""

import re
from collections.abc import Iterable

import msgspec

from kvern.errors import InvalidParameter, InvalidRequest
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import Grammars
from kvern.text.tokenizer import Tokenizer
from kvern.tools.definitions import ToolUse
from kvern.tools.harmony import Harmony, free_messages
from kvern.tools.recipients import MARK, Recipients
from kvern.tools.thinking_splitter import Thought
from kvern.tools.tool_format import GrammarPieces, ToolFormat

LONGEST_CONTEXT = 1 << 20
"""No model thinks longer, so that no budget beyond needs counting."""
TEXT = "TEXT: /(?s:.*)/"
GAP = r"GAP: /[\x20\n\r\t]{1,4}/"


class GrammarWriter:
    """Writes grammars for one model's tokens."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars

    def answer(
        self, form: ToolFormat | None, use: ToolUse, structured: StructuredOutput | None, thought: Thought | None
    ) -> StructuredOutput | None:
        """The form of the whole answer; None: it is free.

        Raises InvalidRequest or InvalidParameter if the demands exclude each other.
        """
        parts: dict[str, StructuredOutput] = {}
        rules: list[str] = []
        wanted = self._wanted(form, use, structured, thought, parts, rules)
        thinks = thought is not None and thought.beginning != "over"
        if not thinks or (wanted is None and (thought is None or thought.budget is None)):
            if wanted is None or wanted == "@answer":
                return structured
            rules.insert(0, f"start: {wanted}")
        else:
            assert thought is not None
            rules.insert(0, self._start(thought, wanted))
            rules += self._thinking(thought)
        return StructuredOutput(grammar="\n".join(rules), parts=parts)

    def _wanted(
        self,
        form: ToolFormat | None,
        use: ToolUse,
        structured: StructuredOutput | None,
        thought: Thought | None,
        parts: dict[str, StructuredOutput],
        rules: list[str],
    ) -> str | None:
        """The expression for the text after the thinking; None: it is free."""
        in_turns = thought is not None and thought.form.in_turns
        if use.choice == "required":
            structured = None  # the call goes before: its arguments have a form of their own
        if structured is not None:
            if structured.parts:
                raise InvalidParameter("structured has parts: they cannot be combined with tools or thinking")
            parts["answer"] = structured
            if use.choice != "auto":
                return self._answer(form, thought, "@answer")
        if (
            form is None
            or use.choice == "none"
            or not (structured is not None or use.choice == "required" or use.constrains_auto)
        ):
            return None
        calls = self._calls(form, use, parts)
        trigger = self._literal(form, form.trigger or "")
        if thought is not None and thought.form.in_turns and thought.beginning == "over":
            trigger = self._literal(form, thought.form.end + thought.form.between)
        if use.choice == "required":
            return f"{self._header(form, use)} {trigger} {calls}"
        if structured is not None:
            if form.trigger is None and not in_turns and not isinstance(form, Recipients):
                raise InvalidRequest(
                    f"tools and structured output (response_format) are both set, and calls in this model's format "
                    f"({form.name}) cannot be told from an answer: set tool_choice to none or required, or give one"
                )
            return f"({self._answer(form, thought, '@answer')} | {self._header(form, use)} {trigger} {calls})"
        rules.append(TEXT)
        if in_turns:
            return f"({self._answer(form, thought, 'TEXT')} | {trigger} {calls})"
        if isinstance(form, Recipients):
            rules.append(f"trigger[lazy]: TEXT {self._literal(form, MARK)}")
            return f"({self._answer(form, thought, f'(trigger {calls} | TEXT)')} | {calls})"
        if form.trigger is None:
            rules.append(rf"OTHER: /\s*[^\s\{form.opening}](?s:.*)/")
            return f"({calls} | OTHER | /\\s*/)"
        rules.append(f"trigger{'[lazy]' if trigger.startswith(chr(34)) else ''}: TEXT {trigger}")
        return f"(trigger {calls} | TEXT)"

    def _answer(self, form: ToolFormat | None, thought: Thought | None, said: str) -> str:
        """The expression for an answer that matches `said`, with its message header if it is a separate message."""
        if isinstance(form, Recipients):
            said = form.answer(said, self._pieces(form, {}))
        if thought is None or thought.beginning == "over":
            return said
        return f"{self.literal(thought.form.answer, thought.form.markers)} {said}".lstrip()

    def _calls(self, form: ToolFormat, use: ToolUse, parts: dict[str, StructuredOutput]) -> str:
        tools = {tool.name: tool.parameters for tool in use.callable_tools}
        try:
            return form.calls(tools, use.parallel and use.named is None, self._pieces(form, parts))
        except RecursionError as error:
            raise InvalidRequest("tools: the schema of one is nested too deeply") from error

    def _header(self, form: ToolFormat, use: ToolUse) -> str:
        """The expression for the header of a call that is a separate message; it is not part of the trigger."""
        tools = {tool.name: tool.parameters for tool in use.callable_tools}
        return form.headed(tools, self._pieces(form, {}))

    def _pieces(self, form: ToolFormat, parts: dict[str, StructuredOutput]) -> GrammarPieces:
        return GrammarPieces(lambda text: self._literal(form, text), parts)

    def _literal(self, form: ToolFormat, text: str) -> str:
        return self.literal(text, form.markers)

    def literal(self, text: str, markers: Iterable[str]) -> str:
        """The expression for a text, in which markers that are single tokens become tokens."""
        special = self._grammars.library.special_token_ids
        ids = {marker: self._tokenizer.token_to_id(marker) for marker in markers}
        tokens = {marker: token for marker, token in ids.items() if token is not None and token in special}
        pieces = re.split("|".join(f"({re.escape(marker)})" for marker in tokens), text) if tokens else [text]
        written = (
            f"<[{tokens[piece]}]>" if piece in tokens else msgspec.json.encode(piece).decode()
            for piece in pieces
            if piece
        )
        return " ".join(written)

    def _start(self, thought: Thought, wanted: str | None) -> str:
        begin = self.literal(thought.form.begin, thought.form.markers)
        inside = thought.beginning == "inside"
        if thought.form.in_turns:
            between = self.literal(thought.form.between, thought.form.markers)
            start = f"start: {f'think {between}' if inside else f'({begin} think {between})?'}"
            return f"{start} {wanted or free_messages(lambda text: self.literal(text, Harmony.markers))}"
        if wanted is not None:
            return f"start: {'think GAP?' if inside else f'({begin} think GAP?)?'} {wanted}\n{GAP}"
        free, token = self._tokens_but(), self._tokenizer.token_to_id(thought.form.begin)
        if inside:
            return f"start: think {free}*"
        first = free if token is None else self._tokens_but(token)
        return f"start: ({begin} think)? ({first} {free}*)?"

    def _thinking(self, thought: Thought) -> list[str]:
        end = self._tokenizer.token_to_id(thought.form.end)
        if end is None:
            if thought.budget is not None:
                raise InvalidRequest(
                    f"thinking has a budget, and this model's {thought.form.end} is several tokens, which cannot be "
                    "forced: leave the budget out"
                )
            return [f"think[suffix={msgspec.json.encode(thought.form.end).decode()}]: /(?s:.*)/"]
        if thought.budget == 0:
            return [f"think: <[{end}]>"]
        count = "*" if thought.budget is None or thought.budget > LONGEST_CONTEXT else f"{{0,{thought.budget}}}"
        return [f"think: {self._tokens_but(end)}{count} <[{end}]>"]

    def _tokens_but(self, *others: int) -> str:
        """The expression for any token except special tokens (including end-of-sequence) and `others`."""
        unwanted = sorted({*self._grammars.library.special_token_ids, *self._grammars.library.eos_token_ids, *others})
        ranges: list[list[int]] = []
        for token in unwanted:
            if ranges and token == ranges[-1][1] + 1:
                ranges[-1][1] = token
            else:
                ranges.append([token, token])
        return f"<[^{','.join(f'{first}-{last}' for first, last in ranges)}]>"
