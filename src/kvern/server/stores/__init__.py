"""Stored data of the server: files, batches, responses and conversations, with quotas for each key.

`database.py` is one SQLite file in the data folder, which one server process uses at a time. A running response is in
memory (`response_memory.py`), and its end is one transaction (`responses.py`).
"""
