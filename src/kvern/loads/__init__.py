"""Loads: requests by arrival, lengths and shared blocks, without their texts.

`request.py` is the form that recorded and drawn loads share. `file.py` reads and writes it as JSONL, `drawn.py` draws
it from a line of properties, and `source.py` is the option that takes either. Imports plain data only, so that a
simulator, a load generator and a server's process can use it. Begin with `request.py`.
"""
