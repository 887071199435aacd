"""Answers held to JSON schemas, regular expressions, choices and grammars.

`grammar.py` makes a grammar of what a request asks, `schema.py` says a JSON schema in the few words that every
library knows, `backend.py` is the interface of libraries (`Backend`, `Matcher`), and `masks.py` keeps a matcher for
each row. `apart.py` and `worker.py` compile grammars in child processes, which may be killed: what users send may
take long.
"""
