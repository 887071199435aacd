"""A process that compiles grammars in children that may die: `python -m kvern.structured.worker DESCRIPTOR`.

    server --descriptor of a child's socket--> worker: has the tokenizer, forks --> child: one form after another
       `--------------- forms and verdicts, msgpack, each after its length ------------------------'

A signal ends a child that computes for too long; one that takes too much memory or crashes in a library ends by itself,
and the server sees its socket close. No torch is imported.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from kvern.errors import InvalidParameter, KvernError
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.compiler import compile_grammar
from kvern.structured.grammar import LENGTH, MOST_MEMORY, MOST_SECONDS, READY, GrammarSetup, GrammarVerdict
from kvern.structured.matchers import GrammarLibrary


def main(descriptor: int) -> None:
    """Fork a child for every socket that arrives, until the server ends. All of them give way to engine and server."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the server decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    os.nice(10)
    with socket.socket(fileno=descriptor) as control:
        setup = msgspec.msgpack.decode(receive(control) or b"", type=GrammarSetup)
        library = GrammarLibrary(Path(setup.folder), setup.vocab_size)
        with contextlib.suppress(KvernError):  # of a vocabulary or a folder that is away, which every form then says
            _ = library.tokenizer
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    try:
                        control.close()
                        serve(connection, library)
                    finally:
                        os._exit(0)


def serve(connection: socket.socket, library: GrammarLibrary) -> None:
    """Compiles the forms that arrive, until the server closes the socket."""
    used = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_MEMORY, used + MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(READY)
    while (form := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # its signal ends the process
        try:
            verdict = GrammarVerdict(compile_grammar(msgspec.json.decode(form, type=StructuredOutput), library))
        except InvalidParameter as error:
            verdict = GrammarVerdict(error=str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        message = msgspec.msgpack.encode(verdict)
        connection.sendall(len(message).to_bytes(LENGTH) + message)


def receive(connection: socket.socket) -> bytes | None:
    """Receives one message; None if the socket was closed."""
    length = _exactly(connection, LENGTH)
    return None if length is None else _exactly(connection, int.from_bytes(length))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
