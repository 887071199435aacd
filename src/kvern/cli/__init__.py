"""The command `kvern`: a file for each command, and how options and flags are read.

`entry.py` starts an engine's process early, `main.py` finds the command, `options.py` makes flags, environment
variables and keys of files out of the fields of `EngineConfig` and `ServerConfig`, `help.py` prints their docstrings,
and `vllm_flags.py` is the table of vLLM's flags. To add an option: a field of `EngineConfig`; it is a flag at once.
Modules imported here are compiled to bytecode once. Above all other packages. Begin with `main.py`.
"""

from kvern.io.bytecode import keep_bytecode

keep_bytecode()
