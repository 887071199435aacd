"""``kvern chat``: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import base64
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from kvern.api.fields import sampling_params
from kvern.cli.options import SamplingOptions
from kvern.cli.output import say
from kvern.cli.run import check_files, load
from kvern.cli.terminal import Waiting, Wrapped, dim
from kvern.config import DEFAULT_MODEL, EngineConfig
from kvern.errors import INTERRUPTED, InvalidParameter, KvernError, ModelNotFound, PromptTooLong
from kvern.io.files import read_whole, reason
from kvern.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from subprocess import Popen

    from kvern.llm import LLM

HELP = """\
/help, /?          this list
/reset, /clear     forget the conversation
/system TEXT       set the system message and forget the conversation; without TEXT: none
/adapter NAME      answer through an adapter; without NAME: through none
/set NAME VALUE    set a sampling parameter, as in /set temperature 0.7; without NAME: show all
/image FILE        show the model a picture with the next message
/show              show the model, its context, and how much of it the conversation takes
/save FILE         write the conversation to a JSON file
/load FILE         go on with a conversation that was saved
/bye, /exit        leave, as Ctrl-D does
A message of several lines stands between lines of \"\"\". Ctrl-C stops an answer."""
COMMANDS = ("/help", "/reset", "/clear", "/system", "/adapter", "/set", "/image", "/show", "/save", "/load", "/bye")
COMPILING = "compiling kernels for this CPU, only once (Ctrl-C: go on far slower)"
QUOTES = '"""'
SILENT_SECONDS = 1.0
MOST_SAVED_BYTES = 64 << 20
# A model's output must not be able to move the cursor or to set colours.
CONTROL_CHARACTERS = {code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


@dataclass(frozen=True)
class ChatCommand:
    """Talk to a model. /help lists what can be typed besides messages; Ctrl-C stops an answer, Ctrl-D leaves.

    With a PROMPT, the answer alone is printed; what is piped in follows the prompt: kvern chat MODEL "Sum up:" < FILE.
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """Folder, GGUF file, Hugging Face id, or the name of an embedded model; the same as --model."""
    prompt: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="PROMPT")] = None
    """A message to answer. None: messages are typed, or each line of stdin is one."""
    system: str | None = None
    """System message of the conversation."""
    config: Path | None = None
    """TOML or YAML file with options, named as the flags are: max_tokens = 64."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Talk until the input ends and return the exit code: 1 if a PROMPT is not answered, 130 if Ctrl-C stops that.

        Raises KvernError if the model cannot be loaded.
        """
        import dataclasses

        params = self.sampling.params()
        engine = dataclasses.replace(self.engine, model=self.name) if self.name is not None else self.engine
        llm = begun(engine)
        llm.check_generates()
        if sys.stdout.isatty():
            write = Wrapped(sys.stdout.write)
            conversation = Conversation(llm, params, self.system, write, waiting=first_token_waited_for)
        else:
            conversation = Conversation(llm, params, self.system, sys.stdout.write, sys.stderr.write)
        if self.prompt is not None:
            piped = "" if sys.stdin.isatty() else sys.stdin.read()
            said = conversation.answer("\n\n".join(filter(None, (self.prompt, piped.strip()))))
            return INTERRUPTED if conversation.was_stopped else int(said is None)
        for line in messages(terminal_lines() if sys.stdin.isatty() and sys.stdout.isatty() else sys.stdin):
            if not conversation.take(line):
                break
        return 0


def begun(engine: EngineConfig) -> LLM:
    """Returns the loaded model. A terminal shows what is waited for: the model, and the first time kernels for a CPU.

    Without the kernels a model of some gigabytes would take minutes for an answer. Ctrl-C goes on without them. Raises
    KvernError.
    """
    from kvern.models.hub import resolve_model

    check_files(engine)
    try:
        resolve_model(engine.model, engine.revision, offline=True, cache_folder=engine.download_dir)
    except ModelNotFound:  # the download shows how far it is
        resolve_model(engine.model, engine.revision, cache_folder=engine.download_dir)
    loading = f"loading {Path(engine.model or DEFAULT_MODEL).name}"
    with Waiting(loading) as waiting:
        if engine.cpu_kernels and (process := kernels_to_come(engine)) is not None:
            waiting.show(COMPILING)
            if not sys.stderr.isatty():
                say(COMPILING)
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
            waiting.show(loading)
        return load(engine)


def kernels_to_come(engine: EngineConfig) -> Popen[bytes] | None:
    """Begins to compile kernels if the model will run on a CPU and they are missing; returns the process."""
    from kvern.cpu.ready import begin_build
    from kvern.runner.device import resolve_device

    return begin_build(engine.cache_folder) if resolve_device(engine).type == "cpu" else None


def first_token_waited_for() -> Waiting:
    return Waiting("reading the conversation", after=SILENT_SECONDS)


def messages(lines: Iterable[str | None]) -> Iterator[str]:
    """Yields typed messages and commands: lines without blanks around them, or the lines between two of QUOTES.

    None forgets the lines after the first of QUOTES.
    """
    several: list[str] | None = None
    for line in lines:
        if line is None:
            several = None
            continue
        text = line.rstrip("\r\n") if several is not None else line.strip()
        if several is None and text.startswith(QUOTES):
            several, text = [], text.removeprefix(QUOTES)
            if not text:
                continue
        if several is None:
            yield text
            continue
        ends = text.rstrip().endswith(QUOTES)
        several.append(text.rstrip().removesuffix(QUOTES) if ends else text)
        if ends:
            yield "\n".join(several).strip()
            several = None
    if several:
        yield "\n".join(several).strip()


def terminal_lines() -> Iterator[str | None]:
    """Yields typed lines, with editing and history, until Ctrl-D; None after Ctrl-C, which clears the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = [*COMMANDS, *(f"/set {name}" for name in SamplingParams.__struct_fields__)]
    session: PromptSession[str] = PromptSession(
        completer=WordCompleter(words, sentence=True), complete_while_typing=False
    )
    sys.stdout.write("kvern chat: /help lists the commands, Ctrl-D leaves\n")
    is_inside = False  # a message of several lines
    while True:
        try:
            line = session.prompt("... " if is_inside else "> ")
        except KeyboardInterrupt:
            is_inside = False
            yield None
            continue
        except EOFError:
            return
        is_inside ^= line.count(QUOTES) % 2 == 1
        yield line


class Conversation:
    """A conversation that typed lines change. `write` takes answers, and `tell` all else that is shown: None: `write`.

    `waiting` gives what is shown until the first token.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        write: Callable[[str], Any],
        tell: Callable[[str], Any] | None = None,
        waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._adapter: str | None = None
        self._write = write
        self._tell = tell or write
        self._waiting = waiting
        self.was_stopped = False
        self._images: list[dict[str, Any]] = []
        """Parts of the next message."""
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self._images = []
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, line: str) -> bool:
        """Handles one message or command; returns False to leave."""
        if line.startswith("/") and "\n" not in line:
            return self._command(line)
        if line and (said := self.answer(line)) is not None:
            self._show(dim(said))
        return True

    def _command(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        match name:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/help" | "/?":
                self._show(HELP)
            case "/reset" | "/clear":
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
            case "/image":
                self._add_image(argument.strip())
            case "/show":
                self._describe()
            case "/save":
                self._save(argument.strip())
            case "/load":
                self._load(argument.strip())
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
            self._show("\n".join(f"{key} = {'default' if value is None else value}" for key, value in values.items()))
            return
        try:
            self._params = with_parameter(self._params, name, text.strip())
            self._show(f"{name} = {getattr(self._params, name)}")
        except InvalidParameter as error:
            self._show(f"error: {error}")

    def _add_image(self, name: str) -> None:
        if not self._llm.reads_images:
            self._show("error: this model reads text only")
            return
        from kvern.images.file import read_file
        from kvern.images.limits import LARGEST_FILE

        try:
            data = read_whole(Path(name).expanduser(), LARGEST_FILE)
            picture = read_file(data, name)
        except (OSError, ValueError, KvernError) as error:
            self._show(f"error: {name or '/image'} is no picture: {reason(error)}")
            return
        url = f"data:image;base64,{base64.b64encode(data).decode()}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})
        self._show(f"{name}, {picture.width} x {picture.height} pixels, goes with the next message")

    def _used(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """The tokens of a conversation. Raises InvalidRequest."""
        return len(self._llm.chat_request(messages, self._params).prompt) if messages else 0

    def _describe(self) -> None:
        spec = self._llm.spec
        used = self._used(self.messages)
        self._show(f"model      {self._llm.config.model or DEFAULT_MODEL}")
        self._show(
            f"context    {used:,} of {self._llm.max_model_len:,} tokens; the model has {spec.max_position_embeddings:,}"
        )
        self._show(f"adapter    {self._adapter or 'none'}; loaded are {', '.join(self._llm.adapters) or 'none'}")
        self._show(f"system     {self._system or 'no message'}")

    def _save(self, name: str) -> None:
        if not name:
            self._show("error: /save needs the name of a file")
            return
        try:
            Path(name).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(self.messages)))
            self._show(f"{len(self.messages)} messages are in {name}")
        except OSError as error:
            self._show(f"error: {name} cannot be written: {reason(error)}")

    def _load(self, name: str) -> None:
        try:
            found = msgspec.json.decode(
                read_whole(Path(name).expanduser(), MOST_SAVED_BYTES), type=list[dict[str, Any]]
            )
            self._used(found)
        except (OSError, ValueError, KvernError) as error:
            self._show(f"error: {name or '/load'} is no conversation: {reason(error)}")
            return
        self.messages = found
        self._system = found[0].get("content") if found[0].get("role") == "system" else None
        self._show(f"{len(found)} messages of {name}")

    def answer(self, text: str) -> str | None:
        """Writes the answer to a message; returns how fast it was. None: there is none, and the reason is shown."""
        content: Any = [*self._images, {"type": "text", "text": text}] if self._images else text
        self._images = []
        self.messages.append({"role": "user", "content": content})
        self.was_stopped = False
        written, tokens = "", 0
        cut = ""
        started = time.perf_counter()
        try:
            outputs = self._llm.stream_chat(self.messages, self._params, adapter=self._adapter)
            with self._waiting():
                begun = list(itertools.islice(outputs, 1))
            for output in itertools.chain(begun, outputs):
                answer = output.outputs[0]
                self._write(answer.text[len(written) :].translate(CONTROL_CHARACTERS))
                sys.stdout.flush()
                written, tokens = answer.text, len(answer.token_ids)
                output.check()
                if answer.finish_reason == "length":
                    cut = self._why_cut(len(output.prompt_token_ids) + tokens)
        except KeyboardInterrupt:
            self.was_stopped = True
            self._tell(" [stopped]")
        except KvernError as error:
            self.messages.pop()
            again = isinstance(error, PromptTooLong) and any(message["role"] == "user" for message in self.messages)
            self._show(f"error: {error}{'; /reset forgets the conversation' if again else ''}")
            return None
        seconds = time.perf_counter() - started
        self.messages.append({"role": "assistant", "content": written})
        self._write("\n")
        return f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s{cut}]"

    def _why_cut(self, tokens: int) -> str:
        """Returns what ended an answer before its end, at this length of the conversation."""
        most = self._llm.max_model_len
        if tokens < most:
            return "; cut at max_tokens"
        return f"; cut: the context of {most:,} tokens is full, /reset forgets the conversation"

    def _show(self, text: str) -> None:
        self._tell(text + "\n")
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
