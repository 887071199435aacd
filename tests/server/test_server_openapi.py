"""The description of the API against the API: requests made from it, answers held against it."""

import http.client
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.support.served import KEY, Served

EXCLUDED = [positive_data_acceptance]
"""A text can be too long for the model and a token unknown to it: the description cannot say that."""
OF_FORMS = [*EXCLUDED, negative_data_rejection]
"""A number as a part of a form is a text of digits."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    arguments = ("--api-key", KEY, "--threads", "1", "--max-model-len", "256", "--data-dir", str(data))
    served = Served("kvern-1m", *arguments)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def api(server: Served) -> schemathesis.BaseSchema:
    url = server.url.removesuffix("/v1")
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    schema.config.generation.allow_extra_parameters = False  # what a query says beside is ignored, as everywhere
    return schema


@pytest.mark.parametrize("examples", [1, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "mode",
    [GenerationMode.POSITIVE, pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.nightly)],
    ids=lambda mode: mode.value,
)
def test_answers_are_what_the_description_says(
    api: schemathesis.BaseSchema, mode: GenerationMode, examples: int
) -> None:
    """Requests that follow it and requests that do not; each answer has a status and a shape that it names."""
    wrong = []
    for found in api.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(case: Case) -> None:
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
                case.body["max_tokens"] = 2
            excluded = OF_FORMS if case.operation.label == "POST /v1/files" else EXCLUDED
            case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=excluded)

        try:
            check()
        except Unsatisfiable:
            continue  # it takes nothing that could be wrong
        except FailureGroup as error:
            wrong += [f"{operation.label}: {failure}" for failure in error.exceptions]
    assert not wrong, "\n\n".join(wrong)


def test_the_page_shows_every_route(server: Served) -> None:
    connection = http.client.HTTPConnection(server.host, server.port)
    connection.request("GET", "/docs", headers={"Authorization": f"Bearer {KEY}"})
    page = connection.getresponse().read().decode()
    described = server.raw("GET", "/openapi.json")[2]
    assert all(f"<code>{path}</code>" in page for path in described["paths"])
    assert "http" not in page.replace("https://", ""), "nothing is loaded from elsewhere"
    connection.close()
