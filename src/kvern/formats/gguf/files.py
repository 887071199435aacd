"""The files of a GGUF model, and those of a model folder that are made of them. No torch is imported.

The tokenizer becomes tokenizer.json and tokenizer_config.json: "gpt2" is byte-level BPE, whose text is first split by
the regular expressions of its `tokenizer.ggml.pre`; "llama" is SentencePiece's BPE, which joins the pair with the
highest score first and falls back to bytes.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvern.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel, shown
from kvern.formats.gguf.config import config_of
from kvern.formats.gguf.header import GgufModel, Header, read_gguf_header

logger = logging.getLogger("kvern")

MOST_TOKENS = 1 << 21
MOST_CHARACTERS = 1024
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
"""Kinds of tokens; 1 is a normal one."""
SPACE = "\u2581"
ENDINGS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
)
"""Tokens that end an answer, even if the file says otherwise."""
_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d|{_WORDS}|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_MARKS}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}|\p{{N}}{{1}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _CASED.replace("{0}", f"{_CONTRACTIONS}?").replace("{1}", "{1,3}")
_TEKKEN = _CASED.replace("{0}", "").replace("{1}", "")
_GPT2_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+")
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", rf"'s|'t|'re|'ve|'m|'ll|'d|{_WORDS}", r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (_llama3(r"\p{N}{1,3}"),),
    "qwen2": (_llama3(r"\p{N}"),),
    "smollm": _GPT2_DIGITS,
    "gpt-4o": (_GPT4O,),
    "tekken": (_TEKKEN,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        *_DEEPSEEK,
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}
_SAME = {
    "gpt-2": "gpt2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v2-code mpt olmo jais roberta-bpe gigachat a.x-4.0 "
    "mellum modern-bert trillion granite-docling",
    "llama-bpe": "llama3 llama-v3 dbrx smaug-bpe falcon3 pixtral glm4 chatglm-bpe falcon-h1 midm-2.0 lfm2 jina-v5-nano",
    "qwen2": "stablelm2 deepseek-r1-qwen megrez hunyuan solar-open",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "deepseek-v3": "hunyuan-dense",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "bloom": "poro-chat gpt3-finnish",
}
PATTERNS |= {name: PATTERNS[like] for like, names in _SAME.items() for name in names.split()}
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Pre-tokenizers for which a word that is a token is not split."""
BEGIN_WITH_BOS = IGNORES_MERGES
"""Pre-tokenizers that add a BOS token if the file does not specify it."""
WITHOUT_BOS = ("glm4", "chatglm-bpe")
"""Pre-tokenizers without a BOS token, even if the file says otherwise."""

NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "prefix": "prefix_token",
    "suffix": "suffix_token",
    "middle": "middle_token",
    "fim_pre": "prefix_token",
    "fim_suf": "suffix_token",
    "fim_mid": "middle_token",
}
"""Special tokens of the header by their names in tokenizer_config.json."""
KINDS = (*NAMES, "eot", "eom")


def tokenizer_files(header: Header) -> dict[str, Any]:
    """The JSON of tokenizer.json, tokenizer_config.json, and generation_config.json's ends of an answer.

    Raises UnsupportedModel or CorruptCheckpoint.
    """
    kind = header.get("tokenizer.ggml.model", str, "")
    tokens = header.get("tokenizer.ggml.tokens", list, [])
    kinds = header.get("tokenizer.ggml.token_type", list) or [1] * len(tokens)
    if not tokens or len(tokens) > MOST_TOKENS or len(kinds) != len(tokens) or not isinstance(tokens[0], str):
        raise CorruptCheckpoint(f"{header.file}: it has {len(tokens)} tokens, and kinds of {len(kinds)}")
    if (longest := max(map(len, tokens))) > MOST_CHARACTERS:
        raise CorruptCheckpoint(
            f"{header.file}: a token has {longest} characters: at most {MOST_CHARACTERS} are read; download it again"
        )
    make = {"gpt2": _byte_level, "llama": _sentence_piece}.get(kind)
    if make is None:
        raise UnsupportedModel(
            f"{header.file}: tokenizer.ggml.model is {shown(kind)}; kvern makes gpt2's and llama's: give --tokenizer, "
            "a folder with a tokenizer.json"
        )
    ids = {name: _token_id(header, name, len(tokens)) for name in KINDS}
    special = {kind: tokens[token_id] for kind, token_id in ids.items() if token_id is not None}
    added = list(_added_tokens(tokens, kinds, [ids[name] for name in ("bos", "eos") if ids[name] is not None]))
    around = _around(header, kind, ids, tokens)
    config: dict[str, Any] = {name: special[kind] for kind, name in NAMES.items() if kind in special}
    ends = {index for name in ("eos", "eot", "eom") if (index := ids[name]) is not None}
    ends |= {token["id"] for token in added if token["content"] in ENDINGS}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            **make(header, tokens, kinds),
            "post_processor": around,
        },
        "tokenizer_config.json": config | _templates(header),
        "generation_config.json": {"eos_token_id": sorted(ends)} | _sampling(header),
    }


def _token_id(header: Header, name: str, count: int) -> int | None:
    value = header.get(f"tokenizer.ggml.{name}_token_id", int)
    return value if value is not None and 0 <= value < count else None


def _added_tokens(tokens: list[str], kinds: list[int], special: Iterable[int | None]) -> Iterator[dict[str, Any]]:
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or index in special or token in ENDINGS:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": index, "content": token, **flags, "special": kind != USER_DEFINED or token in ENDINGS}


def _around(header: Header, kind: str, ids: dict[str, int | None], tokens: list[str]) -> dict[str, Any] | None:
    """The special tokens around a text by the file; otherwise llama and some of gpt2 begin with one."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    used = []
    pre = header.get("tokenizer.ggml.pre", str, "")
    if kind == "gpt2" and pre in WITHOUT_BOS:
        ids = {**ids, "bos": None}
    for name, default in (("bos", kind == "llama" or pre in BEGIN_WITH_BOS), ("eos", False)):
        index = ids[name]
        if index is not None and header.get(f"tokenizer.ggml.add_{name}_token", bool, default):
            token = {"SpecialToken": {"id": tokens[index], "type_id": 0}}
            single, pair = ([token, *single], [token, *pair]) if name == "bos" else ([*single, token], [*pair, token])
            used.append(index)
    if not used:
        return None
    special = {tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in used}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _vocabulary(header: Header, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """The first of tokens that are written alike, as unused ones may be."""
    found: dict[str, int] = {}
    for index, token in enumerate(tokens):
        found.setdefault(token, index)
    return found


def _byte_level(header: Header, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    name = header.get("tokenizer.ggml.pre", str, "default")
    patterns = PATTERNS.get(name)
    if header.get("tokenizer.ggml.pre", str) is None:
        logger.warning(
            "%s does not say how it cuts texts (tokenizer.ggml.pre): it is read as GPT-2's, which may be wrong. Give "
            "--tokenizer, a folder with a tokenizer.json",
            header.file,
        )
    if patterns is None:
        raise UnsupportedModel(
            f"{header.file}: tokenizer.ggml.pre is {shown(name)}, and kvern does not know how it cuts a text: give "
            "--tokenizer, a folder with a tokenizer.json"
        )
    vocabulary = _vocabulary(header, tokens, kinds)
    merges = [str(merge).split(" ", 1) for merge in header.get("tokenizer.ggml.merges", list, [])]
    if any(len(merge) != 2 or not all(part in vocabulary for part in (*merge, "".join(merge))) for merge in merges):
        raise CorruptCheckpoint(f"{header.file}: tokenizer.ggml.merges holds pairs that are no tokens")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    bytes_as_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, False)
    return {
        "normalizer": {"type": "Prepend", "prepend": " "} if prefix else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_as_characters]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=name in IGNORES_MERGES),
    }


def _sentence_piece(header: Header, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = header.get("tokenizer.ggml.scores", list, [])
    if len(scores) != len(tokens) or isinstance(scores[0], str):
        raise CorruptCheckpoint(f"{header.file}: it has {len(tokens)} tokens, and scores of {len(scores)}")
    vocabulary = _vocabulary(header, tokens, kinds)
    joined = {
        token: index for token, index in vocabulary.items() if kinds[index] not in (UNKNOWN, CONTROL, UNUSED, BYTE)
    }
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    written = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    read: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = header.get("tokenizer.ggml.unknown_token_id", int, 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, written]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*read, *strip]},
        "model": _bpe(
            vocabulary,
            list(_merges(joined, scores)),
            byte_fallback=all(f"<0x{value:02X}>" in vocabulary for value in range(256)),
            fuse_unk=True,
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        ),
    }


def _merges(joined: dict[str, int], scores: list[float]) -> Iterator[list[str]]:
    """The pairs of tokens that form a token, by descending score and ascending ids."""
    for token in sorted((token for token in joined if len(token) > 1), key=lambda token: -scores[joined[token]]):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        whole = [pair for pair in pairs if pair[0] in joined and pair[1] in joined]
        yield from map(list, sorted(whole, key=lambda pair: (joined[pair[0]], joined[pair[1]])))


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **fields: Any) -> dict[str, Any]:
    given = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return given | fields | {"vocab": vocabulary, "merges": merges}


def _templates(header: Header) -> dict[str, Any]:
    """The chat template, or the templates by name."""
    default = header.get("tokenizer.chat_template", str)
    names = [name for name in header.get("tokenizer.chat_templates", list, []) if isinstance(name, str)]
    others = {name: header.get(f"tokenizer.chat_template.{name}", str) for name in names}
    if not any(others.values()):
        return {"chat_template": default} if default is not None else {}
    every = {"default": default} | others
    return {"chat_template": [{"name": name, "template": text} for name, text in every.items() if text is not None]}


def _sampling(header: Header) -> dict[str, Any]:
    """Sampling parameters that the file recommends, with the names of generation_config.json."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    given = {kept: header.get(f"general.sampling.{name}", (int, float)) for name, kept in names.items()}
    found = {name: value for name, value in given.items() if value is not None}
    return found | {"do_sample": True} if found else {}


def as_text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


ENDING = ".gguf"
MOST_FILES = 1000
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(file: Path) -> GgufModel:
    """The headers of a model, of which this is the file or one of the files.

    Raises CorruptCheckpoint or UnsupportedModel.
    """
    headers = [read_gguf_header(item) for item in split_files(file)]
    names: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if names.setdefault(tensor.name, header.file) != header.file:
                raise CorruptCheckpoint(
                    f"the tensor {shown(tensor.name)} is in two files: {names[tensor.name]} and {header.file}"
                )
    expected = headers[0].get("split.tensors.count", int, len(names))
    if expected != len(names):
        raise CorruptCheckpoint(f"{file}: the model has {expected} tensors, and its files {len(names)}")
    return GgufModel(headers[0], tuple(tensor for header in headers for tensor in header.tensors))


def split_files(file: Path) -> list[Path]:
    """All files of the model that this one belongs to, the first of them first. Raises CorruptCheckpoint."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    files = [file.with_name(f"{match[1]}-{index:05}-of-{match[3]}{ENDING}") for index in range(1, count + 1)]
    missing = [item.name for item in files[:MOST_FILES] if not item.is_file()]
    if missing or not 1 <= count <= MOST_FILES:
        shown_names = ", ".join(missing[:3])
        raise CorruptCheckpoint(f"{file} is one of {count} files, {len(missing)} of them missing: {shown_names}")
    return files


def choose_in(folder: Path, wanted: str) -> Path:
    """The first file of one model in a folder, see `choose`."""
    found = [path for pattern in (f"*{ENDING}", f"*/*{ENDING}") for path in folder.glob(pattern)]
    return folder / choose([path.relative_to(folder).as_posix() for path in found], wanted, str(folder))[0]


def models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each model among names of files, by the model's name: without number and ending."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(ENDING) and not Path(name).name.startswith("mmproj"):
            match = _SPLIT.fullmatch(name)
            models.setdefault(match[1] if match else name.removesuffix(ENDING), []).append(name)
    return models


def choose(names: Iterable[str], wanted: str, where: str) -> list[str]:
    """Chooses the files of one model in a folder or repository; its name ends with `wanted`, such as "Q4_K_M".

    Raises ModelNotFound, which lists the models.
    """
    models = models_of(names)
    found = [stem for stem in models if stem.lower().endswith(wanted.lower().removesuffix(ENDING))]
    exact = [stem for stem in found if re.search(rf"(^|[-._/]){re.escape(wanted)}$", stem, re.IGNORECASE)]
    if wanted and len(exact) == 1:
        found = exact
    if len(found) == 1:
        return models[found[0]]
    listed = ", ".join(list(models)[:12]) + (", ..." if len(models) > 12 else "")
    choice = f"{where}:{next(iter(models), '').rpartition('-')[2] or 'Q4_K_M'}"
    what = f"no, or more than one, GGUF file that ends in {wanted!r:.60}" if wanted else f"{len(models)} GGUF files"
    raise ModelNotFound(f"{where} holds {what}: choose one by its ending, as {choice} ({listed})")


def gguf_folder_files(file: Path, *, tokenizer: bool = True) -> dict[str, Path | bytes]:
    """The files of a model's folder by name: paths of weights, and contents of the others; `tokenizer`: with its files.

    Raises CorruptCheckpoint or UnsupportedModel.
    """
    model = read_gguf(file)
    made = {"config.json": config_of(model)}
    if tokenizer:
        made |= tokenizer_files(model.header)
    return {item.name: item for item in split_files(file)} | {name: as_text(value) for name, value in made.items()}


def gguf_state(file: Path, *, tokenizer: bool = True) -> str:
    """A name for the folder: of another file, or of another kvern that makes it otherwise, it is another name."""
    state = hashlib.blake2b(repr(tokenizer).encode(), digest_size=16)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        state.update(source.read_bytes())
    for item in split_files(file):
        status = os.stat(item)
        state.update(repr((str(item), status.st_size, status.st_mtime_ns)).encode())
    return state.hexdigest()
