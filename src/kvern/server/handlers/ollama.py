"""ollama's API: the handlers, so that programs made for ollama can use kvern."""

import asyncio
import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern.api import ollama
from kvern.api.completions import read_prompts
from kvern.api.embedding_inputs import MOST_TEXTS
from kvern.api.error_bodies import ollama_error
from kvern.api.errors import HttpError
from kvern.api.fields import read_common, typed
from kvern.api.ollama import LATEST, LINES, OllamaBody, OllamaWriter, Seconds, nanoseconds, timestamp
from kvern.engine.embedding import check_embeds, embedding_of
from kvern.engine.inputs import Prompt
from kvern.errors import ConfigError, KvernError
from kvern.models.header import read_entries
from kvern.models.pooling import POOLING_FILE
from kvern.request.request import PromptInput
from kvern.request.sampling_params import SamplingParams
from kvern.residency.options import ServedModel, keep_alive_of
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.http import (
    CLIENT_GONE,
    LACKS_HEADER,
    header_of_names,
    ignored_header,
    json_response,
    path_of,
    until_gone,
    whole_answer,
)
from kvern.server.keys import ApiKey
from kvern.server.service import Ask, Running, ServedEngine
from kvern.server.streams import EventStream, Lines, StreamFormat
from kvern.text.infill import infill_of
from kvern.text.tokenizer import read_json
from kvern.tools.chat import ChatRequest
from kvern.tools.encoding import Encoding
from kvern.tools.formats import formats_of
from kvern.version import __version__

FOR_EVER = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded that always stays loaded."""
SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on disk. `digest` covers its configuration, and the names and sizes of its files."""

    config: dict[str, Any]
    size: int
    parameters: int
    modified: float
    digest: str

    @property
    def details(self) -> dict[str, Any]:
        """The checkpoint's format, family and size in ollama's words."""
        family = str(self.config.get("model_type", ""))
        quantized = self.config.get("quantization_config") or {}
        plain = str(self.config.get("torch_dtype") or self.config.get("dtype") or "")
        return {
            "parent_model": "",
            "format": "gguf" if quantized.get("quant_method") == "gguf" else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": ""
            if quantized
            else shortened(self.parameters),  # the shapes of packed weights do not give the number of parameters
            "quantization_level": str(quantized.get("quant_method", "")).upper() or SHORT.get(plain, plain.upper()),
        }


SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def outline(weights: Sequence[Path]) -> ModelFiles:
    """Reads what is known of a checkpoint, or of a GGUF model, that was not loaded yet: its size, and its configuration
    if there is one beside it."""
    if not weights:
        return ModelFiles({}, 0, 0, 0.0, "")
    if weights[0].suffix != ".gguf":
        return read_files(weights[0].parent)
    statuses = [file.stat() for file in weights]
    size, modified = sum(status.st_size for status in statuses), max(status.st_mtime for status in statuses)
    digest = hashlib.sha256("\n".join(f"{file.name} {file.stat().st_size}" for file in weights).encode()).hexdigest()
    return ModelFiles({"quantization_config": {"quant_method": "gguf"}}, size, 0, modified, digest)


@functools.cache
def read_files(folder: Path) -> ModelFiles:
    """Reads the sizes and the configuration of a checkpoint, once."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    statuses = [file.stat() for file in weights]
    parameters = 0
    for file in (file for file in weights if file.suffix == ".safetensors"):
        with file.open("rb") as stream:
            parameters += sum(math.prod(entry.shape) for entry in read_entries(stream)[1].values())
    listing = [f"{file.name} {status.st_size}" for file, status in zip(weights, statuses, strict=True)]
    content = (folder / "config.json").read_bytes() + "\n".join(listing).encode()
    return ModelFiles(
        read_json(folder / "config.json"),
        sum(status.st_size for status in statuses),
        parameters,
        max((status.st_mtime for status in statuses), default=0.0),
        hashlib.sha256(content).hexdigest(),
    )


def entry(name: str, models: Sequence[str], files: ModelFiles) -> dict[str, Any]:
    """Returns an entry of the list of models, for one of the names `models` or for an adapter; a name without a tag
    gets `:latest`."""
    full = name if ":" in name else name + LATEST
    details = files.details if name in models else {**files.details, "parent_model": models[0]}
    modified = timestamp(files.modified)
    return {
        "name": full,
        "model": full,
        "modified_at": modified,
        "size": files.size,
        "digest": files.digest,
        "details": details,
    }


def running(name: str, engine: ServedEngine, files: ModelFiles, expires: str) -> dict[str, Any]:
    """Returns a model's entry in the list of loaded models."""
    on_gpu = files.size if engine.client.replicas.ready.gpu is not None else 0
    told = entry(name, engine.models, files)
    del told["modified_at"]
    return {
        **told,
        "expires_at": expires,
        "size_vram": on_gpu,
        "context_length": engine.client.inputs.max_model_len,
    }


def card(name: str, engine: ServedEngine, files: ModelFiles) -> dict[str, Any]:
    """Returns the details of a model."""
    client, told = engine.client, entry(name, engine.models, files)
    about = {"context_length": client.inputs.max_model_len, "vocab_size": client.inputs.vocab_size}
    template = client.tokenizer.chat_template.source(tools=False)
    return {**card_of_files(name, told, files, about), "template": template, "capabilities": capabilities(engine)}


def card_of_files(name: str, told: Mapping[str, Any], files: ModelFiles, about: Mapping[str, object]) -> dict[str, Any]:
    """Returns the details of a model that are in its files, and `about` it."""
    config, family = files.config, files.details["family"]
    about = {
        **about,
        "embedding_length": config.get("hidden_size"),
        "block_count": config.get("num_hidden_layers"),
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
    }
    known = {f"{family}.{key}": value for key, value in about.items() if isinstance(value, int)}
    return {
        "modelfile": f"FROM {name}",
        "parameters": "",
        "template": "",
        "details": told["details"],
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": files.parameters,
            **known,
        },
        "capabilities": [],
        "modified_at": told["modified_at"],
    }


def capabilities(engine: ServedEngine) -> list[str]:
    """Returns the model's capabilities in ollama's words."""
    client, model = engine.client, engine.client.inputs.model
    template = client.tokenizer.chat_template.source(tools=True)
    tools, thinking = formats_of(template, client.config.tool_parser, client.config.reasoning_parser)
    can = {
        "completion": not model.is_encoder,
        "embedding": (client.folder / POOLING_FILE).is_file() if not model.is_encoder else not model.is_classifier,
        "insert": not model.is_encoder and infill_of(client.tokenizer) is not None,
        "tools": tools is not None and "tools" in template,
        "thinking": thinking is not None,
        "vision": model.reads_images and not model.is_encoder,
    }
    return [name for name, is_so in can.items() if is_so]


def shortened(count: int) -> str:
    """Returns a number of parameters in the usual short form, such as 7.6B."""
    unit, letter = next(((unit, letter) for unit, letter in SIZES if count >= unit), (1.0, ""))
    return f"{count / unit:.1f}{letter}"


class OllamaApi:
    """Handlers of ollama's routes."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service

    async def answer(self, request: Request) -> Response | EventStream:
        """POST to CHAT or GENERATE: lines of JSON, or one object if `stream` is false."""
        began = time.monotonic()
        url = path_of(request.scope)
        key = request.state.key
        body = await read_object(request)
        shown, stay = named(body), self._stay(body)
        asked = ollama.read_body(body, url)
        model = await self._model(body, key)
        headers = ignored_header(ollama.ignored_options(body), ollama.KNOWN)
        with self._service.wanted(model):  # so that `keep_alive` counts from its end
            chat = await self._chat(asked, model, key)
            headers |= header_of_names(LACKS_HEADER, () if chat is None else chat.lacks)
            writer = OllamaWriter(url, str(shown or model), chat)
            if asked.is_empty:
                ends = stay is not None and stay.seconds == 0
                if not ends:
                    await self._service.wake(model, key)
                self._keep(model, stay, key)
                return json_response(writer.loaded("unload" if ends else "load"), headers=headers)
            prompts: list[Prompt] = [asked.prompt if chat is None else chat.prompt]
            params = asked.params if chat is None else chat.params
            if asked.suffix:
                inputs = self._service.engine_of(model).client.inputs
                prompts, params = await inputs.infilled(prompts, asked.suffix, params)
            ask, stream = Ask(model, asked.common, prompts, params, key), asked.stream
            del asked
            let_go(request, body)
            if stream:
                started = await self._service.start(ask)
                self._keep(model, stay, key)
                seconds = functools.partial(_seconds, started, began)
                lines = writer.lines(started.outputs[0], started, seconds)
                return EventStream(lines, started.close, headers, STREAM, ask.is_large)
            work = self._service.written(ask, lambda ended: writer.whole(ended.outputs[0], _seconds(ended, began)))
            response = await whole_answer(request, work, headers)
            self._keep(model, stay, key)
            return response

    async def _chat(self, asked: OllamaBody, model: str, key: ApiKey) -> ChatRequest | None:
        """Returns the conversation as a prompt with a reader of its answer; None if the text goes to the model as it
        is."""
        if (talk := asked.conversation) is None:
            return None
        chat = await self._service.chat(model, talk, asked.params, asked.common, key)
        if not asked.context:
            return chat
        if isinstance(chat.prompt, PromptInput):
            raise HttpError(400, "context and images are given: send the conversation to /api/chat", param="context")
        begun = chat.prompt[:1] == [self._service.engine_of(model).client.tokenizer.bos_token_id]
        return dataclasses.replace(chat, prompt=[*asked.context, *chat.prompt[begun:]])

    async def embed(self, request: Request) -> Response:
        """POST /api/embed (`input`, one or several texts) and the older /api/embeddings (`prompt`).

        Texts are truncated to the model's context unless `truncate` is false; without a text the answer is empty.
        """
        began, is_old = time.monotonic(), path_of(request.scope).endswith("embeddings")
        body = await read_object(request)
        stay, shown = self._stay(body), named(body)
        model = await self._model(body, request.state.key)
        client = self._service.engine_of(model).client
        check_embeds(client.inputs.model, client.folder, model)
        name = "prompt" if is_old else "input"
        prompts = read_prompts(body, name, MOST_TEXTS) if body.get(name) not in (None, "", []) else []
        if typed(body, "truncate", bool, True):
            room = client.inputs.max_model_len - (not client.inputs.model.is_encoder)
            cut = Encoding(True, room, keeps_end=False, keeps_special=True)
            prompts = [await client.inputs.encoded(prompt, cut, None) for prompt in prompts]
        dimensions = typed(body, "dimensions", int, None)
        ask = Ask(model, read_common(body), prompts, SamplingParams(), request.state.key, embed=True)
        let_go(request, body)
        with self._service.wanted(model):  # so that `keep_alive` counts from its end
            outputs = await until_gone(self._service.run(ask), request.receive) if prompts else []
            self._keep(model, stay, request.state.key)
        if outputs is None:
            return Response(status_code=CLIENT_GONE)
        vectors = [embedding_of(output.embedding or b"", dimensions) for output in outputs]
        if is_old:
            return json_response({"embedding": vectors[0] if vectors else []})
        count = sum(len(output.prompt_token_ids) for output in outputs)
        took = {"total_duration": nanoseconds(time.monotonic() - began), "load_duration": 0}
        return json_response({"model": shown or model, "embeddings": vectors, **took, "prompt_eval_count": count})

    async def tags(self, request: Request) -> Response:
        """GET /api/tags: the models."""
        told, keeper = [], self._service.keeper
        for engine in self._service.engines:
            files = await _files(engine.client.folder)
            told += [entry(name, engine.models, files) for name in engine.names]
        for resident in [] if keeper is None else keeper.residents:
            if resident.client is None:
                try:
                    files = await asyncio.to_thread(_outlined, resident.model)
                except (OSError, ValueError, KvernError):  # its files are gone: the others are there
                    continue
                told += [entry(name, resident.model.engine.model_names, files) for name in resident.names]
        return json_response({"models": told})

    async def loaded(self, request: Request) -> Response:
        """GET /api/ps: the models in memory: all models, of several those that are awake."""
        return json_response(
            {
                "models": [
                    running(name, engine, await _files(engine.client.folder), expires)
                    for engine in self._service.engines
                    if (expires := self._expires(engine)) is not None
                    for name in engine.names
                ]
            }
        )

    async def show(self, request: Request) -> Response:
        """POST /api/show: details of a model, which is not woken for that."""
        body, keeper = await read_object(request), self._service.keeper
        resident = None if keeper is None else keeper.find(self._named(body))
        if resident is not None and resident.client is None:
            files, model = await asyncio.to_thread(_outlined, resident.model), str(self._named(body))
            told = entry(model, resident.model.engine.model_names, files)
            return json_response(card_of_files(model, told, files, {}))
        model = await self._model(body, request.state.key)
        engine = self._service.engine_of(model)
        return json_response(card(model, engine, await _files(engine.client.folder)))

    async def version(self, request: Request) -> Response:
        """GET /api/version."""
        return json_response({"version": ollama.VERSION, "kvern": __version__})

    async def refuse(self, request: Request) -> Response:
        """Refuses requests that would add or remove models."""
        names = ", ".join(self._service.names)
        what = request.url.path.rpartition("/")[2]
        message = f"{what}: this server has {names} and keeps them; for another model start another: kvern serve MODEL"
        raise HttpError(403, message)

    async def _model(self, body: dict[str, Any], key: ApiKey) -> str:
        """Returns the model that a body names, with ollama's tag or without. Raises HttpError if there is none."""
        return await self._service.model({**body, "model": self._named(body)}, key)

    def _named(self, body: dict[str, Any]) -> object:
        name = named(body)
        if isinstance(name, str) and name not in self._service.names:
            return name.removesuffix(LATEST)
        return name

    def _stay(self, body: dict[str, Any]) -> "Stay | None":
        """Returns how long a body lets one of several models stay awake, if it says so. Raises HttpError."""
        value = body.get("keep_alive")
        if self._service.keeper is None or value is None:
            return None
        try:
            return Stay(keep_alive_of(value, "keep_alive"))
        except ConfigError as error:
            raise HttpError(400, str(error), param="keep_alive") from error

    def _keep(self, model: str, stay: "Stay | None", key: ApiKey) -> None:
        """Lets a model stay awake so long this time; if there are keys, others than administrators' do not lengthen
        its own `keep_alive`."""
        keeper = self._service.keeper
        if stay is None or keeper is None or (resident := keeper.find(model)) is None:
            return
        seconds, longest = stay.seconds, resident.model.terms.keep_alive
        if longest is not None and self._service.keys.known and not key.admin:
            seconds = longest if seconds is None else min(seconds, longest)
        keeper.keep(resident, seconds)

    def _expires(self, engine: ServedEngine) -> str | None:
        """Returns when a model is put to sleep if nobody asks it; None if it is not awake."""
        keeper = self._service.keeper
        resident = None if keeper is None else keeper.find(engine.models[0])
        if keeper is None or resident is None:
            return FOR_EVER
        if keeper.state(resident) != "awake":
            return None
        when = keeper.residency.expires_at(resident.name)
        return FOR_EVER if when is None else timestamp(time.time() + when - time.monotonic())


@dataclass(frozen=True)
class Stay:
    """The `keep_alive` of a request: the seconds without one in which a model stays awake; None: until others need
    the memory."""

    seconds: float | None


def named(body: dict[str, Any]) -> object:
    """Returns the model that a body asks for; older clients call the field `name`."""
    return body.get("name") if body.get("model") is None else body["model"]


def _seconds(running: Running, began: float) -> Seconds:
    return Seconds(*running.seconds, time.monotonic() - began)


def _line(content: object, lines: Lines) -> Iterator[bytes]:
    yield from lines(content)
    yield b"\n"


STREAM = StreamFormat(failed=ollama_error, kind=LINES, frame=_line)


def _outlined(model: ServedModel) -> ModelFiles:
    return outline(model.files)


async def _files(folder: Path) -> ModelFiles:
    return await asyncio.to_thread(read_files, folder)
