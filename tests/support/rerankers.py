"""Tiny random rerankers with the prompts of Qwen3-Reranker, and what transformers makes of them.

folder = make_reranker(tmp_path / "asked")          # a language model whose template is Qwen3's
folder = make_classifier(tmp_path / "classifier")   # one label, and a template with the roles of reranking
expected_scores(folder, pairs)                      # the card's formula, pair by pair
"""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.support.families import make_model
from tests.support.tiny_tokenizer import save

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of the model card."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ROLES = "".join(
    f"{{% set {name} = messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | list %}}"
    for name, role in (("instruction", "system"), ("query", "query"), ("document", "document"))
) + PROMPT.format(
    instruction=f"{{{{ instruction | first | default('{INSTRUCTION}') }}}}",
    query="{{ query | first }}",
    document="{{ document | first }}",
).replace("</think>\n\n", "</think>\n\n\n")  # a template's last line break is not part of it
Pairs = list[tuple[str, str]]


def make_reranker(folder: Path) -> Path:
    """A Qwen3 that is asked for yes or no."""
    size = _save_tokenizer(folder, CHAT)
    make_model("qwen3", vocab_size=size, max_position_embeddings=512, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def make_classifier(folder: Path) -> Path:
    """The reranker converted to a classifier with one label."""
    from transformers import Qwen3ForSequenceClassification

    language = make_model("qwen3", vocab_size=_save_tokenizer(folder, ROLES), max_position_embeddings=512)
    language.config.num_labels = 1
    model = Qwen3ForSequenceClassification(language.config).float().eval()
    model.model.load_state_dict(language.model.state_dict())
    model.score.weight.data = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2
    model.save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path, template: str) -> int:
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    result.train_from_iterator(
        [PROMPT, INSTRUCTION, "yes", "no", "mice and berries are what red foxes eat"] * 4, trainer
    )
    save(folder, result, template, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return int(result.get_vocab_size())


def prompt_of(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    return PROMPT.format(instruction=instruction, query=query, document=document)


def expected_scores(folder: Path, pairs: Pairs, instruction: str = INSTRUCTION) -> list[float]:
    """The score of each pair alone by transformers: P(yes) against P(no), or the sigmoid of the label."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    is_classifier = "Classification" in config.architectures[0]
    kind = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    yes_no = [tokenizer.convert_tokens_to_ids(answer) for answer in ("yes", "no")]
    assert None not in yes_no
    scores = []
    for query, document in pairs:
        ids = tokenizer(
            prompt_of(query, document, instruction), add_special_tokens=False, return_tensors="pt"
        ).input_ids
        with torch.inference_mode():
            logits = model(ids).logits[0]
        score = logits.sigmoid() if is_classifier else logits[-1, yes_no].softmax(-1)
        scores.append(float(score[0]))
    return scores
