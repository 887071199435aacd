"""OpenAI's /v1/embeddings: the handler."""

from collections.abc import Callable

from kvern.api.embeddings import KNOWN, embedding_answer, read_embedding
from kvern.api.fields import merge_extra
from kvern.engine.embedding import check_embeds
from kvern.request.sampling_params import SamplingParams
from kvern.server.handlers.whole_answers import Body, WholeAnswers
from kvern.server.keys import ApiKey


class Embeddings(WholeAnswers):
    """Handler of /v1/embeddings."""

    known = KNOWN

    async def answer(self, body: Body, key: ApiKey, has_read: Callable[[], None] = lambda: None) -> Body:
        merge_extra(body)
        service = self._service
        model = service.model(body)
        client = service.engine_of(model).client
        check_embeds(client.inputs.model, client.folder, model)
        asked = read_embedding(body)
        prompts = asked.prompts
        if asked.encoding is not None:
            encoding = asked.encoding.within(client.inputs.max_model_len - (not client.inputs.model.is_encoder))
            prompts = [await client.inputs.encoded(prompt, encoding, None) for prompt in prompts]
        ask = service.ask(model, asked.common, prompts, SamplingParams(), key, embed=True)
        body.clear()
        has_read()
        return embedding_answer(await service.run(ask), model, asked)
