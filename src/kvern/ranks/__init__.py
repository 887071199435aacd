"""Several processes that compute one model: their process groups, collectives, pipeline stages and expert placement.

Layers call what is here; the processes themselves are in `runner/ranks/`. Begin with `ranks.py`.
"""
