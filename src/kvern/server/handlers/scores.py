"""/v1/score and /v1/rerank: the handlers, and relevance of documents to queries in the way that a model supports."""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from kvern.api import text_pairs
from kvern.api.chat_fields import read_thinking
from kvern.api.completion_answers import cached_counts
from kvern.api.errors import HttpError
from kvern.api.fields import merge_extra
from kvern.api.scores import KNOWN, read_score, score_answer
from kvern.api.text_pairs import Relevances, TextPairs, has_pairs, pairs_answer, probability_of_yes, read_pairs
from kvern.engine.embedding import check_embeds, cosine
from kvern.engine.inputs import Prompt
from kvern.engine.relevance import Classifier, Embeddings, PairClassifier, Way, YesOrNo, sigmoid, way_of
from kvern.engine.scoring import Pair, score_of
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams
from kvern.server.apis import Apis
from kvern.server.handlers.whole_answers import Body, WholeAnswers
from kvern.server.keys import ApiKey
from kvern.server.service import Ask
from kvern.serving.client import EngineClient
from kvern.serving.client_inputs import ClientInputs

NO_THINKING = read_thinking({"enable_thinking": False}).variables
ROLES = [re.compile(f"[\"']{role}[\"']") for role in ("query", "document")]
"""Patterns of two roles: a chat template that names both was made for reranking."""
PARTIAL = "\ufffd"
"""The end of a text that was cut within a character."""

P = TypeVar("P", bound=Sized)
"""A prompt; its length is its number of tokens."""
Write = Callable[[str], Awaitable[P]]
"""Builds the prompt that contains a text."""


class Fitter:
    """Builds prompts of at most `room` tokens. If the request allows it, texts that are too long lose their ends."""

    def __init__(self, asked: TextPairs, inputs: ClientInputs, room: int) -> None:
        self._asked, self._inputs = asked, inputs
        given = asked.most_tokens
        self._cuts, self._most = given is not None, min(room, given) if given is not None and given > 0 else room

    async def query(self, text: str, number: int, write: Write[P]) -> P:
        """Returns the prompt with a query. Raises HttpError."""
        return await self._fitted(text, write, f"{self._asked.names[0]}[{number}]")

    async def document(self, text: str, number: int, write: Write[P]) -> P:
        """Returns the prompt with a document. Raises HttpError."""
        most = self._asked.most_document_tokens
        if most is not None and len(of_text := await self._encode(text)) > most:
            text = await self._beginning(of_text, most)
        return await self._fitted(text, write, f"{self._asked.names[1]}[{number}]")

    async def _fitted(self, text: str, write: Write[P], name: str) -> P:
        prompt = await write(text)
        of_text = await self._encode(text) if self._cuts and len(prompt) > self._most else []
        kept = len(of_text)
        while (
            kept and len(prompt) > self._most
        ):  # the shortened text may have more tokens at its end than before, so try again
            kept = max(kept + self._most - len(prompt), 0)
            prompt = await write(await self._beginning(of_text, kept))
        if len(prompt) > self._most:
            remedy = "shorten the query" if self._cuts else "shorten it, or send truncate_prompt_tokens"
            message = f"{name} has {len(prompt)} tokens with all of its prompt, and at most {self._most} fit: {remedy}"
            raise HttpError(400, message, param=name.partition("[")[0])
        if not len(prompt):
            raise HttpError(400, f"{name} has no token left: send more of it", param=name.partition("[")[0])
        return prompt

    async def _encode(self, text: str) -> list[int]:
        return await self._inputs.encode(text, add_special_tokens=False)

    async def _beginning(self, token_ids: list[int], most: int) -> str:
        return (await self._inputs.decode(token_ids[:most])).rstrip(PARTIAL)


class Relevance:
    """Computes relevance with the engines of a service."""

    def __init__(self, apis: Apis) -> None:
        self._service = apis.service
        self._ways: dict[Path, Way] = {}

    async def of(self, asked: TextPairs, model: str, key: ApiKey) -> Relevances:
        """Returns the relevance of each pair.

        Raises HttpError, InvalidRequest, CorruptCheckpoint, EngineDied or DeadlineExceeded.
        """
        client = self._service.engine_of(model).client
        if client.folder not in self._ways:
            self._ways[client.folder] = await asyncio.to_thread(way_of, client.folder, client.tokenizer)
        match self._ways[client.folder]:
            case Embeddings():
                return await self._by_embeddings(asked, client, model, key)
            case Classifier() as classifier:
                return await self._by_classifier(asked, classifier, client, model, key)
            case PairClassifier() as classifier:
                return await self._by_pair_classifier(asked, classifier, client, model, key)
            case YesOrNo() as answers:
                return await self._by_asking(asked, answers, client, model, key)

    async def _by_embeddings(self, asked: TextPairs, client: EngineClient, model: str, key: ApiKey) -> Relevances:
        check_embeds(client.inputs.model, client.folder, model)
        _check_no_instruction(asked)
        inputs, queries = client.inputs, dict[str, int]()
        for number, (query, _) in enumerate(asked.pairs):
            queries.setdefault(query, number)
        fitter = Fitter(asked, inputs, inputs.max_model_len - (not inputs.model.is_encoder))
        prompts = [await fitter.query(query, number, inputs.encode) for query, number in queries.items()]
        for number, (_, document) in enumerate(asked.pairs):
            prompts.append(await fitter.document(document, number, inputs.encode))
        outputs = await self._embedded(asked, prompts, model, key)
        states = [output.embedding or b"" for output in outputs]
        of_query, of_documents = dict(zip(queries, states[: len(queries)], strict=True)), states[len(queries) :]
        scores = [cosine(of_query[query], state) for (query, _), state in zip(asked.pairs, of_documents, strict=True)]
        return _relevances(scores, "cosine", prompts, outputs)

    async def _by_classifier(
        self, asked: TextPairs, classifier: Classifier, client: EngineClient, model: str, key: ApiKey
    ) -> Relevances:
        prompts = await _questions(asked, client, model, 1)
        outputs = await self._embedded(asked, prompts, model, key)
        scores = [sigmoid(classifier.logit(output.embedding or b"")) for output in outputs]
        return _relevances(scores, "classifier", prompts, outputs)

    async def _by_pair_classifier(
        self, asked: TextPairs, classifier: PairClassifier, client: EngineClient, model: str, key: ApiKey
    ) -> Relevances:
        _check_no_instruction(asked)
        inputs = client.inputs
        fitter = Fitter(asked, inputs, inputs.max_model_len)
        prompts = [
            await fitter.document(document, number, functools.partial(inputs.pair, query))
            for number, (query, document) in enumerate(asked.pairs)
        ]
        outputs = await self._embedded(asked, prompts, model, key)
        scores = [classifier.score(output.embedding or b"") for output in outputs]
        return _relevances(scores, "classifier", prompts, outputs)

    async def _by_asking(
        self, asked: TextPairs, answers: YesOrNo, client: EngineClient, model: str, key: ApiKey
    ) -> Relevances:
        prompts = await _questions(asked, client, model, 1 + max(len(answers.yes), len(answers.no)))
        pairs: list[Pair] = [(prompt, answer) for prompt in prompts for answer in (answers.yes, answers.no)]
        scored = await client.inputs.scored_prompts(pairs, add_special_tokens=False)
        params = [prompt.params for prompt in scored]
        ask = Ask(model, asked.common, [prompt.token_ids for prompt in scored], params, key)
        outputs = await self._service.run(ask)
        found = [score_of(output, prompt) for output, prompt in zip(outputs, scored, strict=True)]
        scores = [probability_of_yes(yes, no) for yes, no in zip(found[::2], found[1::2], strict=True)]
        return _relevances(scores, "yes against no", prompts, outputs[::2])

    async def _embedded(
        self, asked: TextPairs, prompts: Sequence[Prompt], model: str, key: ApiKey
    ) -> list[RequestOutput]:
        ask = Ask(model, asked.common, prompts, SamplingParams(), key, embed=True)
        outputs = await self._service.run(ask)
        for output in outputs:
            output.check()
        return outputs


async def _questions(asked: TextPairs, client: EngineClient, model: str, answer: int) -> list[list[int]]:
    """Returns the prompt of each pair, with room for `answer` tokens."""
    inputs, template = client.inputs, client.tokenizer.chat_template
    if not template:
        message = (
            f"{model} tells no relevance: it gives no embeddings, and has no chat template to be asked by; use a "
            "reranker or an embedding model, or give it a template (--chat-template)"
        )
        raise HttpError(400, message, param="model")
    has_roles = all(role.search(template.source(tools=False)) for role in ROLES)
    fitter = Fitter(asked, inputs, inputs.max_model_len - answer)

    async def written(query: str, document: str) -> list[int]:
        return await inputs.chat_prompt(asked.question(query, document, has_roles), None, NO_THINKING)

    return [
        await fitter.document(document, number, functools.partial(written, query))
        for number, (query, document) in enumerate(asked.pairs)
    ]


def _check_no_instruction(asked: TextPairs) -> None:
    if asked.instruction:
        message = "instruction is for models that are asked; this one compares texts: write it into the query"
        raise HttpError(400, message, param="instruction")


def _relevances(scores: list[float], method: str, prompts: Sequence[Sized], outputs: list[RequestOutput]) -> Relevances:
    return Relevances(scores, method, sum(map(len, prompts)), cached_counts(outputs))


class Scores(WholeAnswers):
    """Handler of /v1/score, for continuations and for pairs of texts."""

    def __init__(self, apis: Apis) -> None:
        super().__init__(apis)
        self._relevance = apis.get(Relevance)

    def fields_of(self, body: Mapping[str, Any]) -> Collection[str]:
        return text_pairs.KNOWN if has_pairs(body) else KNOWN

    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
        merge_extra(body)
        service = self._service
        model = await service.model(body, key)
        if has_pairs(body):
            pairs = read_pairs(body)
            body.clear()
            has_read()
            return pairs_answer(await self._relevance.of(pairs, model, key), model)
        asked = read_score(body)
        logprobs, common = asked.logprobs, asked.common
        prompts = await service.engine_of(model).client.inputs.scored_prompts(asked.pairs, asked.add_special_tokens)
        del asked  # its texts are not needed while the pairs are scored
        params = [prompt.params for prompt in prompts]
        ask = Ask(model, common, [prompt.token_ids for prompt in prompts], params, key)
        body.clear()
        has_read()
        return score_answer(await service.run(ask), prompts, model, logprobs)


class Rerank(WholeAnswers):
    """Handler of /v1/rerank."""

    known = text_pairs.RERANK_KNOWN

    def __init__(self, apis: Apis) -> None:
        super().__init__(apis)
        self._relevance = apis.get(Relevance)

    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
        merge_extra(body)
        model, wanted = await self._service.model(body, key), text_pairs.read_rerank(body)
        body.clear()
        has_read()
        return text_pairs.rerank_answer(wanted, await self._relevance.of(wanted.asked, model, key), model)
