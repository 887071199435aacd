"""The description of the HTTP API (OpenAPI 3.1), at /openapi.json and /docs.

`document.py` puts it together; the other files describe the bodies and answers of an API each.
"""
