"""The command `kvern`. Modules that it imports are compiled to bytecode once."""

from kvern.io.bytecode import keep_bytecode

keep_bytecode()
