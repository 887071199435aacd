"""Answers that must match JSON schemas, regular expressions, choices and grammars.

`grammar.py` keeps the compiled grammars of requests and asks for new ones, and `compiler.py` makes them for llguidance;
`schema.py` rewrites a JSON schema with few keywords. `apart.py` and `worker.py` compile in child processes that may be
killed, because users' grammars can take long. The engine imports `matchers.py`, which follows grammars, and `masks.py`,
which keeps a matcher for each row; the engine imports no module that compiles.
"""
