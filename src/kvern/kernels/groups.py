"""Groups of kernels: what of a model is left to PyTorch when one of their kernels does not work.

`Build.kernels` and `Plan.kernels` have their names.
"""

from collections.abc import Mapping

PACKAGE = "kvern.kernels."
MODULES: Mapping[str, tuple[str, ...]] = {
    "activation": ("activation",),
    "adapters": ("adapted_product", "adapters"),
    "attention": (
        "attention_decode",
        "attention_latent",
        "attention_latent_hopper",
        "attention_prefill",
        "attention_prefix",
        "attention_split",
    ),
    "batch": ("batch", "drafts"),
    "few_rows": ("linear._matvec_kernel",),
    "hopper": ("attention_hopper", "cache_plain"),
    "hopper_linear": (
        "codes_hopper",
        "product_hopper",
        "stream_blocks_hopper",
        "stream_experts_hopper",
        "stream_hopper",
        "stream_lanes_hopper",
        "stream_packed_hopper",
    ),
    "linear": ("linear._small_matmul_kernel",),
    "masks": ("masks",),
    "moe": ("moe", "moe_direct", "moe_routing"),
    "norm": ("norm",),
    "peer_exchange": ("peer_exchange",),
    "peer_sum": ("peer_sum",),
    "quantized": (
        "arrange",
        "moe_packed",
        "moe_scaled",
        "packed_product",
        "plain_weights",
        "quantize_rows",
        "resident_row",
        "scaled_product",
    ),
    "rotary": ("rotary", "store_latents"),
    "sampling": ("constraints", "filters", "logprobs", "sampling"),
    "shared_norm": ("shared_norm",),
    "states": ("accepted_drafts", "convolution", "delta_net", "delta_net_drafts", "mamba2"),
    "texts": ("attention_texts", "text_means"),
    "windows": ("batch._read_slots_kernel",),
}
"""The modules whose kernels are in each group, or single kernels."""
ENCODER_GROUPS = frozenset({"texts", "rotary", "activation"})
"""The groups of an encoder, beside what PyTorch does."""
NVIDIA_GROUPS = frozenset({"peer_exchange", "peer_sum", "shared_norm"})
"""The groups whose kernels wait for other ranks by assembly of NVIDIA's."""
MODEL_GROUPS = frozenset(MODULES) - {"texts"}
"""The groups of a model that generates text."""
_GROUP_OF = {name: group for group, names in MODULES.items() for name in names}


def group_of(module: str, kernel: str) -> str:
    """The group of a kernel by the full name of its module; kernels of other packages are a group a module.

    Raises KeyError for a kernel of `kvern.kernels` that is in no group.
    """
    if not module.startswith(PACKAGE):
        return module
    name = module.removeprefix(PACKAGE)
    return _GROUP_OF.get(f"{name}.{kernel}") or _GROUP_OF[name]
