"""Answers that must match JSON schemas, regular expressions, choices and grammars.

`grammar.py` knows the compiled grammars of requests, and `compiler.py` makes them for llguidance; `schema.py` rewrites
a JSON schema with few keywords. `apart.py` and `worker.py` compile in child processes that may be killed, because
users' grammars can take long. The engine has `matchers.py`, which follows grammars, and `masks.py`, which keeps a
matcher for each row; it imports nothing that compiles.
"""
