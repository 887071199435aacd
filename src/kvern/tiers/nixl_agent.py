"""A NIXL agent with UCX, for processes that do nothing else: UCX has threads, handlers of signals and open ports.

Who reaches a port of UCX can read and write the memory of its process (docs/security.md), so it is neither the engine's
nor the server's. Such a process ends by `os._exit`: the library's destructors fail at the end of the interpreter.
"""

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvern.io.sockets import interface_of

INSTALL = "pip install 'kvern[nixl]'"
POLL_SECONDS = 0.00005


def bind_to(address: str) -> None:
    """Has UCX use the interface with this address of this machine, and its RDMA devices, before an agent is made.

    Raises OSError if there is none.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if "UCX_NET_DEVICES" not in os.environ:
        name = interface_of(address)
        devices = Path("/sys/class/net", name, "device/infiniband")
        ports = [f"{device.name}:1" for device in devices.iterdir()] if devices.is_dir() else []
        os.environ["UCX_NET_DEVICES"] = ",".join([name, *ports])


class NixlAgent:
    """An agent that reads, or is read from. `progress` has to be called while it is; without it nothing of it runs."""

    def __init__(self) -> None:
        """Raises what NIXL raises."""
        from nixl_cu13 import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False))
        self._remote = ""

    def register(self, address: int, size: int) -> object:
        """Has memory read, or written to; returns what `forget` takes."""
        return self._agent.register_memory([(address, size, 0, "")], "DRAM")

    def forget(self, registered: object) -> None:
        """Ends what `register` began."""
        self._agent.deregister_memory(registered)

    @property
    def description(self) -> bytes:
        """The description that another agent needs to read registered memory."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def progress(self) -> None:
        """Answers others, as far as the network's hardware does not."""
        self._agent.update_notifs()

    def connect(self, description: bytes) -> None:
        """Reads from this other agent from now on."""
        if self._remote:
            self._agent.remove_remote_agent(self._remote)
        self._remote = self._agent.add_remote_agent(description)

    def read(self, base: int, spans: Sequence[tuple[int, int]]) -> None:
        """Copies the other's memory, addresses and sizes, one behind the other to `base`. Raises OSError.

        It waits as long as it takes, which may be forever.
        """
        own, start = [], base
        for _, size in spans:
            own.append((start, size, 0))
            start += size
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(own, "DRAM"),
            self._agent.get_xfer_descs([(address, size, 0) for address, size in spans], "DRAM"),
            self._remote,
        )
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"the read ended with {state}")
