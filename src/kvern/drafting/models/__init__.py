"""Draft heads as modules, and the checkpoints that they are read from.

`head.py` is an EAGLE, EAGLE-3 or MTP head, `medusa_heads.py` Medusa heads and their checkpoints. `formats.py` reads
what different authors write, as data; `choice.py` finds out what a draft model's folder holds.
"""
