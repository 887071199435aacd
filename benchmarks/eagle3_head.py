"""Write the configuration of an EAGLE-3 head beside a model of Llama's kind, for benchmarks with random weights.

    python benchmarks/eagle3_head.py --model MODEL --output HEAD
    python benchmarks/synthetic_acceptance.py --model MODEL --draft-model HEAD --load-format dummy

Its layer has the shapes of the model's, as those have that EAGLE-3's authors trained for Llama 3.1 8B.
"""

import argparse
import json
from pathlib import Path

from kvern.models.loader import read_config

SHAPES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--output", required=True, type=Path, help="folder of the head")
    parser.add_argument("--drafted", type=int, default=32000, help="tokens that it may draft")
    arguments = parser.parse_args()
    model = read_config(arguments.model)
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": arguments.drafted,
        **{name: model[name] for name in SHAPES if name in model},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "config.json").write_text(json.dumps(head, indent=2))


if __name__ == "__main__":
    main()
