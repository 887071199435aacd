"""GGUF files: header, tensors, tokenizer and configuration, and their blocks as a format of weights."""
