"""Connections between kvern's processes on several machines: TCP, encrypted, for those alone who were given the key.

CurveZMQ (https://rfc.zeromq.org/spec/26/) lets nobody speak who does not know the listener's public key, which it never
sends. Each listener makes a key of its own and tells it to the one process that is to connect: it works as a password.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket as sockets
import struct
import sys

import zmq

KEY = "KVERN_SOCKET_KEY"
"""The variable in which a process is given it: other users of its machine can read no variables, but arguments."""
SET_PARENT_DEATH_SIGNAL = 1
"""Of prctl(2)."""
SIOCGIFADDR = 0x8915
"""Of netdevice(7): the address of an interface."""


def listen(socket: "zmq.Socket[bytes]", host: str) -> tuple[str, str]:
    """Bind a socket to a free port of one of this machine's addresses; returns its address and its key."""
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    return f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}", public.decode()


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connect to the process that started this one: to a file, or, with the key that this one was given, by TCP.

    With TCP this process ends at once with the thread that started it. A connection that is lost is not made again,
    since messages may be lost with it: silence tells.
    """
    key = os.environ.pop(KEY, None)
    if key is not None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        public, secret = zmq.curve_keypair()
        socket.set(zmq.CURVE_SERVERKEY, key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.RECONNECT_IVL, -1)
    socket.connect(address)


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches another."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # which sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address of this machine. Raises OSError if there is none."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        for _, name in sockets.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if sockets.inet_ntoa(found[20:24]) == address:
                    return name
    raise OSError(f"no network interface of this machine has the address {address}")
