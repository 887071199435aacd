"""Several models in one server: which of them are awake, and how one is woken.

    awake    an engine takes requests
    asleep   the engine's process stays without weights and KV cache; no engine can do that yet
    cold     there is no process

`policy.py` decides, as a pure function of requests, measurements and the time that it is given: `Residency`.

Begin with `policy.py`; it imports nothing of kvern.
"""
