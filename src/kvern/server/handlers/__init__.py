"""The handlers of HTTP routes, a file for each API. Bodies are read and answers written by `kvern.api`."""
