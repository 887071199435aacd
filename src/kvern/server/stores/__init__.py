"""What the server keeps: files, batches, responses and conversations, with quotas for each key.

`database.py` is one SQLite file in the data folder, which one server uses at a time. A response that runs is in
memory (`response_memory.py`), and its end is one transaction (`responses.py`).
"""
