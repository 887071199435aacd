"""The handlers of HTTP routes: a body becomes an `Ask`, outputs become an answer or a stream.

A file for each API. Bodies are read and answers are written by `kvern.api`; what all handlers share is in
`server/service.py`. To add an API: a file here, one in `kvern/api/`, and its routes in `server/operations.toml`. Begin
with `completions.py`.
"""
