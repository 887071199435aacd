"""The embedded model's training: text generator, tokenizer, trainer and evaluation."""
