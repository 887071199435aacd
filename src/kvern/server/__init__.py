"""The HTTP server: routes, keys, limits, and what is kept on disk. No torch is imported in its process.

`run.py` starts it, `gate.py` checks keys and origins, `app.py` has the routes, `handlers/` a file for each API, and
`service.py` what all of them share: bounds, deadlines, who may see whose cached blocks. Bodies are read and answers
written by `kvern.api`; engines are behind `kvern.serving.client`. Begin with `app.py`.
"""
