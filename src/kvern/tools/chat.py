"""A conversation on its way: to a prompt with parameters, and from the answer's text to its pieces.

What reads thinking and calls is imported for the first model that thinks, or the first request with tools.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvern.errors import InvalidParameter, InvalidRequest, shown
from kvern.request.pieces import Content, Message, Piece
from kvern.request.request import PromptInput
from kvern.request.sampling_params import SamplingParams, StructuredOutput
from kvern.structured.grammar import Grammars
from kvern.text.chat_template import check_messages
from kvern.text.content import readable
from kvern.text.tokenizer import Tokenizer
from kvern.tools.definitions import NO_TOOLS, ToolUse
from kvern.tools.encoding import ConversationEncoder, Encoding
from kvern.tools.thinking import HARMONY, ThinkingFormat, thinking_of

if TYPE_CHECKING:
    from kvern.images.conversation import Pictures
    from kvern.images.prompt import ImageReader
    from kvern.tools.answer_grammar import GrammarWriter
    from kvern.tools.thinking_splitter import Beginning, Thought, ThoughtTokens
    from kvern.tools.tool_format import ToolFormat, ToolParser, ToolSchemas

logger = logging.getLogger("kvern")
CALLED = ({"role": "user"}, {"role": "assistant", "content": "-", "tool_calls": [{}]}, {"role": "tool"})
"""A conversation with all that tools bring along."""
ADDRESSED, RECIPIENT_MARK = "functionary_v32", ">>>"
"""The format in which each message of an answer begins with its recipient, and the text before it in a template."""
PROMPT_END = 32
"""The number of tokens at the end of a prompt that are searched for open thinking."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options for the prompt of a conversation.

    thinking_budget         most tokens of thinking; None: no limit
    variables               further variables of the chat template
    add_generation_prompt   the prompt ends with the header of a new answer
    continue_final_message  the answer continues the last message
    encoding                options of tokenization; None: the template writes the special tokens
    namespace               conversations of one namespace share cached token ids
    """

    thinking_budget: int | None = None
    variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    encoding: Encoding | None = None
    namespace: bytes = b""


DEFAULT_PROMPT = PromptOptions()


class PlainParser:
    """Reads an answer without calls."""

    def feed(self, text: str) -> list[Piece]:
        """All of it is content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


class AnswerReader:
    """Takes one answer apart while it grows: `read` its text so far, again and again. `message` is the sum."""

    def __init__(self, parser: ToolParser, thought: Thought | None, exact: bool = False) -> None:
        """`exact`: see ThinkingSplitter."""
        self.message = Message()
        self._parser = parser
        self._thinking = None if thought is None else thought.splitter(parser, exact)
        self._characters = 0
        self._ended = False

    def read(self, text: str, ended: bool) -> list[Piece]:
        """The new pieces; `text` is the whole answer so far, and `ended` means that it is complete."""
        if self._ended:
            return []
        new = text[self._characters :]
        self._characters = len(text)
        self._ended = ended
        if self._thinking is not None:
            pieces = self._thinking.feed(new, ended)
        else:
            pieces = self._parser.feed(new) + (self._parser.finish() if ended else [])
        self.message.add(pieces)
        return pieces


@dataclass(frozen=True)
class ChatRequest:
    """The prompt and parameters for the engine, and the format of the answers.

    exact         the answer must match a grammar
    lacks         wishes of the request that the chat template cannot fulfil
    image_tokens  tokens of the prompt that have a row of an image
    """

    prompt: list[int] | PromptInput
    params: SamplingParams
    tokenizer: Tokenizer
    form: ToolFormat | None = None
    tools: ToolSchemas = field(default_factory=dict)
    thought: Thought | None = None
    exact: bool = False
    lacks: tuple[str, ...] = ()
    image_tokens: int = 0

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        parser = PlainParser() if self.form is None else self.form.parser(self.tools)
        if self.thought is None or not self.thought.form.in_turns:
            return AnswerReader(parser, self.thought, self.exact)
        opened = {"inside": self.thought.form.begin, "over": self.thought.form.answer}
        parser.feed(opened.get(self.thought.beginning, ""))
        return AnswerReader(parser, None)

    def message(self, text: str) -> Message:
        """The message of a whole answer."""
        reader = self.reader()
        reader.read(text, True)
        return reader.message

    def thought_tokens(self) -> ThoughtTokens | None:
        """A counter of one answer's thinking tokens; None if there is no thinking to count."""
        return None if self.thought is None else self.thought.counter(self.tokenizer.id_to_bytes, self.exact)

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of thinking tokens of a whole answer."""
        counter = self.thought_tokens()
        return 0 if counter is None else counter.count(token_ids)


class Chat:
    """Tools and thinking of one model's chat template.

    `tool_parser` and `reasoning_parser`: "auto" detects the format, "none" leaves the text as it is, a name selects
    one. `refusal`: the reason why the model cannot chat; None: it can. `images` gives their reader, or is the reason
    why the model reads none; None: it is a model for text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammars: Grammars,
        tool_parser: str,
        reasoning_parser: str,
        max_model_len: int,
        refusal: str | None = None,
        images: Callable[[], ImageReader] | str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._encoder = ConversationEncoder(tokenizer)
        self._max_model_len, self._refusal = max_model_len, refusal
        self._grammars = grammars
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        use: ToolUse = NO_TOOLS,
        options: PromptOptions = DEFAULT_PROMPT,
    ) -> ChatRequest:
        """The prompt, and sampling parameters that enforce the requested form of the answer.

        Raises InvalidRequest or InvalidParameter.
        """
        if self._refusal is not None:
            raise InvalidRequest(self._refusal)
        pictures = self._pictures(messages)
        messages = self._readable(messages) if pictures is None else pictures.messages
        definitions = list(use.definitions) or None
        text, said = self.written(messages, definitions, options)
        if options.encoding is not None:
            prompt = options.encoding.encode(self._tokenizer, text, self._max_model_len, params.max_tokens)
        else:  # the template writes the special tokens itself
            encode = functools.partial(
                self._encoder.encode,
                tools=definitions is not None,
                namespace=options.namespace,
                most_tokens=self._max_model_len,
            )
            prompt = encode(text) if pictures is None else pictures.encoded(text, encode)
        thought = self._thought(prompt, said, options.thinking_budget, definitions is not None)
        thought, lacks = self._held_to(thought, options.variables or {}, definitions is not None)
        lacks += tuple(self._tokenizer.lost_in_template(messages, definitions is not None))
        in_turns = thought is not None and thought.form.in_turns
        addressed = options.add_generation_prompt and self._addresses(definitions is not None)
        form = self._format(use) if use.choice != "none" or in_turns or addressed else None
        whole = prompt if pictures is None else pictures.prompt(prompt)
        seen = 0 if pictures is None else pictures.tokens
        if form is None and thought is None:
            return ChatRequest(whole, params, self._tokenizer, lacks=lacks, image_tokens=seen)
        structured = params.structured
        if form is not None or structured is not None or (thought is not None and thought.budget is not None):
            structured = self._writer.answer(form, use, params.structured, thought)
        if structured is not params.structured and structured is not None:
            self._check(structured, use)
        exact = params.structured is not None and use.choice != "required"
        params = params.replace(
            structured=structured,
            visible_token_ids=self._visible(params, form, thought) or None,
            stop_token_ids=self._stops(params, form) or None,
            stop_scope=thought.stop_scope(exact) if thought and params.stop_strings else None,
        )
        tools = {tool.name: tool.parameters for tool in use.tools}
        return ChatRequest(whole, params, self._tokenizer, form, tools, thought, exact, lacks, seen)

    def token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        definitions: Sequence[Mapping[str, Any]] | None,
        options: PromptOptions,
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """The prompt as token ids, those of images included, for one who counts them. Raises InvalidRequest."""
        pictures = self._pictures(messages)
        text, _ = self.written(messages if pictures is None else pictures.messages, definitions, options)
        return encode(text) if pictures is None else pictures.prompt(pictures.encoded(text, encode)).token_ids

    def _pictures(self, messages: Sequence[Mapping[str, Any]]) -> Pictures | None:
        """The images of a conversation; None: there are none, or the model reads none. Raises InvalidRequest."""
        if self._images is None or isinstance(self._images, str):
            return None
        from kvern.images.conversation import Pictures, concerns_images

        reader = self._images()
        if not concerns_images(messages, reader.marks):
            return None
        return Pictures(messages, reader, in_text=not self._writes_images)

    @functools.cached_property
    def _writes_images(self) -> bool:
        """True if the chat template writes the mark of an image that is a part of a message."""
        assert callable(self._images)
        probe = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
        try:
            return self._images().mark in self._tokenizer.chat_prompt([probe])
        except InvalidRequest:
            return False

    def _readable(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages as the template takes them. Raises InvalidRequest."""
        try:
            return readable(messages)
        except InvalidRequest as error:
            if isinstance(self._images, str):
                raise InvalidRequest(f"{error}: {self._images}") from None
            raise

    def written(
        self,
        messages: Sequence[Mapping[str, Any]],
        definitions: Sequence[Mapping[str, Any]] | None,
        options: PromptOptions,
    ) -> tuple[str, str]:
        """The prompt as text, and the part of the answer's message that it already contains. Raises InvalidRequest."""
        messages = readable(messages)
        thinking = self._thinking(definitions is not None)
        if thinking is not None and thinking.in_turns:
            from kvern.tools.harmony import joined_thinking

            messages = joined_thinking(messages)
        variables = self._switched(messages, definitions, options.variables or {}, options.thinking_budget)
        if not options.continue_final_message:
            text = self._tokenizer.chat_prompt(messages, definitions, options.add_generation_prompt, **variables)
            return text, ""
        if options.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both set: a new message begins, or the last "
                "one goes on; set one of them"
            )
        marked, said, mark = _marked(messages)
        text = self._tokenizer.chat_prompt(marked, definitions, False, **variables)
        return _up_to(text, mark), said

    def _switched(
        self,
        messages: Sequence[Mapping[str, Any]],
        definitions: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        budget: int | None,
    ) -> dict[str, Any]:
        """`variables` with whether and how hard to think under the names that the template reads."""
        if not variables and budget is None:
            return {}
        from kvern.tools.thinking_switches import switches_of

        def takes(names: Mapping[str, Any]) -> bool:
            try:
                self._tokenizer.chat_prompt(messages, definitions, **names)
            except InvalidRequest:
                return False
            return True

        switches = switches_of(self._tokenizer.chat_template.source(definitions is not None))
        return switches.variables(variables, budget, takes)

    def _held_to(
        self, thought: Thought | None, variables: Mapping[str, Any], tools: bool
    ) -> tuple[Thought | None, tuple[str, ...]]:
        """Ends unwanted thinking at once if the template has no switch; also returns wishes it cannot fulfil."""
        if not variables:
            return thought, ()
        from kvern.tools.thinking_switches import EFFORT, PLAIN, enabled_of, switches_of

        switches, enabled = switches_of(self._tokenizer.chat_template.source(tools)), enabled_of(variables)
        lacks = [EFFORT] if variables.get(EFFORT, "none") != "none" and not switches.has_efforts else []
        if enabled is not None and thought is None:
            lacks += [PLAIN[0]] if enabled else []
        elif enabled is False and thought is not None and thought.beginning != "over" and not switches.turns_off:
            if thought.form.in_turns or not self.can_bound_thinking(tools):
                lacks.append(PLAIN[0])
            else:
                thought = replace(thought, budget=0)
        return thought, tuple(lacks)

    def warn_of_template(self) -> None:
        """Logs what the template omits from conversations with tools, if it supports tools at all."""
        if "tool" in self._tokenizer.chat_template.source(tools=True):
            lost = self._tokenizer.lost_in_template(CALLED, True)
            if lost:
                logger.warning(
                    "the model's chat template leaves %s out of prompts silently: the model does not see them; give "
                    "the folder another chat_template.jinja, or send none",
                    " and ".join(lost),
                )

    def can_bound_thinking(self, tools: bool) -> bool:
        """True if the template has marks around thinking and the end mark can be forced."""
        form = self._thinking(tools)
        return form is not None and self._tokenizer.token_to_id(form.end) is not None

    @functools.cached_property
    def _writer(self) -> GrammarWriter:
        from kvern.tools.answer_grammar import GrammarWriter

        return GrammarWriter(self._tokenizer, self._grammars)

    def _thinking(self, tools: bool) -> ThinkingFormat | None:
        found = thinking_of(self._tokenizer.chat_template.source(tools), self._reasoning_parser)
        return self._formats(tools)[1] if found is HARMONY else found

    def _addresses(self, tools: bool) -> bool:
        """True if each message of an answer begins with its recipient, also without calls."""
        if self._tool_parser == ADDRESSED or RECIPIENT_MARK in self._tokenizer.chat_template.source(tools):
            form, _ = self._formats(tools)
            return form is not None and form.name == ADDRESSED
        return False

    def _formats(self, tools: bool) -> tuple[ToolFormat | None, ThinkingFormat | None]:
        """The formats of calls and thinking. They are imported for the first conversation with either."""
        from kvern.tools.formats import formats_of

        return formats_of(self._tokenizer.chat_template.source(tools), self._tool_parser, self._reasoning_parser)

    def _format(self, use: ToolUse) -> ToolFormat | None:
        form, _ = self._formats(tools=True)
        if form is None and (self._tool_parser == "auto" or use.choice == "required"):
            raise InvalidRequest(
                "tools are given, and the model's chat template writes calls in no form that is known here: name one "
                "with --tool-parser, or none to get calls as the model writes them, without tool_choice"
            )
        return form

    def _thought(self, prompt: Sequence[int], said: str, budget: int | None, tools: bool) -> Thought | None:
        """The thinking of the answer; `said` is the part of its message that the prompt contains."""
        form = self._thinking(tools)
        if budget is not None:
            if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
                raise InvalidParameter(f"thinking_budget is {shown(budget)}: it must be a number of tokens, 0 or more")
            if form is None:
                raise InvalidRequest(
                    "thinking has a budget, and the model's chat template knows no thinking: leave it out, or name the "
                    "marks with --reasoning-parser"
                )
        if form is None:
            return None
        from kvern.tools.thinking_splitter import Thought

        return Thought(form, self._beginning(prompt, said, form), budget)

    def _beginning(self, prompt: Sequence[int], said: str, form: ThinkingFormat) -> Beginning:
        if said.strip():
            return "inside" if said.rfind(form.begin) > said.rfind(form.end) else "over"
        from kvern.tools.thinking_splitter import beginning_of

        return beginning_of(self._tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False), form)

    def _check(self, structured: StructuredOutput, use: ToolUse) -> None:
        """Compiles the grammar; an error names the tool whose schema is at fault."""
        try:
            self._grammars.compile(structured)
        except InvalidParameter:
            for tool in use.callable_tools:
                try:
                    self._grammars.compile(StructuredOutput(json=tool.parameters))
                except InvalidParameter as error:
                    reason = str(error).removeprefix("structured: ")
                    raise InvalidRequest(f"{tool.place}.function.parameters: {reason}") from error
            raise

    def _visible(self, params: SamplingParams, form: ToolFormat | None, thought: Thought | None) -> list[int]:
        markers = (*(() if form is None else form.markers), *(() if thought is None else thought.form.markers))
        return [*(params.visible_token_ids or ()), *self._tokens(markers)]

    def _stops(self, params: SamplingParams, form: ToolFormat | None) -> list[int]:
        return [*(params.stop_token_ids or ()), *self._tokens(() if form is None else form.stops)]

    def _tokens(self, markers: Sequence[str]) -> list[int]:
        found = (self._tokenizer.token_to_id(marker) for marker in markers)
        return [token for token in found if token is not None]


def _marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str, str]:
    """The conversation with a mark at the end of its last message, that message's text, and the mark.

    Raises InvalidRequest.
    """
    check_messages(messages)
    content = messages[-1].get("content")
    mark = f"{uuid.uuid4().hex} "  # a template that trims takes the blank away
    if isinstance(content, str):
        return [*messages[:-1], {**messages[-1], "content": content + mark}], content, mark
    parts = list(content) if isinstance(content, list) else []
    for number in reversed(range(len(parts))):
        said = parts[number].get("text") if isinstance(parts[number], Mapping) else None
        if isinstance(said, str):
            parts[number] = {**parts[number], "text": said + mark}
            return [*messages[:-1], {**messages[-1], "content": parts}], said, mark
    raise InvalidRequest(
        f"continue_final_message is set, and the last message has no text to go on with: its content is "
        f"{shown(content)}"
    )


def _up_to(text: str, mark: str) -> str:
    """Cuts the prompt after the last message, with the same result as transformers.

    If the template trims messages, blanks at the end of the message are cut too.
    """
    place = text.rfind(mark.rstrip())
    if place < 0:
        raise InvalidRequest(
            "continue_final_message is set, and the model's chat template does not write the last message into the "
            "prompt: leave it out"
        )
    return text[:place] if text.startswith(mark, place) else text[:place].rstrip()
