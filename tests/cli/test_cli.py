"""The command line: options and where they come from, one-line errors, and the conversation."""

import contextlib
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cli import entry
from kvern.cli.chat import ChatCommand, Conversation, with_parameter
from kvern.cli.chat import messages as typed_messages
from kvern.cli.main import COMMANDS, main
from kvern.cli.options import SamplingOptions, read_defaults
from kvern.cli.terminal import Waiting, Wrapped
from kvern.errors import INTERRUPTED, ConfigError, InvalidParameter
from tests.support.tiny_model import make_tiny_model

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model)) as engine:
        yield engine


def test_flag_goes_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = tmp_path / "kvern.toml"
    file.write_text('block_size = 32\nmax_tokens = 5\ntemperature = 1\nstop = ["a", "b"]\nprefix_cache = false\n')
    variables = {"KVERN_MAX_TOKENS": "6", "KVERN_PREFIX_CACHE": "true", "KVERN_THREADS": "2", "HOME": "/"}
    defaults = read_defaults(["run", "--config", str(file)], variables)
    assert defaults.engine == EngineConfig(block_size=32, threads=2, prefix_cache=True)
    assert defaults.sampling == SamplingOptions(max_tokens=6, temperature=1, stop=("a", "b"))
    assert read_defaults([f"--config={file}"], {}).engine.prefix_cache is False
    yaml = tmp_path / "kvern.yaml"
    yaml.write_text("model: kvern-1m\nmax-tokens: 7\nstop: a\nhf_overrides: {rope_theta: 2.0}\ntls-cert: c.pem\n")
    defaults = read_defaults(["--config", str(yaml)], {"KVERN_MODEL": "kvern-12m"})
    assert defaults.engine == EngineConfig("kvern-12m", hf_overrides={"rope_theta": 2.0})
    assert defaults.sampling == SamplingOptions(max_tokens=7, stop=("a",))
    assert defaults.server.tls_cert == Path("c.pem")
    assert read_defaults([], {"KVERN_TLS_CERT": "c.pem"}).server.tls_cert == Path("c.pem")
    assert read_defaults([], {"KVERN_CONFIG": str(file)}).engine.block_size == 32
    assert read_defaults([], {}).engine == EngineConfig()


@pytest.mark.parametrize(
    ("text", "variables", "reason"),
    [
        ("max_token = 5", {}, "max_token is no option: did you mean max_tokens?"),
        ("[server]\nport = 80", {}, "server is no option but a table: write options without one"),
        ("", {"KVERN_TEMPRATURE": "1"}, "KVERN_TEMPRATURE is no option: did you mean temperature?"),
        ("block_size = 'big'", {}, "block_size is 'big': expected int"),
        ("", {"KVERN_THREADS": "many"}, "KVERN_THREADS is 'many'"),
        ("dtype = 'int3'", {}, "dtype int3 is refused: there is no such format; dtype is one of auto, bfloat16,"),
        ("block_size = 0", {}, "block_size is 0: it must be at least 1"),
        ("= nonsense", {}, "is not valid TOML"),
    ],
)
def test_unknown_and_wrong_options_are_refused(
    tmp_path: Path, text: str, variables: dict[str, str], reason: str
) -> None:
    (tmp_path / "kvern.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_defaults(["--config", str(tmp_path / "kvern.toml")], variables)
    assert reason in str(error.value)


def test_every_option_of_the_engine_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "in.jsonl", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, field in EngineConfig.__dataclass_fields__.items():
        assert ("--adapter " if name == "adapters" else name.replace("_", "-")) in shown, field


def test_help_names_what_is_taken_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "usage: kvern serve [MODEL] [options]" in capsys.readouterr().out


def bad_commands(folder: Path, model: Path) -> Iterator[tuple[list[str], str]]:
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    known = ["--model", str(model)]
    yield (
        ["run", *files, "--model", "missing"],
        "model 'missing' is neither a file or folder here nor an embedded model",
    )
    yield ["run", *files, *known, "--temperature", "-1"], "temperature is -1"
    yield ["run", *files, *known, "--temperature", "nan"], "temperature is nan"
    yield ["run", *files, *known, "--max-tokens", "0"], "max_tokens is 0"
    yield ["run", *files, *known, "--top-p", "1.5"], "top_p is 1.5"
    yield ["run", *files, *known, "--block-size", "0"], "block_size is 0"
    yield ["run", "missing.jsonl", files[1], *known], "input missing.jsonl does not exist"
    yield ["run", files[0], "/no/such/folder/out.jsonl", *known], "there is no folder /no/such/folder"
    yield ["chat", "./missing"], "model './missing': there is no such folder"
    yield ["run", *files, "--config", "missing.toml"], "configuration file missing.toml cannot be read"
    yield ["run", *files, "--no-such-flag"], "there is no option --no-such-flag: kvern run --help lists all"
    yield ["run"], "give IN and OUT: kvern run IN OUT [options]"
    yield ["run", "model.gguf"], "give OUT: kvern run IN OUT [options]; to talk to a model: kvern chat model.gguf"
    yield ["pull"], "give MODEL: kvern pull MODEL [options]"
    yield ["list", "all"], "'all' is too much: the command is kvern list [options]"
    yield ["chat", str(model), "What", "is", "this?"], "'is' is too much: the command is kvern chat [MODEL] [PROMPT]"
    yield ["chat", "-x"], "there is no option -x: kvern chat --help lists all"
    yield ["models", "--famlies"], "there is no option --famlies: did you mean --families?"


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in bad_commands(tmp_path, model):
        assert main(arguments) == 2, arguments
        shown = capsys.readouterr()
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1, shown.err
        assert shown.err.startswith(f"kvern {arguments[0]}") and ": error: " in shown.err
        assert reason in shown.err
        assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.nightly
def test_a_model_without_memory_for_it_is_refused_in_a_line(model: Path) -> None:
    limited = [
        "bash",
        "-c",
        'ulimit -v 8000000; exec "$@"',
        "-",
        sys.executable,
        "-m",
        "kvern",
        "chat",
        str(model),
        "a",
    ]
    refused = subprocess.run(
        [*limited, "--kv-cache-tokens", "2000000000", "--cpu-kernels"], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "kvern chat: error: the system gives this process too little memory" in refused.stderr


def test_run_answers_and_prints_the_table(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "the fox", "max_tokens": 3}\n{\n')
    result = subprocess.run(
        [sys.executable, "-m", "kvern", "run", "in.jsonl", "out.jsonl", "--model", str(model), "--kv-tier", "host:9MB"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    cached = ("prefix-cache hit rate", "KV tier host")
    for name in ("requests", "prompt tokens", "generated tokens", "tokens/s", *cached, "failed rows"):
        assert name in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert result.stderr == "kvern: 1 rows failed: see out.errors.jsonl\n"
    assert json.loads((tmp_path / "out.jsonl").read_text())["completion_tokens"] == 3


def test_help_and_import_load_nothing_heavy() -> None:
    script = (
        "import sys, kvern, kvern.cli.main\n"
        "try: kvern.cli.main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'tokenizers', 'numpy', 'huggingface_hub', 'prompt_toolkit', 'jinja2', 'transformers'}"
        " & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["--version"], ["-V"], ["version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import kvern

    assert main(arguments) == 0
    assert capsys.readouterr().out == f"kvern {kvern.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_an_overview_says_how_to_begin(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "kvern chat ./model-Q4_K_M.gguf" in shown
    found = re.search(r"\n  chat +Talk to a model\n", shown)
    assert found is not None
    lines = shown[found.start() :].splitlines()
    assert max(map(len, lines)) <= 60
    assert all(f"\n  {' '.join(words)} " in shown for words in COMMANDS)


def test_help_of_a_command_and_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "chat"]) == main(["chat", "--help"]) == 0
    first, second = capsys.readouterr().out.split("usage: kvern chat", 2)[1:]
    assert first == second
    assert main(["bench"]) == main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("usage: kvern bench COMMAND") == 2 and "bench kernels" in shown and "quantize" not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show"], "kvern show is no command: did you mean kvern models?"),
        (["ls"], "kvern ls is no command: did you mean kvern list?"),
        (["nonsense"], "kvern nonsense is no command: there are chat, serve, run, "),
        (["bench", "serv"], "kvern bench serv is no command: did you mean kvern bench serve?"),
        (["--port", "80"], "--port stands before a command: kvern --help lists them"),
    ],
)
def test_what_is_no_command_is_answered(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_models_lists_what_can_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "kvern-12m" in shown and "kvern serve NAME" in shown
    assert main(["models", "--families"]) == 0
    families = capsys.readouterr().out.splitlines()
    assert "llama" in families
    assert len(families) > 20


class Screen(list[str]):
    @property
    def text(self) -> str:
        return "".join(self)


def conversation(llm: LLM, **params: Any) -> tuple[Conversation, Screen]:
    screen = Screen()
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 5, **params})
    return Conversation(llm, chosen, None, screen.append), screen


def test_chat_answers_with_the_whole_conversation(llm: LLM) -> None:
    talk, screen = conversation(llm)
    assert talk.take("the fox")
    first = llm.chat([{"role": "user", "content": "the fox"}], SamplingParams(temperature=0, max_tokens=5))
    assert talk.messages[1] == {"role": "assistant", "content": first[0].outputs[0].text}
    assert "[5 tokens, " in screen.text
    talk.take("the dog")
    second = llm.chat(talk.messages[:3], SamplingParams(temperature=0, max_tokens=5))
    assert talk.messages[3]["content"] == second[0].outputs[0].text


def test_chat_commands(llm: LLM) -> None:
    talk, screen = conversation(llm)
    for line in ("the fox", "/system be brief", "/help", "/nonsense", ""):
        assert talk.take(line)
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    assert "/reset" in screen.text
    assert "unknown command /nonsense" in screen.text
    talk.take("/set max_tokens 2")
    talk.take("/set temperature hot")
    talk.take("/set colour red")
    talk.take("/set")
    assert "max_tokens = 2" in screen.text and "temperature = 0" in screen.text and "top_k = default" in screen.text
    assert "error: temperature: expected float" in screen.text
    assert "error: no sampling parameter 'colour'" in screen.text
    talk.take("the fox")
    assert "[2 tokens, " in screen.text
    assert "; cut at max_tokens]" in screen.text
    talk.take("/clear")
    assert len(talk.messages) == 1
    assert not talk.take("/exit")


def test_chat_survives_a_conversation_that_is_too_long(llm: LLM) -> None:
    talk, screen = conversation(llm)
    talk.take("word " * 600)
    assert "error: " in screen.text
    assert talk.messages == []
    assert "/reset forgets" not in screen.text
    talk.take("the fox")
    assert len(talk.messages) == 2
    talk.take("/set max_tokens none")
    talk.take("/set ignore_eos true")
    talk.take("the dog")
    assert f"; cut: the context of {llm.max_model_len} tokens is full, /reset forgets the conversation]" in screen.text
    talk.take("the cat")
    assert "; /reset forgets the conversation" in screen.text.splitlines()[-1]


class InterruptedLLM:
    """The real engine, and a Ctrl-C at the third token."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def stream_chat(self, messages: Any, params: Any, **more: Any) -> Iterator[Any]:
        for output in self._llm.stream_chat(messages, params, **more):
            yield output
            if len(output.outputs[0].token_ids) == 3:
                signal.raise_signal(signal.SIGINT)

    def check_generates(self) -> None:
        self._llm.check_generates()


def test_ctrl_c_stops_the_answer_and_keeps_it(llm: LLM) -> None:
    screen = Screen()
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    talk = Conversation(InterruptedLLM(llm), params, None, screen.append)  # type: ignore[arg-type]
    assert talk.take("the fox")
    assert "[stopped]" in screen.text and talk.was_stopped
    assert "[3 tokens" in screen.text
    assert talk.messages[1]["role"] == "assistant"
    assert talk.take("/reset")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("temperature", "0.7", 0.7), ("seed", "none", None), ("stop", '["a", "b"]', ["a", "b"]), ("stop", "END", "END")],
)
def test_set_reads_any_parameter(name: str, text: str, value: object) -> None:
    assert getattr(with_parameter(SamplingParams(), name, text), name) == value


@pytest.mark.parametrize(("name", "text"), [("temperature", "-1"), ("n", "2"), ("top_k", "1.5"), ("none", "1")])
def test_set_refuses_wrong_values(name: str, text: str) -> None:
    with pytest.raises(InvalidParameter):
        with_parameter(SamplingParams(), name, text)


def test_a_conversation_is_saved_and_goes_on(llm: LLM, tmp_path: Path) -> None:
    talk, screen = conversation(llm)
    for line in ("/system be brief", "the fox", f"/save {tmp_path / 'talk.json'}", "/reset", "/show", "/?"):
        assert talk.take(line)
    assert "3 messages are in" in screen.text and "/load FILE" in screen.text
    other, heard = conversation(llm)
    other.take(f"/load {tmp_path / 'talk.json'}")
    other.take("/show")
    assert [message["role"] for message in other.messages] == ["system", "user", "assistant"]
    assert "system     be brief" in heard.text and re.search(r"context    [1-9]\d* of \d+ tokens", heard.text)
    (tmp_path / "talk.json").write_text('[{"role": "king", "content": 3}]')
    for wrong in (tmp_path / "talk.json", tmp_path / "missing.json", ""):
        other.take(f"/load {wrong}")
    assert heard.text.count("is no conversation: ") == 3 and len(other.messages) == 3
    assert not other.take("/bye")


def test_a_message_may_have_several_lines() -> None:
    typed = ["  one ", '"""', "two", "  three", '"""', '"""four"""', "/help", '"""five', "six"]
    assert list(typed_messages(typed)) == ["one", "two\n  three", "four", "/help", "five\nsix"]
    assert list(typed_messages(['"""one', None, "two"])) == ["two"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a quick brown fox\njumps", "a quick\nbrown fox\njumps"),
        ("exactly 10 and more", "exactly 10\nand more"),
        ("a averyverylongword b", "a\naveryverylongword b"),
        ("```\nif a and b and c:\n```\nand then on", "```\nif a and b and c:\n```\nand then\non"),
        ("\u732b\u304c\u597d\u304d a b", "\u732b\u304c\u597d\u304d a\nb"),
        ("ten letter  \nnext", "ten letter\nnext"),
    ],
)
def test_a_terminal_breaks_answers_between_words(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    for size in (1, 3, len(text)):
        screen = Screen()
        write = Wrapped(screen.append)
        for at in range(0, len(text), size):
            write(text[at : at + size])
        write("\n")
        assert screen.text == shown + "\n"


@pytest.mark.nightly
def test_a_prompt_of_the_command_line_is_answered_alone(model: Path) -> None:
    command = [sys.executable, "-m", "kvern", "chat", str(model), "the fox", "--temperature", "0", "--max-tokens", "4"]
    piped = subprocess.run(command, input="", env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (piped.returncode, piped.stderr) == (0, "") and "tokens/s" not in piped.stdout and piped.stdout.strip()
    refused = subprocess.run(
        [*command, "--max-model-len", "16"], input="word " * 99, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (refused.returncode, refused.stdout) == (1, "") and refused.stderr.startswith("error: ")


def test_ctrl_c_at_the_answer_to_a_prompt_ends_with_its_exit_code(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvern.cli.chat.begun", lambda engine: InterruptedLLM(llm))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert ChatCommand(prompt="the fox").execute() == INTERRUPTED
    shown = capsys.readouterr()
    assert "[stopped]" in shown.err and "[stopped]" not in shown.out


@pytest.mark.nightly
def test_requests_through_a_pipe(model: Path) -> None:
    rows = '{"prompt": "the fox", "max_tokens": 3}\n{"prompt": 5}\n'
    command = [sys.executable, "-m", "kvern", "run", "-", "-", "--model", str(model), "--temperature", "0"]
    result = subprocess.run(command, input=rows, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "1 rows failed: they stand below" in result.stderr
    [answer] = map(json.loads, result.stdout.splitlines())
    assert answer["prompt"] == "the fox" and answer["completion_tokens"] == 3
    assert "prompt is 5" in result.stderr and "tokens/s" in result.stderr


@pytest.mark.nightly
def test_chat_through_a_pipe(model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvern", "chat", str(model), "--temperature", "0", "--max-tokens", "4"],
        input="the fox\n/set max_tokens 2\nthe dog\n",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and "tokens/s" not in result.stdout and "max_tokens" not in result.stdout
    assert [line.partition(" ")[0] for line in result.stderr.splitlines()] == ["[4", "max_tokens", "[2"]


@pytest.fixture
def terminal(model: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """``kvern chat`` on a terminal of its own."""
    controller, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvern", "chat", "--model", str(model), "--temperature", "0", "--ignore-eos"],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1"},
        start_new_session=True,
    )
    os.close(side)
    yield process, controller
    process.kill()
    process.wait()
    os.close(controller)


def read_until(controller: int, seen: Callable[[str], bool]) -> str:
    shown = ""
    deadline = time.monotonic() + 240
    while not seen(shown):
        ready, _, _ = select.select([controller], [], [], deadline - time.monotonic())
        assert ready, f"nothing more came after {shown!r}"
        shown += os.read(controller, 65536).decode(errors="replace")
    return shown


def test_chat_on_a_terminal(terminal: tuple["subprocess.Popen[bytes]", int]) -> None:
    process, controller = terminal
    prompt = "\x1b[?2004h"  # the terminal is told to bracket what is pasted: a line can be typed
    begun = read_until(controller, lambda shown: prompt in shown)
    assert f"loading {Path(process.args[5]).name}" in begun.rpartition("\r\x1b[K")[0]  # which is erased
    os.write(controller, b'"""\r')
    read_until(controller, lambda shown: "..." in shown)
    os.write(controller, b"\x03")
    read_until(controller, lambda shown: prompt in shown)
    os.write(controller, b"/set max_tokens 3\r")
    read_until(controller, lambda shown: prompt in shown.partition("max_tokens = 3")[2])
    os.write(controller, b"the fox\r")
    read_until(controller, lambda shown: prompt in shown.partition("\x1b[2m[3 tokens, ")[2])
    os.write(controller, b"\x04")
    assert process.wait(240) == 0


def test_a_first_token_that_takes_long_is_waited_for_in_sight(llm: LLM) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        seen.append("waits")
        yield
        seen.append("".join(screen))

    screen = Screen()
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=3), None, screen.append, waiting=waiting)
    talk.take("the fox")
    assert seen == ["waits", ""] and "[3 tokens, " in screen.text
    talk.take("word " * 600)
    assert "error: " in screen.text and len(talk.messages) == 2


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_logged_stands_above_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    with Waiting("loading"):
        logging.getLogger("kvern").warning("the file is odd")
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\r\x1b[Kthe file is odd\nloading" in shown and shown.endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Waiting("loading"):
        pass
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvern.cli.main.main", interrupted)
    monkeypatch.setattr(sys, "argv", ["kvern", "list"])
    assert entry.main() == INTERRUPTED
