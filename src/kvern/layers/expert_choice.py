"""The choice of the class that holds a mixture's experts, by the formats of their weights and the kernels."""

from collections.abc import Mapping
from dataclasses import replace

from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions
from kvern.layers.expert_share import ExpertShare
from kvern.layers.experts import Experts, names_of
from kvern.layers.linear import check_cut
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearShape
from kvern.layers.row_experts import META, RowStackedExperts, SeparateExperts, stacks
from kvern.ranks.ranks import Share
from kvern.spec.model import MoeSpec


def make_experts(hidden_size: int, spec: MoeSpec, build: Build) -> Experts:
    """The experts of a mixture, whose gate, up and down may be stored in different formats."""
    formats = {name: build.linear_format(f"experts.{name}_proj") for name in names_of(spec)}
    first = formats["up"]
    if all(item is first for item in formats.values()):
        return experts_of_format(hidden_size, spec, build, first)
    return experts_by_methods(hidden_size, spec, build, formats)


def experts_of_format(hidden_size: int, spec: MoeSpec, build: BuildOptions, stored: LinearFormat) -> Experts:
    """The experts of a mixture whose weights all have one format."""
    own = stored.experts(hidden_size, spec, build)
    if own is not None:
        return own
    formats = dict.fromkeys(names_of(spec), stored.of_experts(hidden_size, spec))
    return experts_by_methods(hidden_size, spec, build, formats)


def experts_by_methods(
    hidden_size: int, spec: MoeSpec, build: BuildOptions, formats: Mapping[str, LinearFormat]
) -> Experts:
    """Experts whose "gate", if there is one, "up" and "down" have these formats: stacked by rows where they can be.

    A format that does not join parts keeps more of a part than rows, as an order of its inputs: it is not stacked.
    Raises ConfigError where ranks would cut what is stored together.
    """
    if build.ranks.size > 1:
        _check_cuts(hidden_size, spec, build, formats)
    gate, down = formats.get("gate", formats["up"]), formats["down"]
    if gate is formats["up"] and gate.joins and down.joins:
        outline = replace(build, device=META)
        gate_up = gate.linear(LinearShape(spec.first_width, hidden_size, build.dtype, META), outline)
        other = down.linear(LinearShape(hidden_size, spec.width, build.dtype, META), outline)
        if stacks(gate_up, spec.width) and stacks(other, hidden_size):
            if spec.gated and {"moe", "quantized"} <= build.kernels:
                from kvern.layers.fused_packed_experts import FusedPackedExperts, fuses

                if fuses(gate_up, other, spec.activation):
                    return FusedPackedExperts(hidden_size, spec, build, gate, down)
            return RowStackedExperts(hidden_size, spec, build, gate, down)
    return SeparateExperts(hidden_size, spec, build, formats)


def _check_cuts(hidden_size: int, spec: MoeSpec, build: BuildOptions, formats: Mapping[str, LinearFormat]) -> None:
    """Raise ConfigError where a share of an expert begins or ends among numbers that are stored together."""
    share, instead = ExpertShare(hidden_size, spec, build.ranks, META), "turn enable_expert_parallel on, or "
    alone = replace(build.whole, device=META, kernels=frozenset())
    for name, linear_format in formats.items():
        (outputs, inputs), (part,) = share.shape(name), share.parts(name)
        whole = linear_format.linear(LinearShape(outputs, inputs, build.dtype, META), alone)
        check_cut(build, f"experts.{name}_proj", whole, "outputs", Share(part.outputs, outputs), instead=instead)
        check_cut(build, f"experts.{name}_proj", whole, "inputs", Share(part.inputs, inputs), instead=instead)
