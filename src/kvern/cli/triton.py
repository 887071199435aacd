"""``kvern triton MODEL --out REPOSITORY``: a model for Triton Inference Server."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvern.cli.output import print_lines
from kvern.errors import ConfigError, without_passwords

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
LONGEST_SOCKET = 107
"""The limit of a Unix socket's path in bytes."""


@dataclass(frozen=True)
class TritonCommand:
    """Write a model into a repository of Triton Inference Server. Triton then starts `kvern serve`, or finds one that
    runs, and the model answers with inputs and outputs as Triton's vLLM backend names them."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder, Hugging Face id, or the name of an embedded model."""
    out: Path | None = None
    """Folder of the repository; it is made if there is none."""
    name: str | None = None
    """Name of the model in Triton. None: the last part of MODEL, with --like tensorrtllm `ensemble`."""
    like: Literal["vllm", "tensorrtllm"] = "vllm"
    """Backend of Triton whose inputs and outputs are taken. tensorrtllm: token ids in and out (`tensorrt_llm`), and an
    ensemble with preprocessing and postprocessing around it; it needs --socket."""
    socket: Path | None = None
    """Unix socket of a server that runs: kvern serve MODEL --uds PATH. None: Triton starts one with the model, and ends
    it when the model is unloaded."""
    options: str = ""
    """Options of kvern serve where Triton starts it, in quotes: "--max-model-len 8192"."""
    kvern: str = f"{shlex.quote(sys.executable)} -m kvern"
    """Command of kvern where Triton runs."""
    overwrite: bool = False
    """Replace the files of a model of this name."""

    def execute(self) -> int:
        """Writes the model and returns the exit code. Raises ConfigError."""
        from kvern.triton_repository.writer import like_tensorrtllm, like_vllm, write

        if self.out is None:
            raise ConfigError("out is missing: give the repository's folder, as --out REPOSITORY")
        usual = "ensemble" if self.like == "tensorrtllm" else Path(self.model.rstrip("/")).name
        name = self.name if self.name is not None else usual
        if not NAME.fullmatch(name):
            raise ConfigError(f"name is {name!r}: it must be of letters, digits, '_', '-' and '.'; give another --name")
        make = like_tensorrtllm if self.like == "tensorrtllm" else like_vllm
        folders = write(self.out, make(name, self._parameters()), self.overwrite)
        print_lines(*(f"{folder} is written" for folder in folders), f"tritonserver --model-repository {self.out}")
        return 0

    def _parameters(self) -> dict[str, str]:
        """The parameters of the model. Raises ConfigError."""
        if self.socket is None and self.like == "tensorrtllm":
            raise ConfigError(
                "like is tensorrtllm and socket is missing: several models ask one server; start kvern serve MODEL "
                "--uds PATH, and give --socket PATH"
            )
        if self.socket is None:
            model = os.path.abspath(self.model) if Path(self.model).is_dir() else self.model
            return {"serve": f"{self.kvern} serve {shlex.quote(model)} {self._checked()}".rstrip()}
        if self.options:
            raise ConfigError(f"options are {self.options!r} and socket is {self.socket}: that server has its own")
        path = str(self.socket.absolute())
        if len(path.encode()) > LONGEST_SOCKET:
            raise ConfigError(f"socket is {path!r}: the path of a socket has {LONGEST_SOCKET} bytes at most")
        return {"socket": path}

    def _checked(self) -> str:
        """The options of kvern serve. Raises ConfigError for those that it would not take."""
        from kvern.cli.main import options_in, read_command

        try:
            arguments = shlex.split(self.options)
        except ValueError as error:
            raise ConfigError(f"options are {self.options!r}: {error}") from None
        if "api_key" in options_in(arguments) or any(text != without_passwords(text) for text in arguments):
            raise ConfigError(
                "options hold a secret (--api-key, or a URL with a password), and Triton shows them to every client: "
                "set KVERN_API_KEY, or KVERN_ and the option's name, where Triton runs, or write a file for --config"
            )
        read_command(["serve", self.model, *arguments], {})
        if any(argument.split("=")[0] in ("--uds", "--host", "--port") for argument in arguments):
            raise ConfigError(f"options are {self.options!r}: the model itself gives --uds; leave the address out")
        return shlex.join(arguments)
