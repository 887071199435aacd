"""The command `kvern`. What it imports is compiled once."""

from kvern.io.bytecode import keep_bytecode

keep_bytecode()
