"""Plans of how a model is divided among GPUs, with estimates of memory and time.

`hardware.py` describes machines, `estimate.py` counts bytes and operations of a step, and `choice.py` compares all
divisions. Reads headers of files only; nothing is loaded. `kvern plan` and `kvern serve` without `-tp`, `-pp` and
`-dp` use it.
"""
