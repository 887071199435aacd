"""A second signal ends a command, whatever its threads do."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvern.batch.job import interrupts_deferred
from tests.support.served import ENGINE, child_of, children_of, command_of, eventually

SERVE = """
import sys, threading, time
import kvern.cli.serve as command, kvern.server.run as server
server.LAST_SECONDS, say = 0.5, command._say
{stuck}
from kvern.cli.entry import main
sys.argv = ["kvern", "serve", "--port", "0", "--threads", "1", "--max-model-len", "512"]
main()
"""
STUCK = {
    "loop": "command._say = lambda text: (say(text), text.startswith('serving') and time.sleep(1e6))",
    "thread": "threading.Thread(target=threading.Event().wait).start()",
    "engine": "",
    "load": "",
}


@contextlib.contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stuck", ["loop", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("thread", "engine", "load"))]
)
def test_a_second_signal_ends_a_server_whatever_is_stuck(stuck: str) -> None:
    with python(SERVE.format(stuck=STUCK[stuck])) as process:
        assert process.stderr is not None
        if stuck != "load":
            assert any("serving" in line for line in process.stderr)
        eventually(lambda: any(ENGINE in command_of(child) for child in children_of(process.pid)))
        engine = child_of(process.pid, ENGINE)
        if stuck in ("engine", "load"):
            os.kill(engine, signal.SIGSTOP)
        eventually(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None)  # two at once are one
        eventually(lambda: ENGINE not in command_of(engine))


def test_a_second_interrupt_ends_what_defers_the_first() -> None:
    before, within = signal.getsignal(signal.SIGINT), []

    def interrupted() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            within.append(signal.getsignal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert within == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before
