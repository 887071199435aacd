"""A process that compiles grammars in children that may die: `python -m kvern.structured.worker DESCRIPTOR`.

    server --descriptor of a child's socket--> worker: has the tokenizer, forks --> child: one form after another
       `--------------- forms and verdicts, msgpack, each after its length ------------------------'

A signal ends a child that computes for too long; one that takes too much memory or crashes in a library ends by itself,
and the server sees its socket close. No torch is imported.
"""

import contextlib
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec

from kvern.errors import InvalidParameter, KvernError
from kvern.io.children import READY, fork_children, give_way, limit_memory, receive, send
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.compiler import compile_grammar
from kvern.structured.grammar import MOST_MEMORY, MOST_SECONDS, GrammarSetup, GrammarVerdict
from kvern.structured.matchers import GrammarLibrary


def main(descriptor: int) -> None:
    """Fork a child for every socket that arrives, until the server ends. All of them give way to engine and server."""
    give_way(10)
    with socket.socket(fileno=descriptor) as control:
        setup = msgspec.msgpack.decode(receive(control) or b"", type=GrammarSetup)
        library = GrammarLibrary(Path(setup.folder), setup.vocab_size)
        with contextlib.suppress(KvernError):  # of a vocabulary or a folder that is away, which every form then says
            _ = library.tokenizer
        fork_children(control, partial(serve, library=library))


def serve(connection: socket.socket, library: GrammarLibrary) -> None:
    """Compiles the forms that arrive, until the server closes the socket."""
    limit_memory(MOST_MEMORY)
    connection.sendall(READY)
    while (form := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # its signal ends the process
        try:
            verdict = GrammarVerdict(compile_grammar(msgspec.json.decode(form, type=StructuredOutput), library))
        except InvalidParameter as error:
            verdict = GrammarVerdict(error=str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main(int(sys.argv[1]))
