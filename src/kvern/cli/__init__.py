"""The command `kvern`: a file for each command, and how options and flags are read.

`entry.py` starts an engine's process early, `main.py` finds the command and prints help, `options.py` makes flags,
environment variables and keys of files out of the fields of `EngineConfig`, `SamplingOptions` and `ServerConfig`, whose
docstrings are the help. Modules imported here are compiled to
bytecode once. This package may import every other one, and none imports it. Begin with `main.py`.

To add an option of the engine: a field of `EngineConfig`; of the server: a field of `ServerConfig`; a sampling flag of
`run` and `chat`: a field of `SamplingOptions` (`options.py`) with the name that it has in `SamplingParams`. Each is a
flag, an environment variable and a key of files at once.
"""

from kvern.io.bytecode import keep_bytecode

keep_bytecode()
