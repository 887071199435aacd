"""Python's compiled modules, stored in kvern's cache folder if they cannot be stored next to their sources.

Compiling the thousand modules that PyTorch imports takes seconds at every start. Python stores compiled modules unless
the packages' folder is not writable or PYTHONDONTWRITEBYTECODE is set; container images often have both.
"""

import importlib.util
import os
import sys
from pathlib import Path

RARELY_IMPORTED = r"/(_dynamo|_inductor|_numpy|distributed/\w+|onnx|testing)/"
"""Parts of PyTorch that are compiled when they are first imported."""


def cache_home() -> Path:
    """Returns kvern's folder in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvern"


def bytecode_environment() -> dict[str, str]:
    """Returns variables that let a Python process store compiled modules in the cache folder; empty if it need not.

    A PYTHONPYCACHEPREFIX is respected, and nothing is stored if the cache folder is not writable.
    """
    torch = None if sys.pycache_prefix else importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or torch.cached is None or Path(torch.cached).exists():
        return {}
    if not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK):
        return {}
    try:
        folder = Path(os.environ.get("KVERN_CACHE_DIR") or cache_home()).expanduser().resolve() / "bytecode"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # nobody may write there, or there is no home
        return {}
    if not os.access(folder, os.W_OK):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def keep_bytecode() -> None:
    """Lets this process and those that it starts store what they compile from now on."""
    if environment := bytecode_environment():
        os.environ.update(environment)
        sys.pycache_prefix, sys.dont_write_bytecode = environment["PYTHONPYCACHEPREFIX"], False
        _compile_torch(Path(sys.pycache_prefix))


def _compile_torch(prefix: Path) -> None:
    """Starts compiling PyTorch's modules on all cores, unless that was started before; this process does not wait."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    sources = Path(torch.origin).parent
    try:
        prefix.joinpath(*sources.parts[1:]).mkdir(parents=True)
    except FileExistsError:
        return
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", RARELY_IMPORTED, str(sources)]
    # Nobody waits for that process, nor for what it might print.
    nowhere = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere)
