"""The choice of a draft model: a smaller one with the same vocabulary."""

from pathlib import Path

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.models.embedder import spec_of_folder
from kvern.models.folder import model_folder
from kvern.models.hub import EMBEDDED_FOLDER
from kvern.models.loader import read_config
from kvern.spec.model import ModelSpec
from kvern.text.tokenizer import load_backend

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
    tokenizer, _ = load_backend(file)
    return None if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)
