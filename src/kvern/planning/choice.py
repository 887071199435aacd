"""The best division of a model among cards. A server asks for it as a process: `python -m kvern.planning.choice`.

The process reads an engine's options from stdin and writes the `Choice` to stdout, both as JSON. It is a process of its
own because asking PyTorch about GPUs allocates memory on each until the process ends.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvern.config import EngineConfig
from kvern.errors import ConfigError, KvernError
from kvern.models.loader import outline_model
from kvern.models.precision import shares
from kvern.planning.estimate import Estimate, Model, Split, Workload, estimate, splits
from kvern.planning.hardware import Card, check_alike, names_of, this_machine
from kvern.runner.device import resolve_device
from kvern.runner.ranks.rank_limits import check_ranks


class Choice(msgspec.Struct):
    """The options of the best division with the reason; or only the reason why there is no choice."""

    reason: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False


def ranked(
    model: Model, cards: Sequence[Card], workload: Workload, possible: Callable[[Split], bool] = lambda split: True
) -> list[Estimate]:
    """Returns estimates of each way to divide the model among all cards, the best first. `possible` filters the ways.

    Raises ConfigError if the cards differ.
    """
    check_alike(cards)
    least = min(cards, key=lambda card: card.memory)
    ways = [split for split in splits(len(cards), model) if possible(split)]
    return sorted(
        (estimate(model, least, split, workload) for split in ways), key=lambda item: (-item.rate, item.weights)
    )


def model_of(config: EngineConfig, folder: Path) -> Model:
    """Returns the properties of the model in `folder` that its costs depend on, from the headers of its files.

    Raises KvernError.
    """
    device = "cuda" if config.device == "cuda" else resolve_device(config).type  # other machines have cards, too
    given = config.dtype, config.load_format, config.quantization
    outline = outline_model(folder, *given, int8_head=config.has_int8_head(device))
    return Model(outline.spec, str(outline.build.dtype).removeprefix("torch."), shares(outline), outline.build.linear)


def _share(part: float, word: str) -> str:
    """Returns a difference in words; one that rounds to 0 % is none."""
    return f"{part:.0%} {word}" if part >= 0.005 else "as much"


def verdict(found: Sequence[Estimate]) -> str:
    """Returns which split was chosen and why the next lost; `found` is sorted, best first."""
    best = found[0]
    if best.lacks:
        return f"It fits in no way: with {best.split} {best.lacks}."
    if len(found) == 1:
        return f"Nothing else is possible: {best.split}."
    other = found[1]
    if other.lacks:
        return f"Chosen: {best.split}. With {other.split} {other.lacks}."
    change = other.decode / best.decode - 1
    taken = _share(abs(change), "longer" if change > 0 else "less")
    less = f"{_share(1 - other.rate / best.rate, 'less')}: its steps take {taken}, with a batch of {other.batch}"
    return f"Chosen: {best.split}. {str(other.split).capitalize()} would give {less}."


def runnable(config: EngineConfig, folder: Path, model: Model) -> Callable[[Split], bool]:
    """Returns which splits engines of the model in `folder` can have, of those without pipeline stages."""

    def possible(split: Split) -> bool:
        options: dict[str, Any] = split.options
        if split.pipeline > 1:
            return False  # their steps with prompts have no CUDA graphs, which estimates ignore
        try:
            check_ranks(replace(config, **options), folder, model.spec)
        except ConfigError:
            return split.cards == 1
        return True

    return possible


def choose(config: EngineConfig, cards: Sequence[Card] | None = None) -> Choice:
    """Chooses among cards, by default those of this machine, for the default workload, shortened to the model's
    context; `config.model` is a folder. Raises KvernError."""
    folder = Path(config.model or "")
    model = model_of(config, folder)
    cards = this_machine(config, model.dtype) if cards is None else cards
    longest = config.max_model_len or model.spec.max_position_embeddings
    usual = Workload()
    if usual.input + usual.output > longest:
        usual = Workload(input=max(longest // 2, 1), output=max(longest // 4, 1))

    found = ranked(model, cards, usual, runnable(config, folder, model))
    options: dict[str, Any] = {} if found[0].lacks else found[0].split.options
    return Choice(f"{names_of(cards)}: {verdict(found)}", **options)


def main() -> int:
    """Answers with exit code 0 in any case: a server can start without a plan."""
    try:
        choice = choose(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except KvernError as error:
        choice = Choice(f"there is no plan for these GPUs, and one engine takes the first: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(choice))
    return 0


if __name__ == "__main__":
    sys.exit(main())
