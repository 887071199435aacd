"""The process that reads another machine's memory for a store: `python -m kvern.tiers.nixl_reader SOCKET MEMORY HOST`.

SOCKET and MEMORY are inherited descriptors: a socket of packets to the store, and the memory to which is read, which
both have. A packet is a description of an agent to read from, or spans of its memory; the answer is DONE, or says what
failed. The store ends a process that does not answer, so that nothing is written to the memory afterwards.
"""

import mmap
import os
import socket as sockets
import sys

import msgspec
import numpy as np

from kvern.io.sockets import address_towards
from kvern.tiers.nixl_agent import NixlAgent, bind_to
from kvern.tiers.remote_pages import Span

DONE = b"+"
MOST_PACKET = 1 << 17
MOST_SPANS = 4096
"""The spans of a packet."""
decode = msgspec.msgpack.Decoder(bytes | list[Span]).decode


def main(socket: int, memory: int, host: str) -> None:
    """Reads until the store's side of the socket is closed."""
    line = sockets.socket(fileno=socket)
    bind_to(address_towards(host))
    agent = NixlAgent()
    size = os.fstat(memory).st_size
    staging = mmap.mmap(memory, size)
    base = np.frombuffer(staging, np.uint8).ctypes.data
    agent.register(base, size)
    line.send(DONE)
    while packet := line.recv(MOST_PACKET):
        try:
            wanted = decode(packet)
            if isinstance(wanted, bytes):
                agent.connect(wanted)
            else:
                agent.read(base, wanted)
            line.send(DONE)
        except Exception as error:  # NIXL may raise anything
            line.send(f"{type(error).__name__}: {error}".encode()[:1000])


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except Exception as problem:
        sys.stderr.write(f"kvern: pages of {sys.argv[3]} cannot be read: {problem}\n")
    sys.stderr.flush()
    os._exit(0)
