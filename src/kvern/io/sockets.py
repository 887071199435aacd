"""Connections between kvern's processes on several machines: encrypted TCP, only for processes with the key.

CurveZMQ (https://rfc.zeromq.org/spec/26/) accepts no client that does not know the listener's public key, which is
never sent. Each listener makes a new key and gives it to the one process that is to connect: it serves as a password.
"""

import contextlib
import fcntl
import os
import socket as sockets
import struct

import zmq

from kvern.io.children import end_with_parent

KEY = "KVERN_SOCKET_KEY"
"""The variable with a process's key: other users of the machine can read arguments, but not variables."""
MOST_PROCESSES = "KVERN_RAY_PROCESSES"
"""The variable of a process on a node of a Ray cluster with the number of such processes that its node has room for."""
SIOCGIFADDR = 0x8915
"""A constant of netdevice(7): the address of an interface."""


def listen(socket: "zmq.Socket[bytes]", host: str) -> tuple[str, str]:
    """Binds a socket to a free port of this machine's address. Returns its address and key."""
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    return f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}", public.decode()


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connects to the process that started this one: by a file, or by TCP with the key that this process was given.

    With TCP, this process is killed when the thread that started it ends. A lost connection is not restored, since
    messages may be lost with it; the other side notices the silence.
    """
    key = os.environ.pop(KEY, None)
    if key is not None:
        end_with_parent()
        public, secret = zmq.curve_keypair()
        socket.set(zmq.CURVE_SERVERKEY, key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.RECONNECT_IVL, -1)
    socket.connect(address)


def address_towards(host: str) -> str:
    """Returns the address of this machine from which it reaches another."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the network interface with this IPv4 address of this machine. Raises OSError if there is none."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        for _, name in sockets.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if sockets.inet_ntoa(found[20:24]) == address:
                    return name
    raise OSError(f"no network interface of this machine has the address {address}")
