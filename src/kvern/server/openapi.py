"""The OpenAPI 3.1 document of the server, at /openapi.json.

Bodies and answers are written as words: `name!=type` is a required field, `name=type` another one, and `name=type?` one
that may be null as well. A type is a name of `TYPES` or of `RECORDS`, `/a/b` (one of these texts), `[type]` (a list),
`[type]+` (a list that is not empty), or `type|type`. `*sampling` stands for the fields of SamplingParams.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from kvern.api.completions import CHAT, COMPLETIONS, MOST_PROMPTS
from kvern.api.embeddings import EMBEDDINGS
from kvern.api.fields import MOST_SEQUENCES
from kvern.api.messages import COUNT_TOKENS, MESSAGES
from kvern.api.ollama import CHAT as OLLAMA_CHAT
from kvern.api.ollama import GENERATE, LINES
from kvern.api.responses import LONGEST_NAME, NAMES
from kvern.api.scores import SCORE
from kvern.api.text_pairs import MOST_PAIRS, RERANK
from kvern.api.text_pairs import NAMES as PAIR_NAMES
from kvern.documentation import field_documents
from kvern.request.sampling_params import SamplingParams
from kvern.server.handlers.batches import ENDPOINTS
from kvern.server.handlers.files import MOST_ON_PAGE, OUTPUT, PURPOSES
from kvern.server.handlers.message_batches import JSON_LINES
from kvern.serving.client_traces import MOST_SECONDS, MOST_STEPS
from kvern.tools.tool_format import NAME
from kvern.version import __version__

Schema = dict[str, Any]
JSON, EVENTS = "application/json", "text/event-stream"
PLAIN, BINARY = "text/plain", "application/octet-stream"
FORM = "multipart/form-data"
ABOUT = (
    "Beside the parameters of each API, bodies may hold kvern's own; fields that would change an answer and are "
    "not known are refused, others ignored and named in the header x-kvern-ignored-fields."
)
TYPES: dict[str, Schema] = {
    "any": {},
    "text": {"type": "string"},
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "bool": {"type": "boolean"},
    "object": {"type": "object"},
    "name": {"type": "string", "minLength": 1},
    "count": {"type": "integer", "minimum": 1},
    "amount": {"type": "integer", "minimum": 0},
    "budget": {"type": "integer", "minimum": -1},
    "few": {"type": "integer", "minimum": 0, "maximum": 100},
    "all": {"type": "integer", "enum": [-1]},
    "seconds": {"type": "number", "exclusiveMinimum": 0},
    "grace": {"type": "number", "minimum": 0},
    "salt": {"type": "string", "maxLength": 256},
    "id": {"type": "string", "minLength": 1, "maxLength": 128},
    "user": {"type": "string", "maxLength": LONGEST_NAME},
    "stop": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 64},
    "tool_name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
    "no_text": {"type": "string", "not": {"enum": ["text"]}},
    "file": {"type": "string", "contentMediaType": BINARY},
    "any_token": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "event_number": {"type": "integer", "minimum": 0, "maximum": 2**31},
    "trace_steps": {"type": "integer", "minimum": 1, "maximum": MOST_STEPS},
    "trace_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS},
    "page_size": {"type": "integer", "minimum": 1, "maximum": MOST_ON_PAGE},
}
RECORDS = {
    "stream_options": "include_usage=bool? continuous_usage_stats=bool?",
    "tag": "begin!=text schema!=object end=text",
    "plain_form": "type!=/text",
    "object_form": "type!=/json_object",
    "schema_form": "type!=/json_schema json_schema=object",
    "tag_form": "type!=/structural_tag structures=[tag]",
    "part": "type!=/text text!=text",
    "other_part": "type!=no_text",
    "message": "role!=text content=text|[part]?",
    "claude_message": "role!=/user/assistant/system content!=text|[part|other_part]",
    "thinking": "type!=/enabled/disabled/adaptive",
    "claude_thinking": "type!=/enabled/adaptive/disabled budget_tokens=int",
    "reasoning": "effort=text? enabled=bool? exclude=bool?",
    "function": "name!=tool_name description=text? parameters=object?",
    "tool": "type!=/function function!=function",
    "grammar": "syntax!=/lark/regex definition!=text",
    "grammar_form": "type!=/grammar grammar!=grammar",
    "custom": "name!=tool_name description=text? format=plain_form|grammar_form?",
    "custom_tool": "type!=/custom custom!=custom",
    "flat_tool": "type!=/function name!=tool_name description=text? parameters=object?",
    "other_tool": "type!=text",
    "claude_tool": "name!=tool_name input_schema!=object",
    "claude_choice": "type!=/auto/any/tool/none name=text",
    "fitting": "type!=/json_schema schema!=object",
    "output_config": "effort=text? format=fitting?",
    "batched": "custom_id!=text params!=object",
    "prediction": "type!=/content content!=text|[part]",
    "conversation": "id!=text",
    "text_object": "text!=name",
    "engine": "model!=text engine!=text ready!=bool",
    "engine_state": "model!=text engine!=text ready!=bool verdict=verdict? step_parts!=[parts] "
    "oldest_requests!=[object] steps_file=text? options!=object processor_seconds=number?",
    "parts": "step!=/decode/prompt measured!=int tokens!=number seconds!=number parts!=[object] layers!=[number]",
    "verdict": "cause!=text share!=number evidence!=text action!=text",
    "ollama_options": "*ollama_sampling num_predict=int? repeat_penalty=number?",
    "ollama_model": "model!=text name!=text",
    "logprob": "index!=int logprob!=number tokens!=int is_greedy!=bool token_ids=[int] token_logprobs=[number]",
    "pair_score": "index!=int score!=number",
    "result": "index!=int relevance_score!=number",
    "openai_error": "message!=text type!=text param!=text? code!=text?",
    "claude_error": "type!=text message!=text",
}
COMMON = "model=model? priority=int? timeout=seconds? cache_salt=salt?"
TRUNCATED = "truncate_prompt_tokens=int? truncation_side=/left/right? add_special_tokens=bool?"
SHOWN = "return_token_ids=bool? return_tokens_as_token_ids=bool? request_id=id? stream_interval=int?"
GENERATED = (
    f"*sampling {COMMON} stream=bool? stream_options=stream_options? echo=bool? use_beam_search=bool? best_of=int? "
    f"response_format=plain_form|object_form|schema_form|tag_form? {TRUNCATED} {SHOWN}"
)
THINKS = (
    "chat_template_kwargs=object? thinking_budget=amount? thinking_token_budget=budget? enable_thinking=bool? "
    "thinking=thinking? reasoning=reasoning? include_reasoning=bool? reasoning_effort=text? documents=[object]?"
)
CALLS = "tool_choice=/auto/none/required|object? parallel_tool_calls=bool?"
CLAUDE = "model=model? messages!=[claude_message]+ system=text|[part]? tools=[claude_tool]? tool_choice=claude_choice? "
CLAUDE += "thinking=claude_thinking?"
CUT = "truncate_prompt_tokens=count|all?"
COMPARED = f"{COMMON} instruction=text? {CUT} max_tokens_per_doc=count?"
OLLAMA = "model=ollama_name? stream=bool? options=ollama_options? format=/json|object? think=bool|text? "
OLLAMA += "logprobs=bool? top_logprobs=few? keep_alive=any"
OLLAMA_EMBEDDED = "model=ollama_name? dimensions=count? options=object? truncate=bool?"
PAGE = "limit=page_size after=text"
CLAUDE_PAGE = "limit=page_size after_id=text before_id=text"

IDENTIFIED = "id!=text object!=text"
LISTING = "object!=/list data!=[object]"
ENGINES = "object!=/list data!=[engine_state] processor_seconds=number?"
OLLAMA_LISTING = "models!=[ollama_model]"
COMPLETED = "id!=text object!=any created!=any model!=any choices!=[object] usage!=object"
TYPED = "id!=text type!=text"
BATCHED = f"{TYPED} processing_status!=/in_progress/canceling/ended request_counts!=object results_url!=text?"
EXPLAINED = "id!=text object!=text seconds!=number summary!=text causes!=[object] timeline!=[object]"
PAGED = "data!=[object] has_more!=bool first_id!=text? last_id!=text?"
EVENT = "event=text data!=text"

REASONS = {
    400: "The request is invalid; the message says why.",
    401: "The API key is missing or unknown.",
    403: "The API key may not do this.",
    404: "The object does not exist.",
    409: "Another request is using it.",
    408: "The timeout has passed, or the body arrived too slowly.",
    413: "The body is too large.",
    429: "There are too many requests: try again after the seconds in the header Retry-After.",
    500: "The server has a fault, or the engine died twice with the request.",
    502: "The Hugging Face hub does not deliver it; the message says why.",
    503: "The server cannot answer at present.",
    507: "The server's disk is full.",
}
REFUSALS = (400, 401, 404, 408, 413, 429, 500, 503, 507)
"""Statuses of errors that every operation with a body has."""
KEPT = (404, 503, 507)
"""Statuses of errors when stored objects are read."""
SPOKEN, DRAWN = ("speech", "transcriptions", "translations"), ("generations", "edits", "variations")
READ_ONLY = "Refused: models are chosen when the server starts."


@dataclass(frozen=True)
class Operation:
    """One operation: its method and path, a line of help, and its fields as words.

    `body` are the fields of the body, in several forms if it is a tuple; () is no body. `statuses` are errors beside
    those that every operation has. `kind` is the content type of the answer, or of a form's body; `stream` is that of
    a stream, which the answer may be as well. `is_open` operations need no API key.
    """

    route: str
    summary: str
    answer: str = ""
    statuses: tuple[int, ...] = ()
    body: str | tuple[str, ...] = ()
    query: str = ""
    kind: str = JSON
    stream: str = ""
    is_open: bool = False


def _read(route: str, summary: str, answer: str = "", *statuses: int, query: str = "", kind: str = JSON) -> Operation:
    """Returns an operation on stored objects."""
    return Operation(route, summary, answer, (*statuses, *KEPT), query=query, kind=kind)


OPERATIONS = (
    Operation("GET /health", "The process lives.", "status!=text", is_open=True),
    Operation("GET /ready", "An engine takes requests; 503 while none does.", "ready!=bool engines=[engine]", (503,)),
    Operation("GET /ping", "For load balancers: the server takes requests.", kind=PLAIN, is_open=True),
    Operation("GET /load", "Number of requests in flight.", "server_load!=int", (403,)),
    Operation("GET /version", "The version of kvern.", "version!=text"),
    Operation("GET /metrics", "Metrics for Prometheus.", kind=PLAIN),
    Operation("GET /v1/engines", "Engines, and what most of their last seconds went to.", ENGINES, (403,)),
    Operation(
        "POST /tokenize",
        "Tokenize a text or a conversation.",
        "tokens!=[int] count!=int max_model_len=int",
        body="model=model? prompt=text? messages=[message]+ tools=[tool|custom_tool]? add_special_tokens=bool? "
        "add_generation_prompt=bool? continue_final_message=bool? chat_template_kwargs=object? return_token_strs=bool?",
    ),
    Operation("POST /detokenize", "Decode token ids.", "prompt!=text", body="model=model? tokens=[any_token]?"),
    Operation("GET /v1/models", "The names that `model` may have.", LISTING),
    Operation("GET /v1/models/{model}", "One of these models.", IDENTIFIED, (404,)),
    Operation(
        "POST /v1/models/{model}/load",
        "Wake one of several models; needs an API key with admin=1.",
        IDENTIFIED,
        (403, 404, 409),
    ),
    Operation(
        "POST /v1/models/{model}/sleep",
        "Put one of several models to sleep when its requests have ended; needs an API key with admin=1.",
        IDENTIFIED,
        (403, 404, 409),
    ),
    Operation(
        "POST /v1/models/{model}/unload",
        "End the process of one of several models when its requests have ended; needs an API key with admin=1.",
        IDENTIFIED,
        (403, 404, 409),
    ),
    Operation(
        "POST /v1/models/{model}/weights",
        "Replace a model's weights while it serves, by files or a process group; needs an API key with admin=1.",
        f"{IDENTIFIED} version!=text",
        (403, 409),
        "path=name? group=object? in_flight=/recompute/keep?",
    ),
    Operation(
        "POST /v1/load_lora_adapter",
        "Load an adapter from a folder of the server; needs an API key with admin=1.",
        IDENTIFIED,
        (403,),
        "model=model? lora_name!=name lora_path!=name",
    ),
    Operation("POST /v1/unload_lora_adapter", "Unload an adapter.", IDENTIFIED, (403,), "model=model? lora_name!=name"),
    Operation(
        "POST /v1/add_engine",
        "Start another engine of a model; needs an API key with admin=1.",
        IDENTIFIED,
        (403,),
        "model=model?",
    ),
    Operation(
        "POST /v1/remove_engine",
        "End an engine; requests that do not end in time continue in other engines.",
        IDENTIFIED,
        (403,),
        "model=model? engine!=name grace_seconds=grace",
    ),
    Operation(
        "POST /v1/profile",
        "A Chrome trace of an engine's next steps, while it serves; needs an API key with admin=1.",
        "traceEvents!=[object]",
        (403, 409),
        "model=model? engine=text? steps=trace_steps? seconds=trace_seconds?",
    ),
    _read(
        "GET /v1/requests/{request_id}/explain", "What a request, by its x-request-id, spent its time on.", EXPLAINED
    ),
    Operation(
        f"POST {COMPLETIONS}",
        "Continue a text, or fill the gap before a suffix.",
        COMPLETED,
        body=f"{GENERATED} prompt!=prompts suffix=text?",
        stream=EVENTS,
    ),
    Operation(
        f"POST {CHAT}",
        "Answer a conversation.",
        COMPLETED,
        body=f"{GENERATED} {THINKS} messages!=[message]+ tools=[tool|custom_tool]? {CALLS} add_generation_prompt=bool? "
        "continue_final_message=bool? prediction=prediction? max_completion_tokens=count? logprobs=bool? "
        "top_logprobs=few?",
        stream=EVENTS,
    ),
    Operation(
        f"POST {EMBEDDINGS}",
        "Embeddings of texts, for embedding models; and of images, for those that embed both.",
        LISTING,
        body=f"{COMMON} input!=prompts dimensions=count? normalize=bool? encoding_format=/float/base64? "
        f"add_special_tokens=bool? {CUT} truncation_side=/left/right?",
    ),
    Operation(
        f"POST {SCORE}",
        "Probabilities of continuations after their contexts; or relevance of texts to others, for rerankers and "
        "embedding models.",
        "object!=/list data!=[logprob|pair_score] usage!=object",
        body=(
            f"{COMMON} context!=contexts continuations!=continuations logprobs=bool? add_special_tokens=bool?",
            *(f"{COMPARED} {one}!=texts {other}!=texts" for one, other in PAIR_NAMES),
        ),
    ),
    Operation(
        f"POST {RERANK}",
        "Documents in the order of their relevance to a query; also as /rerank and /v2/rerank.",
        "id!=text results!=[result] usage!=object",
        body=f"{COMPARED} query!=name documents!=documents top_n=amount? return_documents=bool?",
    ),
    Operation(
        "POST /v1/responses",
        "Answer a conversation and store the response.",
        IDENTIFIED,
        (409,),
        f"*response_sampling {COMMON} input!=text|[object]+ instructions=text? previous_response_id=text? "
        "conversation=text|conversation? max_output_tokens=count? stream=bool? background=bool? store=bool? "
        f"metadata=object? {' '.join(f'{name}=user?' for name in NAMES)} include=[text]? text=object? "
        "top_logprobs=few? truncation=/auto/disabled? max_tool_calls=int? tools=[flat_tool|other_tool]? "
        f"{CALLS} {THINKS}",
        stream=EVENTS,
    ),
    Operation(
        "GET /v1/responses/{response_id}",
        "A response with its state, or its events.",
        IDENTIFIED,
        (400, *KEPT),
        query="stream=bool starting_after=event_number",
        stream=EVENTS,
    ),
    _read("DELETE /v1/responses/{response_id}", "Delete a response.", IDENTIFIED),
    _read("POST /v1/responses/{response_id}/cancel", "Cancel a background response.", IDENTIFIED, 400),
    _read(
        "GET /v1/responses/{response_id}/input_items",
        "The input of a response.",
        LISTING,
        400,
        query=f"{PAGE} order=/asc/desc",
    ),
    *(Operation(f"POST /v1/audio/{name}", "Refused: there is no audio.", "", (404,)) for name in SPOKEN),
    *(Operation(f"POST /v1/images/{name}", "Refused: no images are made.", "", (404,)) for name in DRAWN),
    Operation("POST /v1/conversations", "Create a conversation.", IDENTIFIED, body="metadata=object? items=[object]?"),
    _read("GET /v1/conversations/{conversation_id}", "A conversation.", IDENTIFIED),
    Operation(
        "POST /v1/conversations/{conversation_id}",
        "Change the metadata of a conversation.",
        IDENTIFIED,
        body="metadata=object?",
    ),
    _read("DELETE /v1/conversations/{conversation_id}", "Delete a conversation.", IDENTIFIED),
    _read(
        "GET /v1/conversations/{conversation_id}/items",
        "The items of a conversation.",
        LISTING,
        400,
        query=f"{PAGE} order=/asc/desc",
    ),
    Operation("POST /v1/conversations/{conversation_id}/items", "Add items.", LISTING, body="items!=[object]+"),
    _read(
        "GET /v1/conversations/{conversation_id}/items/{item_id}",
        "An item of a conversation.",
        "id!=text type!=text",
    ),
    _read("DELETE /v1/conversations/{conversation_id}/items/{item_id}", "Delete an item.", IDENTIFIED),
    Operation(
        f"POST {MESSAGES}",
        "Anthropic's messages.",
        "id!=text content!=[object] usage!=object",
        body=f"{CLAUDE} {COMMON} max_tokens!=count stop_sequences=stop? temperature=number? top_k=int? top_p=number? "
        "stream=bool? output_config=output_config? chat_template_kwargs=object?",
        stream=EVENTS,
    ),
    Operation(f"POST {COUNT_TOKENS}", "Tokens of a conversation.", "input_tokens!=int", body=CLAUDE),
    Operation(
        f"POST {MESSAGES}/batches",
        "Begin a batch of messages.",
        BATCHED,
        body="requests!=[batched]+",
    ),
    _read(f"GET {MESSAGES}/batches", "The batches of this key, newest first.", PAGED, 400, query=CLAUDE_PAGE),
    _read(f"GET {MESSAGES}/batches/{{message_batch_id}}", "A batch with its state.", BATCHED),
    _read(f"DELETE {MESSAGES}/batches/{{message_batch_id}}", "Delete a batch that has ended.", TYPED, 400),
    _read(f"POST {MESSAGES}/batches/{{message_batch_id}}/cancel", "End a batch.", BATCHED, 400),
    _read(
        f"GET {MESSAGES}/batches/{{message_batch_id}}/results",
        "The answers of a batch that has ended, a line for each.",
        "custom_id!=text result!=object",
        400,
        kind=JSON_LINES,
    ),
    Operation(
        f"POST {OLLAMA_CHAT}",
        "Answer a conversation.",
        "message!=any done!=bool done_reason=text",
        body=f"{OLLAMA} messages=[message]? tools=[tool]?",
        stream=LINES,
    ),
    Operation(
        f"POST {GENERATE}",
        "Answer a text.",
        "response!=any done!=bool done_reason=text",
        body=f"{OLLAMA} prompt=text? suffix=text? images=[text]? system=text? raw=bool? context=[int]?",
        stream=LINES,
    ),
    Operation(
        "POST /api/embed",
        "Embeddings of texts.",
        "embeddings!=[vector]",
        body=f"{OLLAMA_EMBEDDED} input!=text|[text]+",
    ),
    Operation(
        "POST /api/embeddings",
        "The embedding of a text.",
        "embedding!=vector",
        body=f"{OLLAMA_EMBEDDED} prompt!=text",
    ),
    Operation("GET /api/tags", "The models, as ollama lists them.", OLLAMA_LISTING),
    Operation("GET /api/ps", "The models in memory, which are all models.", OLLAMA_LISTING),
    Operation("POST /api/show", "Details of a model.", "details!=object model_info!=object", body="model=ollama_name?"),
    Operation("GET /api/version", "The version of ollama's API.", "version!=text"),
    *(Operation(f"POST /api/{name}", READ_ONLY, "", (403,)) for name in ("push", "create", "copy")),
    Operation(
        "POST /api/pull",
        "Download a model of the Hugging Face hub; needs an API key with admin=1.",
        "status!=text",
        (403, 502),
        "model!=name stream=bool?",
        stream=LINES,
    ),
    Operation(
        "DELETE /api/delete",
        "Delete a model that is not served from this machine; needs an API key with admin=1.",
        "",
        (403, 409),
        "model!=name",
    ),
    _read("GET /v1/files", "The files of this key.", LISTING, 400, query=f"{PAGE} purpose=kept_purpose"),
    Operation("POST /v1/files", "Upload a file.", IDENTIFIED, body="file!=file purpose!=purpose", kind=FORM),
    _read("GET /v1/files/{file_id}", "A file.", IDENTIFIED),
    _read("DELETE /v1/files/{file_id}", "Delete a file.", IDENTIFIED),
    _read("GET /v1/files/{file_id}/content", "The content of a file.", kind=BINARY),
    _read("GET /v1/batches", "The batches of this key, newest first.", LISTING, 400, query=PAGE),
    Operation(
        "POST /v1/batches",
        "Begin a batch.",
        IDENTIFIED,
        body="input_file_id!=text endpoint!=endpoint completion_window=/24h metadata=object?",
    ),
    _read("GET /v1/batches/{batch_id}", "A batch with its state.", IDENTIFIED),
    _read("POST /v1/batches/{batch_id}/cancel", "End a batch and keep its answers.", IDENTIFIED, 400),
)


def document(models: list[str], vocab_size: int, keys: bool) -> Schema:
    """Returns the OpenAPI document of a server with these models; `keys` says that it needs API keys."""
    words = Words(models, vocab_size)
    components: Schema = {"schemas": words.components}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        method, _, path = operation.route.partition(" ")
        paths.setdefault(path, {})[method.lower()] = words.operation(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvern", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if keys else [],
    }


class Words:
    """The schemas that words stand for on a server with these models."""

    def __init__(self, models: list[str], vocab_size: int) -> None:
        sampling = self._sampling()
        for_ollama = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        unlike = [name for name in sampling if name.startswith("prompt_logprobs") or name in ("n", "logprobs")]
        self._groups = {
            "sampling": sampling,
            "response_sampling": {name: schema for name, schema in sampling.items() if name not in unlike},
            "ollama_sampling": {name: sampling[name] for name in for_ollama},
        }
        self._types = {
            **TYPES,
            "model": one_of(*models),
            "ollama_name": one_of(*models, *(f"{name}:latest" for name in models)),
            "purpose": one_of(*PURPOSES),
            "kept_purpose": one_of(*PURPOSES, OUTPUT),
            "endpoint": one_of(*ENDPOINTS),
            "token": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
            "vector": listed(TYPES["number"]),
        }
        some, compared = self.schema("text|[token]+"), self.schema("name|text_object")
        several = listed(some, minItems=1, maxItems=MOST_SEQUENCES)
        documents = listed(compared, minItems=1, maxItems=MOST_PAIRS)
        prompts = listed(TYPES["text"], minItems=1, maxItems=MOST_PROMPTS)
        self._types |= {
            "prompts": {"anyOf": [*some["anyOf"], prompts]},
            "contexts": {"anyOf": [some, several]},
            "continuations": several,
            "documents": documents,
            "texts": {"anyOf": [compared, documents]},
        }

    def _sampling(self) -> dict[str, Schema]:
        """Returns the fields of SamplingParams that requests may have, and sets the schemas of their types."""
        template = "#/components/schemas/{name}"
        _, self.components = msgspec.json.schema_components([SamplingParams], ref_template=template)
        fields = self.components.pop("SamplingParams")["properties"]
        del self.components["StopScope"], fields["stop_scope"]  # only chats set it
        documents = field_documents(SamplingParams)
        return {name: _nullable(schema) | {"description": documents[name]} for name, schema in fields.items()}

    def schema(self, words: str) -> Schema:
        """Returns the schema of a type."""
        if words.endswith("?"):
            return optional(self.schema(words[:-1]))
        choices = re.split(r"\|(?![^\[]*\])", words)
        if len(choices) > 1:
            return {"anyOf": [self.schema(choice) for choice in choices]}
        if words.startswith("["):
            return listed(self.schema(words.rstrip("+")[1:-1]), **({"minItems": 1} if words.endswith("+") else {}))
        if words.startswith("/"):
            return one_of(*words[1:].split("/"))
        return self._types[words] if words in self._types else self.record(RECORDS[words])

    def fields(self, words: str) -> dict[str, Schema]:
        """Returns the schema of each field, required or not."""
        found: dict[str, Schema] = {}
        for word in words.split():
            name, _, kind = word.partition("=")
            found |= self._groups[name[1:]] if name.startswith("*") else {name.rstrip("!"): self.schema(kind)}
        return found

    def record(self, words: str) -> Schema:
        """Returns the schema of an object; fields that are not named are ignored."""
        required = [word.partition("!=")[0] for word in words.split() if "!=" in word]
        return {"type": "object", "properties": self.fields(words), "required": required}

    def operation(self, asked: Operation, path: str) -> Schema:
        """Returns an operation with its answers and errors."""
        bodies = (asked.body,) if isinstance(asked.body, str) else asked.body
        usual = REFUSALS if bodies else (401,)
        statuses = () if asked.is_open else sorted({*usual, *asked.statuses})
        kind = JSON if bodies else asked.kind
        content: Schema = {kind: {"schema": self.record(asked.answer)} if asked.answer else {}}
        if asked.stream:
            content[asked.stream] = {"schema": self._stream(asked.stream)}
        text = TYPES["text"]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in re.findall(r"\{(\w+)\}", path)
        ]
        query = self.fields(asked.query)
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        refused = {str(status): self._refused(status, path) for status in statuses}
        found: Schema = {
            "summary": asked.summary,
            "parameters": parameters,
            "responses": {"200": {"description": "Done.", "content": content}, **refused},
        }
        if bodies:
            forms = [self.record(body) for body in bodies]
            schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
            found["requestBody"] = {"required": True, "content": {asked.kind: {"schema": schema}}}
        return {**found, "security": []} if asked.is_open else found

    def _stream(self, kind: str) -> Schema:
        if kind == LINES:
            return {"type": "string", "description": "One line of JSON for each part of the answer."}
        return self.record(EVENT) | {"description": "An event of the stream; data is JSON."}

    @functools.cache  # noqa: B019 (it lives as long as one document is made)
    def _refused(self, status: int, path: str) -> Schema:
        """Returns the answer of an error, in the format of the path's API."""
        error = "error!=openai_error"
        if path.startswith("/api/"):
            error = "error!=text"
        elif path.startswith(MESSAGES):
            error = "type!=/error error!=claude_error"
        return {"description": REASONS[status], "content": {JSON: {"schema": self.record(error)}}}


def listed(items: Schema, **limits: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items, **limits}


def optional(schema: Schema) -> Schema:
    """Returns the schema of an optional field; null is the same as leaving it out."""
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    """Returns the schema of one of these texts."""
    return {"type": "string", "enum": list(values)}


def _nullable(schema: Schema) -> Schema:
    schema = {name: value for name, value in schema.items() if name != "default"}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], *([] if {"type": "null"} in schema["anyOf"] else [{"type": "null"}])]}
    return optional(schema)
