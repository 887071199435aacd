"""Python's compiled modules, kept in kvern's cache folder where they are not kept beside their sources.

Compiling the thousand modules that PyTorch imports takes seconds of every start. Python keeps what it compiled, unless
packages are where this user may not write, or PYTHONDONTWRITEBYTECODE is set: images of containers often have both.
"""

import importlib.util
import os
import sys
from pathlib import Path

RARELY_IMPORTED = r"/(_dynamo|_inductor|_numpy|distributed/\w+|onnx|testing)/"
"""Parts of PyTorch: whoever imports one compiles it."""


def cache_home() -> Path:
    """The folder of kvern among the caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvern"


def bytecode_environment() -> dict[str, str]:
    """What tells a Python that is started to keep compiled modules in the cache folder; nothing where it need not.

    A PYTHONPYCACHEPREFIX is left as it is, and nothing is kept if the cache folder cannot be written to.
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
    """Let this process, which is ours, and those that it starts, keep what they compile from here on."""
    if environment := bytecode_environment():
        os.environ.update(environment)
        sys.pycache_prefix, sys.dont_write_bytecode = environment["PYTHONPYCACHEPREFIX"], False
        _compile_torch(Path(sys.pycache_prefix))


def _compile_torch(prefix: Path) -> None:
    """Have all cores compile PyTorch's modules, if nobody began to: who imports it meanwhile finds most of them."""
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
