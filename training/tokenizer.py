"""The chat format, and the byte-level BPE tokenizer trained on the generated text.

    <|begin|><|system|>...<|end|><|user|>...<|end|><|assistant|>...<|end|>

`python -m training.tokenizer FOLDER` trains the tokenizer and writes tokenizer.json, tokenizer_config.json and
chat_template.jinja. Digits are always single tokens; `<tool_call>` and `</tool_call>` are tokens that decoding keeps.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from training.draw import Draw, Example, Message, Tool
from training.text import stream

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL = (BEGIN, END, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PLAIN = ("<tool_call>", "</tool_call>")
BEGIN_ID, END_ID, PAD_ID, ASSISTANT_ID = 0, 1, 2, 5
VOCABULARY = 4096
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def tool_line(tool: Tool) -> str:
    function = tool.get("function", tool)
    return json.dumps({key: function[key] for key in ("name", "description", "parameters")}, ensure_ascii=False)


def render_calls(message: Message) -> str:
    """The calls of an assistant message as the model writes them."""
    bodies = (
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", [])
    )
    return "".join(f"<tool_call>{json.dumps(body, ensure_ascii=False)}</tool_call>" for body in bodies)


def render_turn(message: Message) -> str:
    return f"<|{message['role']}|>{message['content'].strip()}{render_calls(message)}{END}"


def render(messages: list[Message], tools: list[Tool] | None = None, add_generation_prompt: bool = False) -> str:
    """The same text as the Jinja template, without Jinja's cost; the tests compare the two."""
    turns, head = messages, ""
    if messages and messages[0]["role"] == "system":
        turns, head = messages[1:], messages[0]["content"].strip()
    if tools:
        head += "\n\nTools:" if turns is not messages else "Tools:"
        head += "".join("\n" + tool_line(tool) for tool in tools)
    first = f"<|system|>{head}{END}" if tools or turns is not messages else ""
    return BEGIN + first + "".join(map(render_turn, turns)) + ("<|assistant|>" if add_generation_prompt else "")


def document(example: Example) -> str:
    """An example as one training document, raw text included."""
    if example.text is not None:
        return BEGIN + example.text + END
    return render(example.messages, example.tools)


def train_tokenizer(conversations: int, seed: int, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Trains the BPE on `conversations` documents drawn with `seed`; special tokens get the first ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL, *PLAIN],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(conversations, seed), trainer)
    # The trainer marks all of its special tokens as such; the tool-call tags must survive decoding.
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def _plain_texts(conversations: int, seed: int) -> Iterator[str]:
    for _, example in zip(range(conversations), stream(Draw(seed)), strict=False):
        text = document(example)
        for token in (*SPECIAL, *PLAIN):
            text = text.replace(token, "\n")
        yield text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.read_text()
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [*SPECIAL[3:]],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(content)): _added(content) for content in (*SPECIAL, *PLAIN)
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _added(content: str) -> dict[str, object]:
    token = AddedToken(content, special=content in SPECIAL, normalized=False)
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {field: getattr(token, field) for field in fields}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.conversations, arguments.seed)
    save(tokenizer, arguments.folder)
    print(f"{tokenizer.get_vocab_size()} entries written to {arguments.folder}")


if __name__ == "__main__":
    main()
