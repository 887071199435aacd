"""Engines as processes: starting, supervising, replacing and feeding them, one or several behind one client.

`client.py` is the client that the server and `AsyncLLM` hold, `process.py` is the engine's process, and `wire.py` has
their messages. `supervisor.py` starts a process again when it has ended, `probation.py` finds the
request that ends engines, and `replicas.py` chooses the engine of a request. No torch in the client's process. Begin
with `client.py`.
"""
