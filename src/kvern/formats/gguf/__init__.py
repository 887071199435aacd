"""GGUF files: header, tensors, tokenizer and configuration, and their blocks as a format of weights.

`header.py` reads a header within the bounds of the file, `files.py` makes a model folder of it, `tensors.py` and
`names.py` list tensors under Llama's names, and `method.py` multiplies blocks. Nothing here needs the package `gguf`.
"""
