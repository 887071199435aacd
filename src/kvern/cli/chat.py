"""``kvern chat``: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from kvern.api.fields import sampling_params
from kvern.cli.options import SamplingOptions
from kvern.cli.run import load
from kvern.config import EngineConfig
from kvern.errors import InvalidParameter, KvernError
from kvern.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvern.llm import LLM

HELP = """\
/help              this list
/reset             forget the conversation
/system TEXT       set the system message and forget the conversation; without TEXT: none
/adapter NAME      answer through an adapter; without NAME: through none
/set NAME VALUE    set a sampling parameter, as in /set temperature 0.7; without NAME: show all
/exit              leave, as Ctrl-D does
Ctrl-C stops an answer."""
COMMANDS = ("/help", "/reset", "/system", "/adapter", "/set", "/exit")
# A model's output must not be able to move the cursor or to set colours.
CONTROL_CHARACTERS = {code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


@dataclass(frozen=True)
class ChatCommand:
    """Talk to a model. /help lists what can be typed besides messages; Ctrl-C stops an answer, Ctrl-D leaves."""

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """Folder, Hugging Face id, or the name of an embedded model; the same as --model."""
    system: str | None = None
    """System message of the conversation."""
    config: Path | None = None
    """TOML or YAML file with options, named as the flags are: max_tokens = 64."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Talk until the input ends and return the exit code. Raises KvernError if the model cannot be loaded."""
        import dataclasses

        params = self.sampling.params()
        engine = dataclasses.replace(self.engine, model=self.name) if self.name is not None else self.engine
        llm = load(engine)
        llm.check_generates()
        conversation = Conversation(llm, params, self.system, sys.stdout.write)
        for line in terminal_lines() if sys.stdin.isatty() and sys.stdout.isatty() else sys.stdin:
            if not conversation.take(line.strip()):
                break
        return 0


def terminal_lines() -> Iterator[str]:
    """Yields typed lines, with editing and history, until Ctrl-D. Ctrl-C clears the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = [*COMMANDS, *(f"/set {name}" for name in SamplingParams.__struct_fields__)]
    session: PromptSession[str] = PromptSession(
        completer=WordCompleter(words, sentence=True), complete_while_typing=False
    )
    sys.stdout.write("kvern chat: /help lists the commands, Ctrl-D leaves\n")
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


class Conversation:
    """A conversation that typed lines change. ``write`` shows text to the user."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, write: Callable[[str], Any]) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._adapter: str | None = None
        self._write = write
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, line: str) -> bool:
        """Handles one line; returns False to leave."""
        if line.startswith("/"):
            return self._command(line)
        if line:
            self._answer(line)
        return True

    def _command(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._show(HELP)
            case "/reset":
                self.reset()
                self._show("the conversation is forgotten")
            case "/system":
                self._system = argument.strip() or None
                self.reset()
                self._show(
                    "the conversation begins again with this system message" if argument else "no system message"
                )
            case "/adapter":
                self._choose(argument.strip() or None)
            case "/set":
                self._set(argument.strip())
            case _:
                self._show(f"unknown command {name}: /help lists the commands")
        return True

    def _choose(self, adapter: str | None) -> None:
        known = self._llm.adapters
        if adapter is not None and adapter not in known:
            self._show(f"error: there is no adapter {adapter}: loaded are {', '.join(known) or 'none'}")
            return
        self._adapter = adapter
        self._show(f"answers come through {adapter or 'no adapter'}")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            values = msgspec.structs.asdict(self._params)
            self._show("\n".join(f"{key} = {value}" for key, value in values.items()))
            return
        try:
            self._params = with_parameter(self._params, name, text.strip())
            self._show(f"{name} = {getattr(self._params, name)}")
        except InvalidParameter as error:
            self._show(f"error: {error}")

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        written, tokens = "", 0
        started = time.perf_counter()
        try:
            for output in self._llm.stream_chat(self.messages, self._params, adapter=self._adapter):
                answer = output.outputs[0]
                self._write(answer.text[len(written) :].translate(CONTROL_CHARACTERS))
                sys.stdout.flush()
                written, tokens = answer.text, len(answer.token_ids)
                output.check()
        except KeyboardInterrupt:
            self._write(" [stopped]")
        except KvernError as error:
            self.messages.pop()
            self._show(f"error: {error}")
            return
        seconds = time.perf_counter() - started
        self.messages.append({"role": "assistant", "content": written})
        self._show(f"\n[{tokens} tokens, {tokens / seconds:.1f} tokens/s]")

    def _show(self, text: str) -> None:
        self._write(text + "\n")
        sys.stdout.flush()


def with_parameter(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """Returns the parameters with one changed; ``text`` is read as JSON if possible, else as plain text.

    Raises:
        InvalidParameter: there is no such parameter, or the value does not fit it.
    """
    if name not in SamplingParams.__struct_fields__:
        raise InvalidParameter(f"no sampling parameter {name!r}: /set lists them")
    if name == "n":
        raise InvalidParameter("n cannot be set: a conversation has one answer at a time")
    if text.lower() in ("", "none", "null"):
        default = msgspec.structs.asdict(SamplingParams())[name]
        return params.replace(**{name: default})
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    return sampling_params(params, {name: value})
