"""The description of the HTTP API (OpenAPI 3.1). `document.py` puts it together."""
