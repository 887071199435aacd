"""The choice of a draft model, and what its folder holds: a smaller model, a head, or Medusa heads."""

from pathlib import Path

from kvern.config import EngineConfig
from kvern.errors import ConfigError, UnsupportedModel
from kvern.models.checkpoint import read_headers
from kvern.models.embedder import spec_of_folder
from kvern.models.folder import model_folder
from kvern.models.hub import EMBEDDED_FOLDER
from kvern.models.loader import read_config
from kvern.models.registry import Config
from kvern.spec.model import ModelSpec

EMBEDDED_DRAFTS = {"kvern-12m": "kvern-1m"}
"""The draft models of embedded models."""
OWN_LAYER = "mtp"
"""The layer for multi-token prediction in the model's own checkpoint, in the place of another's name."""


def draft_folder(config: EngineConfig, folder: Path, device: str) -> Path | None:
    """Returns the folder of the draft model for the model in `folder`, or None. Raises as `model_folder`.

    An embedded model gets its own on a CPU: on a GPU CUDA graphs make it faster than drafts do.
    """
    if config.speculation == "off":
        return None
    name = config.draft_model
    if name == OWN_LAYER:
        return folder
    if name is None and config.proposer is None and device == "cpu" and folder.parent == EMBEDDED_FOLDER:
        name = EMBEDDED_DRAFTS.get(folder.name)
    if name is None:
        return None
    return model_folder(EngineConfig(name, download_dir=config.download_dir, cache_dir=config.cache_dir))


def read_draft(draft: Path, folder: Path, spec: ModelSpec, longest: int) -> ModelSpec:
    """Returns the specification of a draft model for the model in `folder`, whose sequences have `longest` tokens.

    Raises ConfigError if it cannot draft for that model.
    """
    found = spec_of_folder(draft, read_config(draft))
    files = [path / "tokenizer.json" for path in (folder, draft)]
    is_same = all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes()
    refused = {
        "it is an encoder, which generates nothing": found.encoder is not None,
        "its layers keep states, which cannot go back behind rejected drafts": bool(found.recurrent),
        "its tokenizer has other tokens: serve it apart, and give proposer remote, draft_url and draft_as_text": (
            not is_same and _vocabulary(files[0]) != _vocabulary(files[1])
        ),
        f"its vocabulary of {found.vocab_size} is larger than the model's {spec.vocab_size}": (
            found.vocab_size > spec.vocab_size
        ),
        f"it has positions for {found.max_position_embeddings} tokens, and max_model_len is {longest}: lower that": (
            found.max_position_embeddings < longest
        ),
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ConfigError(f"draft_model {str(draft)!r} cannot guess for {folder.name}: {reason}")
    return found


def _vocabulary(file: Path) -> dict[str, int] | None:
    """The tokens of a tokenizer, by their ids; None: there is none."""
    from kvern.text.tokenizer import load_backend

    tokenizer, _ = load_backend(file)
    return None if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)


def is_medusa(folder: Path) -> bool:
    """True if a folder holds Medusa heads. Raises ModelNotFound or CorruptCheckpoint."""
    config = read_config(folder)
    named = (*(config.get("architectures") or ()), config.get("model_type"))
    return "medusa_num_heads" in config or any("medusa" in str(name).lower() for name in named)


def is_draft_head(folder: Path, *, dummy: bool = False) -> bool:
    """True if a folder holds a draft head and no whole model; `dummy` reads only its configuration.

    Raises ModelNotFound or CorruptCheckpoint.
    """
    config = read_config(folder)
    named = (*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type"))
    if "draft_vocab_size" in config or any("eagle" in str(name).lower() for name in named):
        return True
    return not dummy and any(tensor.name == "fc.weight" for tensor in read_headers(folder))


def reads_embeddings(config: EngineConfig, draft: Path | None) -> bool:
    """True if the drafter in the folder `draft` is a head of this kind. Raises as `is_draft_head`."""
    if draft is None or config.draft_model == OWN_LAYER:
        return draft is not None
    return not is_medusa(draft) and is_draft_head(draft, dummy=config.load_format == "dummy")


def entries_of(config: Config, layers: int) -> tuple[int, ...]:
    """The layers, of so many, whose inputs a head of EAGLE-3 begins with; none: it is another, which reads last states.

    Within `eagle_config` layers are numbered by what they give, elsewhere by what they are given. Raises
    UnsupportedModel.
    """
    if "draft_vocab_size" not in config:
        return ()
    nested = config.get("eagle_config") or {}
    if given := nested.get("eagle_aux_hidden_state_layer_ids"):
        entries = tuple(index + 1 for index in given)
    else:
        given = config.get("eagle_aux_hidden_state_layer_ids")
        entries = tuple(given or (min(2, layers), layers // 2, max(layers - 3, 0)))
    if not all(0 <= entry <= layers for entry in entries):
        raise UnsupportedModel(f"eagle_aux_hidden_state_layer_ids {given!r:.60}: the model has {layers} layers")
    return entries
