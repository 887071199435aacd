"""Access to the machine: files, sockets, JSON, the terminal, compiled modules, and nodes of a Ray cluster.

Every package may import this one; it imports only `kvern.errors`.
"""
