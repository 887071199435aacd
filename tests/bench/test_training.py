"""The embedded model's training: the text generator, the chat format, the trainer and its export."""

import json
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from training import editing
from training.adapter import load
from training.arithmetic import operands
from training.draw import Draw, Example, is_held_out
from training.exam import is_right, questions, wanted
from training.extraction import extraction
from training.text import TASKS, stream
from training.tokenizer import SPECIAL, TEMPLATE, document, render, save, train_tokenizer
from training.train import SIZES, Llama, document_mask, export, pack, train, weigh

from kvern.models.hub import resolve_model

# Greetings are the same for everybody; nothing of them is held out. Questions without a blank are always trained on.
SPLIT_TASKS = [task for task in TASKS if task not in ("identity", "memory")]
FIXED_QUESTIONS = ("decline", "tool_refusal")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(train_tokenizer(conversations=300, seed=1), folder)
    return folder


def split_key(*key: object) -> tuple[object, ...]:
    """a + b and b + a are one combination."""
    return (*key[:2], *sorted(key[2:], key=int)) if key[:2] == ("arithmetic", "+") else key  # type: ignore[call-overload]


def draw_examples(seed: int, count: int, held_out: bool = False) -> list[Example]:
    return list(islice(stream(Draw(seed, held_out)), count))


def test_the_same_seed_makes_the_same_text() -> None:
    first, second, other = (draw_examples(seed, 100) for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.sample(4)
@pytest.mark.parametrize("task", SPLIT_TASKS)
def test_training_never_draws_a_held_out_combination(task: str) -> None:
    for held_out in (False, True):
        draw = Draw(5, held_out)
        keys = [TASKS[task](draw).key for _ in range(60)]
        assert all(is_held_out(*split_key(*key)) == held_out for key in keys if task not in FIXED_QUESTIONS)
        assert len(set(keys)) > 5


def test_declined_questions_with_a_blank_are_split() -> None:
    trained = {TASKS["decline"](draw).key for draw in [Draw(6)] for _ in range(400)}
    assert not trained & {example.key for example in questions("decline", 200)}


def test_both_orders_of_a_sum_are_on_the_same_side() -> None:
    draw = Draw(7)
    sums = [(a, b) for operation, a, b in (operands(draw) for _ in range(300)) if operation == "+"]
    assert all(not is_held_out("arithmetic", "+", *sorted(pair)) for pair in sums)


def test_arithmetic_answers_are_right() -> None:
    draw = Draw(8)
    for _ in range(300):
        example = TASKS["arithmetic"](draw)
        _, operation, a, b = example.key
        assert isinstance(a, int)
        assert isinstance(b, int)
        assert int(example.messages[-1]["content"]) == (a + b if operation == "+" else a - b)


def test_extraction_answers_are_json_whose_values_stand_in_the_text() -> None:
    draw = Draw(9)
    for _ in range(300):
        *_, asked, answer = extraction(draw).messages
        records = json.loads(answer["content"])
        for record in records if isinstance(records, list) else [records]:
            assert all(value is None or str(value) in asked["content"] for value in record.values())


def test_tool_calls_name_an_offered_tool_and_its_parameters() -> None:
    for example in questions("tool_call", 200):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        for call in example.messages[-1]["tool_calls"]:
            schema = offered[call["function"]["name"]]
            arguments = call["function"]["arguments"]
            assert set(schema.get("required", ())) <= set(arguments) <= set(schema["properties"])


def test_conversations_alternate_and_end_with_the_assistant() -> None:
    for example in draw_examples(10, 300):
        if example.text is None:
            roles = [message["role"] for message in example.messages]
            assert roles[-1] == "assistant"
            assert "system" not in roles[1:]
            assert all(before != after for before, after in pairwise(roles))


def test_an_answer_is_right_to_the_letter_only() -> None:
    example = questions("arithmetic", 1)[0]
    assert is_right(example, wanted(example))
    assert not is_right(example, wanted(example) + "0")


def test_template_renders_what_the_trainer_saw(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    for example in draw_examples(11, 150):
        if example.text is None:
            whole = tokenizer.apply_chat_template(example.messages, tools=example.tools or None, tokenize=False)
            assert whole == document(example)
    messages, tools = questions("tool_answer", 1)[0].messages[:-1], []
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == render(messages, tools, add_generation_prompt=True)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|begin|><|user|>Hello<|end|>"
    assert TEMPLATE.read_text() == (tokenizer_folder / "chat_template.jinja").read_text()


def test_tokenizer_round_trips_splits_digits_and_keeps_tool_tags(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    text = '<tool_call>{"n": 12345}</tool_call> Grüße 日本 🦊'
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert [tokenizer.decode([one]) for one in ids if tokenizer.decode([one]).strip().isdigit()] == list("12345")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(len(SPECIAL)))
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id


def test_the_loss_weighs_what_the_assistant_says(tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = "<|begin|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|begin|>Raw text<|end|><|pad|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    spoken = [one for one, weight in zip(ids, weigh(torch.tensor([ids]))[0].tolist(), strict=True) if weight == 1.0]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == "Hello!<|end|>Raw text<|end|>"


def test_documents_in_a_row_do_not_see_each_other() -> None:
    mask = document_mask(torch.tensor([[0, 9, 9, 0, 9]]), compiled=False)[0, 0]
    assert mask[2].tolist() == [True, True, True, False, False]
    assert mask[4].tolist() == [False, False, False, True, True]


def test_a_batch_depends_on_seed_and_number_alone(tokenizer_folder: Path) -> None:
    first, again, next_one = (pack(tokenizer_folder, 1, index, 2, 512) for index in (4, 4, 5))
    assert (first == again).all()
    assert (first != next_one).any()


@pytest.mark.nightly
def test_training_resumes_to_the_same_weights(tokenizer_folder: Path, tmp_path: Path) -> None:
    def run(checkpoint: str, stop_at: int | None) -> Llama:
        path = tmp_path / checkpoint
        return train(
            SIZES["tiny"],
            4,
            tokenizer_folder,
            path,
            seed=2,
            workers=0,
            device="cpu",
            compiled=False,
            stop_at=stop_at,
        )

    straight = run("straight.pt", None)
    run("broken.pt", 2)
    resumed = run("broken.pt", None)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_exported_folder_loads_in_transformers_with_the_same_logits(tokenizer_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Llama(SIZES["tiny"])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    export(model, tokenizer_folder, tmp_path, shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([[0, *range(3, 60)]])
    with torch.no_grad():
        ours, theirs = model(tokens, document_mask(tokens, compiled=False)), loaded(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("task", editing.TASKS)
def test_edited_texts_are_those_of_their_prompts(task: str) -> None:
    draw = Draw(3)
    for _ in range(30):
        asked, answer = (message["content"] for message in editing.TASKS[task](draw).messages)
        if task == "edit":
            (old, new), text = asked.removeprefix("Replace ").split(": ")[0].split(" by "), asked.split(": ", 1)[1]
            assert old in text and answer == text.replace(old, new)
        else:
            assert asked.endswith(answer)


@pytest.mark.nightly
def test_a_model_learns_to_edit(tmp_path: Path) -> None:
    folder = resolve_model("kvern-1m")
    before = load(folder).state_dict()
    learnt = editing.train(folder, 2, rows=1, length=256).state_dict()
    assert any(not torch.equal(before[name], weight) for name, weight in learnt.items())
