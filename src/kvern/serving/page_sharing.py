"""The page server of a server's engines: a process that is started again when it ends."""

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.io.bytecode import bytecode_environment
from kvern.tiers.arena import list_path
from kvern.tiers.nixl_agent import INSTALL
from kvern.tiers.remote_pages import peer_secret, read_address, resolved

logger = logging.getLogger("kvern")

LONGEST_WAIT = 60.0


class PageSharing:
    """Lets other servers read what engines keep in host memory, at `config.kv_tier_listen`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process, if there is to be one. Raises ConfigError with the reason if it does not start."""
        if self._config.kv_tier_listen is None or self._task is not None:
            return
        try:
            if importlib.util.find_spec("nixl_cu13") is None:
                raise ValueError(f"the package nixl_cu13 is not installed: {INSTALL}")
            peer_secret()
            await self._launch()
        except (ValueError, OSError) as error:
            raise ConfigError(f"kv_tier_listen is {self._config.kv_tier_listen}: {error}") from error
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends the process."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.communicate)

    async def _launch(self) -> None:
        """Starts the process. Raises ValueError or OSError if it does not listen."""
        host, port = await asyncio.to_thread(resolved, read_address(self._config.kv_tier_listen or ""))
        path = list_path(self._config.model or "")
        words = [sys.executable, "-m", "kvern.tiers.page_server", host, str(port), path, str(self._config.ranks)]
        self._process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **bytecode_environment()},
            process_group=0,
        )
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if line != b"\n":
            raise ValueError(line.decode(errors="replace").strip() or "the page server ended at its start")

    async def _keep(self) -> None:
        """Starts another one when it has ended, after 1, 2, 4 .. s if that fails."""
        wait = 1.0
        while True:
            assert self._process is not None
            code = await asyncio.to_thread(self._process.wait)
            self._process.communicate()
            logger.warning("the page server of kv_tier_listen ended with exit code %s; it is started again", code)
            await asyncio.sleep(wait)
            wait = min(LONGEST_WAIT, 2 * wait)
            try:
                await self._launch()
                wait = 1.0
            except (ValueError, OSError) as error:
                logger.warning("the page server of kv_tier_listen does not start: %s", error)
