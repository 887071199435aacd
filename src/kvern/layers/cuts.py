"""The check that ranks do not cut a matrix among numbers that are stored together."""

from typing import Literal

from kvern.errors import ConfigError
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod
from kvern.ranks.ranks import Share


def check_cut(
    build: BuildOptions,
    part: str,
    whole: LinearMethod,
    axis: Literal["outputs", "inputs"],
    share: Share,
    *,
    instead: str = "",
) -> None:
    """Raise ConfigError where a rank's share of a part's outputs or inputs begins or ends among such numbers.

    `whole` is the weight of which `part` is one; `instead` is what else could be done, for people.
    """
    (held, count), size = share, build.ranks.size
    together = whole.cuts()[axis == "inputs"]
    if not any(end % together and end != count for end in (held.start, held.stop)):
        return
    stored = ", ".join(dict.fromkeys(method.name for method in whole.methods()))
    fits = next((other for other in range(size - 1, 1, -1) if count % (other * together) == 0), 1)
    raise ConfigError(
        f"tensor_parallel_size is {size}, and {build.name(part)} is stored as {stored}: {together} of its {count} "
        f"{axis} stay together, and a share has {len(held)}; {instead}choose tensor_parallel_size {fits}, or a model "
        "whose groups divide the shares"
    )
