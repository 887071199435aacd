"""Connections between machines: for the one process that has the key, and bound to one address."""

import os
import subprocess
import sys

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvern.io.sockets import KEY, address_towards, interface_of, listen

SAY = """
import sys, zmq
from kvern.io.sockets import connect
with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
    socket.set(zmq.LINGER, 0)
    connect(socket, sys.argv[1])
    socket.send(sys.argv[2].encode())
    sys.stdin.read()
"""
PATIENCE = 240_000
REFUSED = zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


def said(address: str, key: str | None, text: str) -> "subprocess.Popen[bytes]":
    """A process that connects with this key, and says something until it is told to end."""
    environment = os.environ | ({} if key is None else {KEY: key})
    return subprocess.Popen([sys.executable, "-c", SAY, address, text], stdin=subprocess.PIPE, env=environment)


def test_only_the_process_with_the_key_is_heard() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as listener:
        address, key = listen(listener, "127.0.0.1")
        assert address.startswith("tcp://127.0.0.1:")
        monitor = listener.get_monitor_socket(zmq.Event.ALL)
        for wrong in (None, zmq.curve_keypair()[0].decode()):
            stranger = said(address, wrong, "let me in")
            while monitor.poll(PATIENCE) and recv_monitor_message(monitor)["event"] not in REFUSED:
                continue
            stranger.communicate()
            assert not listener.poll(0)
        listener.disable_monitor()
        monitor.close()
        friend = said(address, key, "it is me")
        assert listener.poll(PATIENCE) and listener.recv() == b"it is me"
        friend.communicate()


def test_the_interface_with_an_address_is_found() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(OSError, match="has the address 203"):
        interface_of("203.0.113.1")
