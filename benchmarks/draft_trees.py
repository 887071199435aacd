"""Tokens that a step would give with chains and with trees of drafts, by how high drafters rank what comes.

    python benchmarks/draft_trees.py --data ANSWERS.jsonl --draft-model kvern-1m --medusa HEADS --eagle HEAD

The model answers the prompts of the last conversations, greedily or with a temperature. A drafter ranks the token at
each place as it would draw it, by the same random numbers, behind the answer's own tokens: whatever tree of candidates
there is, the path along which they are accepted is the answer. The tree of N nodes is the best one that is the same in
each step: the N paths of ranks that came most often in every other answer. Both are then run along the other answers.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvern import LLM, SamplingParams
from kvern.draft_training.job import TrainedHead, entries_of, head_size
from kvern.drafting.models.medusa_heads import load_medusa
from kvern.models.decoder import Decoder, LayerInputs
from kvern.models.hub import resolve_model
from kvern.models.loader import LoadOptions, load_model
from kvern.quantize.blocks import LayersAttend
from kvern.sample.random import uniform

Ranks = tuple[int, ...]
Scores = Callable[[Tensor], list[Tensor]]
"""Of a text [L]: by how far ahead a draft is, logits [L, vocabulary]; in row p of the first those of token p + 1."""

DEPTH, EAGLE_DEPTH, WIDTH = 16, 8, 8
"""Drafts in a row, and candidates at each place."""
SIZES = (1, 2, 3, 4, 7, 15, 31, 63)
LENGTH = 512


def states_of(decoder: Decoder, text: Tensor, entries: Sequence[int] = ()) -> Tensor:
    inputs = LayerInputs(entries, decoder.build)
    attend = LayersAttend(decoder.spec, len(text))
    states = decoder(text, torch.arange(len(text)), attend, inputs=inputs)
    return inputs.rows() if entries else states


def of_model(decoder: Decoder) -> Scores:
    """A draft model goes on by its own text: how far ahead makes no difference."""

    def scores(text: Tensor) -> list[Tensor]:
        return [decoder.logits(states_of(decoder, text))] * DEPTH

    return scores


def of_medusa(folder: Path, target: Decoder) -> Scores:
    heads = load_medusa(folder, target)

    def scores(text: Tensor) -> list[Tensor]:
        states = states_of(target, text)
        return [heads.logits(states, head).roll(head + 1, 0) for head in range(heads.count)]

    return scores


def of_eagle(folder: Path, target: Decoder) -> Scores:
    weights = load_file(folder / "model.safetensors")
    drafted = weights["d2t"] + torch.arange(len(weights["d2t"]))
    head = TrainedHead(head_size(target.spec, len(drafted))).float()
    head.load_state_dict({name: tensor.float() for name, tensor in weights.items() if name not in ("d2t", "t2d")})

    def scores(text: Tensor) -> list[Tensor]:
        inputs = states_of(target, text, entries_of(len(target.spec.layers))).float()
        embedded = target.embed_tokens(text.roll(-1)).float()
        found = []
        for step in head(inputs[None], embedded[None], EAGLE_DEPTH):
            logits = torch.full((len(text), target.spec.vocab_size), float("-inf"))
            logits[:, drafted] = step[0]
            found.append(logits.roll(1, 0))
        return found

    return scores


def ranks(logits: Tensor, text: Tensor, temperature: float, seed: int) -> list[int]:
    """How many tokens the drafter would rather have than that behind each place but the last, or as many as `WIDTH`."""
    races = logits[:-1].double()
    if temperature:
        positions = torch.arange(1, len(text))
        numbers = uniform(torch.full_like(positions, seed), positions, torch.arange(logits.shape[1])[None])
        races = races / temperature - (-(-numbers.double()).log1p()).log()
    own = races.gather(1, text[1:, None])
    return (races > own).sum(1).clamp(max=WIDTH).tolist()


def paths(found: Sequence[Sequence[int]], begin: int, end: int) -> list[Ranks]:
    """Behind each token from `begin` to before `end`: the ranks of those that follow, while they are candidates."""
    result = []
    for newest in range(begin, end):
        path: list[int] = []
        for ahead in range(min(len(found), end - newest)):
            if (rank := found[ahead][newest + ahead]) == WIDTH:
                break
            path.append(rank)
        result.append(tuple(path))
    return result


def tokens_of_step(answers: Sequence[Sequence[Ranks]], tree: set[Ranks]) -> float:
    """Tokens over steps, when each step verifies these nodes behind its newest token."""
    tokens = steps = 0
    for answer in answers:
        newest = 0
        while newest < len(answer):
            path, accepted = answer[newest], 0
            while accepted < len(path) and path[: accepted + 1] in tree:
                accepted += 1
            newest += accepted + 1
            steps += 1
        tokens += len(answer)
    return tokens / steps


def report(name: str, answers: Sequence[Sequence[Ranks]], depth: int) -> None:
    counts: Counter[Ranks] = Counter()
    for answer in answers[::2]:
        for path in answer:
            counts.update(path[:length] for length in range(1, len(path) + 1))
    starts = sum(map(len, answers[::2]))
    print(f"{name}: chance of each rank for the first draft", *(f"{counts[(rank,)] / starts:.3f}" for rank in range(4)))
    for size in SIZES:
        chain = {(0,) * length for length in range(1, min(size, depth) + 1)}
        tree = {path for path, _ in counts.most_common(size)}
        shape = [sum(len(path) == length for path in tree) for length in range(1, max(map(len, tree)) + 1)]
        one, other = (tokens_of_step(answers[1::2], nodes) for nodes in (chain, tree))
        print(f"  {size:3} nodes: chain {one:.2f}, tree {other:.2f} ({other / one - 1:+.1%}), nodes by depth {shape}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvern-12m")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of messages, of which the last are answers")
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--draft-model")
    parser.add_argument("--medusa", type=Path)
    parser.add_argument("--eagle", type=Path)
    arguments = parser.parse_args()
    lines = arguments.data.read_text().splitlines()[-arguments.answers :]
    asked = [json.loads(line)["messages"][:-1] for line in lines]
    target = load_model(resolve_model(arguments.model), LoadOptions(dtype="float32", max_model_len=LENGTH))
    drafters: dict[str, Scores] = {}
    if arguments.draft_model:
        drafter = load_model(resolve_model(arguments.draft_model), LoadOptions(dtype="float32", max_model_len=LENGTH))
        drafters[arguments.draft_model] = of_model(drafter)
    if arguments.medusa:
        drafters["Medusa heads"] = of_medusa(arguments.medusa, target)
    if arguments.eagle:
        drafters["EAGLE-3 head"] = of_eagle(arguments.eagle, target)
    for temperature in arguments.temperature:
        print(f"temperature {temperature:g}")
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=128) for seed in range(len(asked))]
        with LLM(arguments.model, dtype="float32", max_model_len=LENGTH, speculation="off") as llm:
            outputs = llm.chat(asked, params)
        for name, scores in drafters.items():
            answers, depth = [], DEPTH
            for seed, output in enumerate(outputs):
                begin = len(output.prompt_token_ids)
                text = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
                found = [ranks(logits, text, temperature, seed) for logits in scores(text)]
                answers.append(paths(found, begin, len(text) - 1))
                depth = len(found)
            report(name, answers, depth)


if __name__ == "__main__":
    main()
