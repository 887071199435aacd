"""Engines without a model: the real core, scheduler, cache and router over a virtual clock.

A simulated executor gives each step the seconds of a model of costs, and tokens without meaning. Everything that
decides is what a server runs. May import what stands below it, such as `engine`, `serving` and `planning`; it needs no
device. Begin with `engine.py`; `executor.py` has the steps, `costs.py` what they take, and `fleet.py` several engines.
"""
