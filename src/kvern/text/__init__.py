"""Text to token ids and back: tokenizers, detokenizers, and the chat templates that checkpoints bring.

Begin with `tokenizer.py` and `chat_template.py`. No module here imports torch or transformers.
"""
