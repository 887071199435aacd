"""Answers that must match JSON schemas, regular expressions, choices and grammars.

`grammar.py` makes a grammar of a request's constraints, `schema.py` rewrites a JSON schema with the keywords that every
library knows, `backend.py` is the interface of libraries (`Backend`, `Matcher`), and `masks.py` keeps a matcher for
each row. `apart.py` and `worker.py` compile grammars in child processes that may be killed, because users' grammars can
take long.
"""
