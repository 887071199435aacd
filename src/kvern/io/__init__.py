"""The machine around kvern: files, sockets, JSON, the terminal, compiled modules, and nodes of a Ray cluster.

Everything may import this package; it imports `kvern.errors` alone.
"""
