"""Text to token ids and back: tokenizers, detokenizers, and the chat templates of checkpoints.

Begin with `tokenizer.py` and `chat_template.py`. No module here imports torch or transformers.
"""
