"""A Llama that says what it is told to: real weights, a real tokenizer and a chat template that choose the answer.

Programs that work with tools need a model that calls them well, and no model that fits in a test does. In this one
each token of a script has one successor (the weights of the head say which), and the chat template ends the prompt with
the first token of the script that suits the conversation: a call if one of its tools is there, an answer after a
tool's result. Everything between the template and the parser of calls works as with any other model.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
HIDDEN = 128
POSITIONS = 65536
VOCABULARY = 6000
DOCUMENTS = Path(__file__).parents[2] / "docs"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Call:
    """The call that the model makes first, if a tool of this name is offered."""

    tool: str
    arguments: Mapping[str, object]
    thought: str = ""

    @property
    def text(self) -> str:
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        call = json.dumps({"name": self.tool, "arguments": self.arguments})
        return f"{thought}<tool_call>\n{call}\n</tool_call>"


def pieces(text: str, used: set[str], length: int = 24) -> list[str]:
    """The text in tokens of which each has one successor only: none of them is in any other text."""
    found: list[str] = []
    while text:
        size = min(length, len(text))
        while text[:size] in used and size < len(text):
            size += 1
        if text[:size] in used:  # the end of another text, too: it goes with what is before
            found[-1] += text
            break
        found.append(text[:size])
        text = text[size:]
    used.update(found)
    return found


def template(calls: Sequence[Call], heads: Mapping[str, str]) -> str:
    """Hermes's form of tools; the prompt ends with the head of a script."""
    asked = "".join(
        f"{{%- if chosen.head == '{heads['answer']}' and '{call.tool}' in names -%}}"
        f"{{%- set chosen.head = '{heads[call.tool]}' -%}}{{%- endif -%}}\n"
        for call in calls
    )
    return (
        "{%- if tools -%}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}"
        "{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}"
        '{{ \'\\n</tools>\\nCalls: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\' }}'
        "{%- endif -%}\n"
        "{%- for message in messages -%}"
        "{{ '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.reasoning_content -%}"
        "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}"
        "{{ message.content or '' }}"
        "{%- for call in message.tool_calls or [] -%}"
        '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor -%}"
        "{{ '<|im_end|>\\n' }}{%- endfor -%}\n"
        f"{{%- set chosen = namespace(head='{heads['answer']}') -%}}\n"
        "{%- set names = (tools or []) | map(attribute='function.name') | list -%}\n"
        f"{{%- if messages[-1].role == 'tool' -%}}{{%- set chosen.head = '{heads['done']}' -%}}{{%- else -%}}\n"
        f"{asked}{{%- endif -%}}\n"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' + chosen.head }}{%- endif -%}"
    )


def make_scripted_model(folder: Path, calls: Sequence[Call], answer: str, done: str) -> Path:
    """Write the checkpoint and return its folder.

    `answer` is said where none of the calls can be made, `done` after a tool's result.
    """
    texts = {**{call.tool: call.text for call in calls}, "answer": answer, "done": done}
    heads = {name: f"<|{name}|>" for name in texts}
    used: set[str] = set()
    scripts = {name: pieces(text, used) for name, text in texts.items()}
    backend = _tokenizer([*SPECIAL, *heads.values()], [piece for script in scripts.values() for piece in script])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(template(calls, heads))
    vocabulary = backend.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocabulary}))
    chains = [
        [backend.token_to_id(token) for token in (heads[name], *script, "<|im_end|>")]
        for name, script in scripts.items()
    ]
    save_file(_weights(chains, vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer(special: Sequence[str], script: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level, trained on the project's own documentation: agents' prompts are long, and mostly English."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train([str(path) for path in sorted(DOCUMENTS.rglob("*.md"))], trainer)
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in script])
    return backend


def _weights(chains: Sequence[Sequence[int]], vocabulary: int) -> dict[str, torch.Tensor]:
    """Attention and MLP add nothing; the head gives each token of a chain its successor."""
    embedding, head = torch.zeros(vocabulary, HIDDEN), torch.zeros(vocabulary, HIDDEN)
    links = [link for chain in chains for link in itertools.pairwise(chain)]
    assert len(links) <= HIDDEN, f"{len(links)} tokens of scripts: at most {HIDDEN}"
    for place, (token, successor) in enumerate(links):
        embedding[token, place] = 1
        head[successor, place] = 4
    layer = {
        "self_attn.q_proj": (16, HIDDEN),
        "self_attn.k_proj": (16, HIDDEN),
        "self_attn.v_proj": (16, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 16),
        "mlp.gate_proj": (32, HIDDEN),
        "mlp.up_proj": (32, HIDDEN),
        "mlp.down_proj": (HIDDEN, 32),
    }
    weights = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    return {**weights, "model.embed_tokens.weight": embedding, "lm_head.weight": head}
