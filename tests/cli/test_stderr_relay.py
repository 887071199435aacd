"""A server whose stderr is a pipe that nobody reads: it goes on, and says later what it left out."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.cli.entry import StderrRelay
from tests.support.served import SMALL, eventually, serving


@pytest.mark.nightly
def test_a_server_whose_words_nobody_reads_goes_on() -> None:
    with serving(*SMALL, "--log-requests", "summary") as served:
        assert served.process.stderr is not None
        room = fcntl.fcntl(served.process.stderr, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))
        for _ in range(2 * room // 1000):
            assert served.raw("GET", f"/{'x' * 1000}")[0] == 404
        served.kill_engine()  # of which the server warns, and the next engine says what it has to say
        body = b'{"prompt": "a", "max_tokens": 4}'
        eventually(lambda: served.raw("POST", "/v1/completions", body)[0] == 200)
        assert served.stop() == 0


def test_lines_without_room_are_counted() -> None:
    source, sink = os.pipe()
    fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))
    StderrRelay(sink, most_lines=2)
    line, many = b"x" * 4000 + b"\n", 100
    for _ in range(many):
        os.write(sink, line)
    os.close(sink)
    handed_on = left_out = 0
    with os.fdopen(source, "rb") as lines:
        while handed_on + left_out < many:
            read = lines.readline()
            if read == line:
                handed_on += 1
            else:
                left_out += int(read.removeprefix(b"kvern: ").split()[0])
    assert handed_on > 0 and left_out > 0


def test_a_target_that_does_not_block_may_be_full() -> None:
    """Also where somebody else fills it behind the relay's back."""
    source, sink = os.pipe()
    fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))
    os.set_blocking(sink, False)
    StderrRelay(sink, most_lines=10_000)
    line, many = b"x" * 1000 + b"\n", 200
    for _ in range(many):
        os.write(sink, line)
    with os.fdopen(source, "rb") as lines:
        assert all(lines.readline() == line for _ in range(many))
    os.close(sink)


def test_what_is_written_last_is_read() -> None:
    source, sink = os.pipe()
    relay = StderrRelay(sink)
    os.write(sink, b"a line\nand no line's end")
    relay.close()
    os.write(sink, b", as it was")
    assert os.read(source, 100) == b"a line\nand no line's end, as it was"
    os.close(source)
    os.close(sink)


def test_only_pipes_are_relayed(tmp_path: Path) -> None:
    script = "from kvern.cli.entry import relay_stderr; import sys; relay_stderr(); sys.stderr.write('said')"
    file = tmp_path / "stderr"
    with file.open("w") as stderr:
        subprocess.run(
            [sys.executable, "-c", script + "; import threading; assert threading.active_count() == 1"],
            stderr=stderr,
            check=True,
        )
    assert file.read_text() == "said"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stderr == b"said"
