"""Responses and conversations that outlive their requests, and their server: real client, real restarts."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvern.server.stores.response_memory import MOST_RESPONSE_BYTES
from tests.support.background_responses import FOLLOWED, LONG, SHORT, plain
from tests.support.served import ENDLESS, Served, eventually, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "keys").write_text("alice:alice-key\nbob:bob-key\n")
    with serving(*ENDLESS, "--api-key-file", str(folder / "keys"), "--data-dir", str(folder / "data")) as served:
        yield served


@pytest.fixture
def alice(server: Served) -> openai.OpenAI:
    return server.client("alice-key")


def test_a_conversation_and_its_items(alice: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    begun = alice.conversations.create(items=said, metadata={"a": "b"})
    assert alice.conversations.retrieve(begun.id).to_dict() == begun.to_dict()
    assert alice.conversations.update(begun.id, metadata={"c": "d"}).metadata == {"c": "d"}
    added: Any = alice.conversations.items.create(begun.id, items=[{"role": "user", "content": "Who?"}]).data[0]
    items: list[Any] = list(alice.conversations.items.list(begun.id, order="asc", limit=2))  # of two pages
    assert [(item.role, item.content[0].text, item.content[0].type) for item in items] == [
        ("user", "Hello", "input_text"),
        ("assistant", "Hi.", "output_text"),
        ("user", "Who?", "input_text"),
    ]
    assert [item.id for item in alice.conversations.items.list(begun.id)] == [item.id for item in items[::-1]]
    found: Any = alice.conversations.items.retrieve(added.id, conversation_id=begun.id)
    assert found.to_dict() == added.to_dict() == items[2].to_dict()
    assert alice.conversations.items.delete(added.id, conversation_id=begun.id).id == begun.id
    with pytest.raises(openai.NotFoundError, match="has no item"):
        alice.conversations.items.retrieve(added.id, conversation_id=begun.id)
    assert alice.conversations.delete(begun.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        alice.conversations.items.list(begun.id)


def test_responses_go_on_with_a_conversation_one_at_a_time(server: Served, alice: openai.OpenAI) -> None:
    conversation = alice.conversations.create().id
    first = alice.responses.create(**SHORT, input="Who are you?", conversation=conversation)
    assert first.conversation is not None and first.conversation.id == conversation
    second = alice.responses.create(**SHORT, input="And I?", conversation={"id": conversation}, store=False)
    texts = ["Who are you?", first.output_text, "And I?", second.output_text]
    items: list[Any] = list(alice.conversations.items.list(conversation, order="asc"))
    assert [item.content[0].text for item in items] == texts
    assert [items[1].id, items[3].id] == [first.output[0].id, second.output[0].id]
    told: Any = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=False)
    ]
    assert alice.responses.create(**SHORT, input=told).output_text == second.output_text
    with server.held():
        stream = alice.responses.create(**LONG, stream=True, conversation=conversation)
        next(iter(stream))
        with pytest.raises(openai.ConflictError, match="another response goes on with conversation"):
            alice.responses.create(**SHORT, input="Now?", conversation=conversation)
        stream.close()  # and nothing of it is added
    eventually(lambda: _goes_on(alice, conversation))
    assert len(list(alice.conversations.items.list(conversation))) == 6


def _goes_on(client: openai.OpenAI, conversation: str) -> bool:
    try:
        client.responses.create(**SHORT, input="Now?", conversation=conversation)
    except openai.ConflictError:
        return False
    return True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conversation": "conv_", "previous_response_id": "resp_"}, "are both set: choose one"),
        ({"conversation": {"name": "a"}}, "it must be the id of a conversation"),
        ({"background": True, "store": False}, "background is set and store is false"),
    ],
)
def test_what_does_not_go_together(alice: openai.OpenAI, fields: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        alice.responses.create(**SHORT, input="a", **fields)


def test_a_stream_in_the_background_is_followed_again(alice: openai.OpenAI) -> None:
    stream = alice.responses.create(**LONG, **FOLLOWED)
    seen = [next(iter(stream)) for _ in range(8)]
    stream.close()
    name = seen[0].response.id  # type: ignore[union-attr]
    rest = list(alice.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    whole = plain([*seen, *rest])
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert plain(alice.responses.retrieve(name, stream=True)) == whole
    assert plain(alice.responses.retrieve(name, stream=True, starting_after=len(whole) - 3)) == whole[-2:]
    ended = alice.responses.retrieve(name)
    assert "".join(event["delta"] for event in whole if "delta" in event) == ended.output_text
    assert (whole[-1]["type"], whole[-1]["response"]) == ("response.incomplete", ended.to_dict())
    assert len([event for event in whole if "delta" in event]) > 100
    with pytest.raises(openai.BadRequestError, match="was not made with background and stream"):
        alice.responses.retrieve(alice.responses.create(**SHORT, input="a").id, stream=True)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_the_stream_of_a_response_that_is_ended_ends(alice: openai.OpenAI, how: str) -> None:
    stream = alice.responses.create(**(LONG | {"max_output_tokens": 190_000}), **FOLLOWED)
    name = next(iter(stream)).response.id  # type: ignore[union-attr]
    getattr(alice.responses, how)(name)
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")  # type: ignore[union-attr]
    if how == "delete":
        with pytest.raises(openai.NotFoundError):
            alice.responses.retrieve(name)
    else:
        assert alice.responses.retrieve(name).status == alice.responses.cancel(name).status == "cancelled"


def test_the_input_of_a_response_is_listed(alice: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    name = alice.responses.create(**SHORT, input=asked).id
    items: list[Any] = list(alice.responses.input_items.list(name, order="asc", limit=2))
    assert [item.content[0].text for item in items] == list("01234")
    assert [item.id for item in alice.responses.input_items.list(name, after=items[2].id)] == [items[1].id, items[0].id]


def test_nobody_else_finds_what_a_key_keeps(server: Served, alice: openai.OpenAI) -> None:
    conversation = alice.conversations.create(items=[{"role": "user", "content": "a"}]).id
    item: Any = alice.conversations.items.list(conversation).data[0]
    response = alice.responses.create(**SHORT, input="a").id
    bob = server.client("bob-key")
    for ask in (
        lambda: bob.responses.input_items.list(response),
        lambda: bob.responses.delete(response),
        lambda: bob.responses.retrieve(response, stream=True),
        lambda: bob.responses.create(**SHORT, input="a", conversation=conversation),
        lambda: bob.responses.create(**SHORT, input="a", previous_response_id=response),
        lambda: bob.conversations.retrieve(conversation),
        lambda: bob.conversations.update(conversation, metadata={}),
        lambda: bob.conversations.delete(conversation),
        lambda: bob.conversations.items.create(conversation, items=[{"role": "user", "content": "b"}]),
        lambda: bob.conversations.items.retrieve(item.id, conversation_id=conversation),
        lambda: bob.conversations.items.delete(item.id, conversation_id=conversation),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no"):
            ask()


@pytest.mark.parametrize("name", ["..%2f..%2fkvern.db", "%00", "%ff%fe", "a" * 5000, "'%20OR%201=1", "%2e%2e"])
def test_names_that_are_no_ids(server: Served, name: str) -> None:
    for path in (f"responses/{name}/input_items", f"conversations/{name}/items", f"conversations/{name}/items/{name}"):
        assert server.raw("GET", f"/v1/{path}", key="alice-key")[0] == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("RESPONSE?stream=true&starting_after=-1", "starting_after is '-1'"),
        ("RESPONSE?stream=true&starting_after=" + "9" * 400, "it must be the number of an event"),
        ("RESPONSE?stream=2", "stream is '2': it must be true or false"),
        ("RESPONSE/input_items?order=up", "order is 'up': it must be asc or desc"),
        ("RESPONSE/input_items?limit=0", "limit is '0'"),
    ],
)
def test_queries_that_mean_nothing(server: Served, alice: openai.OpenAI, path: str, said: str) -> None:
    response = alice.responses.create(**SHORT, input="a").id
    status, _, body = server.raw("GET", f"/v1/responses/{path.replace('RESPONSE', response)}", key="alice-key")
    assert status == 400 and said in body["error"]["message"]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (5, "items must be a list"),
        ([5], r"items is \[5\]"),
        ([{"type": "unheard of"}], r"items\[0\] of type 'unheard of'"),
        ([{"role": "user", "content": "a" * MOST_RESPONSE_BYTES}], "over its limit of"),
    ],
)
def test_items_that_are_none(alice: openai.OpenAI, items: Any, said: str) -> None:
    with pytest.raises(openai.APIStatusError, match=said) as refused:
        alice.conversations.create(items=items)
    assert refused.value.status_code in (400, 413)
