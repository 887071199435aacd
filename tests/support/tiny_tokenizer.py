"""Small tokenizers of both kinds, trained on a few lines, as files of a model."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["hello world, you and me and them", "naïve café 😀 你好世界", "def f(x):\n    return x + 1\n"] * 4
SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level tokenizer as in Llama 3 and Qwen: every token is a run of bytes."""
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    result.add_tokens(["<call>", "漢字"])
    return result


def sentencepiece() -> tokenizers.Tokenizer:
    """A SentencePiece tokenizer as in Llama 2 and Gemma: spaces belong to tokens; unknown characters become bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    result = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<s>"))
    result.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # The base vocabulary is trained on letters only, so that everything else needs the fallback.
    result.train_from_iterator(
        ["hello world you and me and them"] * 4,
        trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL + fallback, show_progress=False),
    )
    vocabulary = json.loads(result.to_str())
    vocabulary["added_tokens"] = [token for token in vocabulary["added_tokens"] if token["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(vocabulary))


def save(folder: Path, backend: tokenizers.Tokenizer, template: str | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)
