"""The engine: the scheduler, the loop that submits and collects steps, and what is done before and after them.

`core.py` is the loop, `scheduler.py` decides who runs and how many tokens each computes, `inputs.py` validates and
tokenizes, `output.py` makes text of tokens, `factory.py` builds all of it. `trial.py` finds the request that makes a
step fail, `pace.py` and `step_*.py` keep the time between tokens near its target, `step_drift.py` says when steps
become slower, `beams.py` searches beams. The scheduler imports no torch and reads no clock. Imports runner, cache and
drafting. Begin with `scheduler.py`.
"""
