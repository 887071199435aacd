"""Engines as processes: starting, supervising, replacing and feeding them, one or several behind one client.

`client.py` is what the server holds, `process.py` is the engine's process, `wire.py` their messages, and
`supervisor.py` starts a process anew when it has ended.
"""
