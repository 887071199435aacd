"""Encoding, decoding, streaming and chat templates, held against tokenizers' and transformers' own results."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvern.errors import CorruptCheckpoint, InvalidRequest
from kvern.tokenizer import IncrementalDetokenizer, Tokenizer

CORPUS = ["hello world, you and me and them", "naïve café 😀 你好世界", "def f(x):\n    return x + 1\n"] * 4
SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]


def byte_level() -> tokenizers.Tokenizer:
    """As in Llama 3 and Qwen: every token is a run of bytes."""
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    result.add_tokens(["<call>", "漢字"])
    return result


def sentencepiece() -> tokenizers.Tokenizer:
    """As in Llama 2 and Gemma: spaces are part of a token, unknown characters fall back to single bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    result = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<s>"))
    result.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # The base vocabulary is trained on letters only, so that everything else needs the fallback.
    result.train_from_iterator(
        ["hello world you and me and them"] * 4,
        trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL + fallback, show_progress=False),
    )
    vocabulary = json.loads(result.to_str())
    vocabulary["added_tokens"] = [token for token in vocabulary["added_tokens"] if token["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(vocabulary))


def save(folder: Path, backend: tokenizers.Tokenizer, template: str | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {"byte": save(root / "byte", byte_level()), "pieces": save(root / "pieces", sentencepiece())}


@pytest.fixture(scope="module")
def byte(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["byte"])


@pytest.fixture(scope="module")
def pieces(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["pieces"])


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], skip)
    return [*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 340), max_size=60), skip=st.booleans())
def test_byte_level_stream_is_the_full_decode_for_any_ids(byte: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(byte, ids, skip=skip)) == byte.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_byte_level_stream_gives_back_any_text(byte: Tokenizer, text: str) -> None:
    assert "".join(stream(byte, byte.encode(text), skip=False)) == text


@given(text=st.text(alphabet=st.sampled_from("hello world 你好😀é\n"), max_size=40))
@settings(max_examples=200)
def test_sentencepiece_stream_gives_back_any_text(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text)
    assert "".join(stream(pieces, ids)) == pieces.decode(ids)


@given(text=st.text(alphabet=st.sampled_from("hello you 你😀"), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_sentencepiece_stream_continues_its_prompt(pieces: Tokenizer, text: str, cut: int) -> None:
    ids = pieces.encode(text)
    prompt, answer = ids[: min(cut, len(ids))], ids[min(cut, len(ids)) :]
    whole = next(end for end in range(len(prompt), -1, -1) if "�" not in pieces.decode(prompt[:end]))
    before = pieces.decode(prompt[:whole])
    assert before + "".join(stream(pieces, answer, prompt)) == pieces.decode(ids)


def test_no_piece_ends_inside_a_character(byte: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (byte, pieces):
        ids = tokenizer.encode("a 🦙🏽 b")
        assert len(ids) > len("a 🦙🏽 b")
        assert not any("�" in piece for piece in stream(tokenizer, ids))


def test_unfinished_character_appears_at_flush(byte: Tokenizer) -> None:
    ids = byte.encode("x🦙")[:-1]
    assert stream(byte, ids)[-1] == "�"
    assert stream(byte, byte.encode("x"))[-1] == ""


def test_garbage_does_not_wait_for_ever(pieces: Tokenizer) -> None:
    lone = pieces.token_to_id("<0xE4>")
    assert lone is not None
    shown = "".join(stream(pieces, [lone] * 50)[:-1])
    assert len(shown) >= 45


def test_stream_of_several_tokens_at_once(byte: Tokenizer) -> None:
    ids = byte.encode("你好 hello")
    detokenizer = IncrementalDetokenizer(byte)
    assert detokenizer.append(ids[:4]) + detokenizer.append(ids[4:]) + detokenizer.flush() == "你好 hello"


def test_special_tokens_are_skipped_or_written(byte: Tokenizer) -> None:
    ids = byte.encode("<|user|>hello</s>")
    assert byte.decode(ids) == "hello"
    assert "".join(stream(byte, ids)) == "hello"
    assert "".join(stream(byte, ids, skip=False)) == "<|user|>hello</s>"


def test_ids_beyond_the_vocabulary_are_skipped(byte: Tokenizer) -> None:
    ids = [*byte.encode("a"), byte.vocab_size + 7, *byte.encode("b")]
    assert "".join(stream(byte, ids)) == byte.decode(ids) == "ab"


def test_bytes_of_tokens_join_to_the_text(byte: Tokenizer, pieces: Tokenizer) -> None:
    text = "naïve 😀"
    assert b"".join(map(byte.id_to_bytes, byte.encode(text))).decode() == text
    assert b"".join(map(pieces.id_to_bytes, pieces.encode(text))).decode() == " " + text
    llama = byte.encode("🦙")
    assert byte.id_to_token(llama[0]) == "�"


def test_special_tokens_and_ends_of_answers(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), eos_token={"content": "</s>", "lstrip": False})
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.eos_token_ids == (1,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert Tokenizer(folder).eos_token_ids == (1, 4)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert Tokenizer(folder).eos_token_ids == (1, 3)


@pytest.mark.parametrize("switches", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [True, False])
def test_tokens_around_a_prompt_are_those_of_transformers(
    tmp_path: Path, switches: dict[str, bool], processor: bool
) -> None:
    backend = byte_level()
    if processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    tokenizer = Tokenizer(save(tmp_path, backend, **switches))
    assert tokenizer.encode("hello world") == reference(tmp_path)("hello world")["input_ids"]
    assert tokenizer.encode("hello", add_special_tokens=False) == backend.encode("hello", add_special_tokens=False).ids


def test_folder_without_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.available
    assert tokenizer.eos_token_ids == (5,)
    assert stream(tokenizer, [1, 2, 3]) == ["", "", "", ""]
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json: send token ids"):
        tokenizer.encode("hello")
    with pytest.raises(InvalidRequest, match="token ids"):
        tokenizer.decode([1])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).write_text("{ truncated")
    with pytest.raises(CorruptCheckpoint, match=name):
        Tokenizer(tmp_path)


def test_lone_surrogate_is_refused(byte: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        byte.encode("ab\ud83d")


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
        "\n{% endfor %}\n{% if add_generation_prompt %}\n{{- '<|im_start|>assistant\n' }}\n{% endif %}\n"
    ),
    "trimmed blocks": (
        "{{ bos_token }}\n    {% for message in messages %}\n    {% if loop.first %}\n first\n    {% endif %}\n"
        "  {{ message.content | trim }}\n{% endfor %}\n"
    ),
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{{ message.content }}{% endfor %}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function.parameters | tojson(indent=2) }}"
        "{% endfor %}{% endif %}{% for m in messages %}{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
        "{{ call.function.name }}{{ call.function.arguments | tojson(sort_keys=true) }}{% endfor %}{% else %}"
        "{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace and macro": (
        "{%- set ns = namespace(system='', count=0) -%}{%- macro turn(role, text) -%}[{{ role }}]{{ text }}"
        "{{ eos_token }}{%- endmacro -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{%- set ns.system = m.content -%}{%- else -%}{%- set ns.count = ns.count + 1 -%}{{ turn(m.role, m.content) }}"
        "{%- endif -%}{%- endfor -%}{{ ns.system }}{{ ns.count }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "undefined names": (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
        "{{ custom_tools }}{{ unk_token }}{{ messages[0].missing }}{{ messages[-1]['content'].split('o')[0] }}"
    ),
    "switch": "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}",
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": " hello <b>&amp;</b> 'quoted' 你好 😀 "}],
    "system": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "<é>"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_prompts_are_those_of_transformers(tmp_path: Path, name: str, conversation: str) -> None:
    folder = save(tmp_path, byte_level(), template=TEMPLATES[name])
    messages = CONVERSATIONS[conversation]
    if name == "tools":
        messages = [*messages, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
    options: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False}
    expected = reference(folder).apply_chat_template(messages, tokenize=False, **options)
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_prompt(messages, **options) == expected
    assert tokenizer.chat_prompt_ids(messages, **options) == tokenizer.encode(expected, add_special_tokens=False)


def test_template_for_tools_is_chosen_when_tools_are_given(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=templates))
    messages = CONVERSATIONS["short"]
    assert tokenizer.chat_prompt(messages) == "plain"
    assert tokenizer.chat_prompt(messages, tools=[]) == "plain"
    assert tokenizer.chat_prompt(messages, tools=[TOOL]) == "1"


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "at least one message"),
    ("hello", "must be a list"),
    (["hello"], "message 0 must be an object"),
    ([{"content": "hello"}], "message 0 has no role"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "message 1 has content of type int"),
]


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES)
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any, reason: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template="x"))
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.chat_prompt(messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot be compiled"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
    ],
)
def test_failing_templates_are_bad_requests(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.chat_prompt(CONVERSATIONS["short"])


BIG = "{% set ns = namespace(x='a' * 1000000, y=['a' * 1000000] * 1000000) %}"
DOUBLED = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        *(
            DOUBLED.replace("EXPRESSION", expression)
            for expression in (
                "ns.x ~ ns.x",
                "ns.x + ns.x",
                "'%s%s' % (ns.x, ns.x)",
                "'{}{}'.format(ns.x, ns.x)",
                "'{0}{0}'.format_map({'0': ns.x}) ~ ns.x ~ ns.x",
                "[ns.x, ns.x] | join",
                "ns.x.join([ns.x, ns.x])",
                "ns.x | replace('a', 'aa')",
                "ns.x.replace('a', 'aa')",
                "[ns.x, ns.x] | string",
                "[ns.x, ns.x] | tojson",
                "'%s%s' | format(ns.x, ns.x)",
                "ns.x.encode() + ns.x.encode()",
            )
        ),
        "{{ 'a'.center(10 ** 5 * 10 ** 5) }}",
        "{% set n = 100000000000 %}{{ 'a'.ljust(n) }}",
        "{% set n = 100000000000 %}{{ 'a'.zfill(n) }}",
        "{% set n = 100000000000 %}{{ 'a' | center(n) }}",
        "{% set n = 100000000000 %}{{ 'a' | indent(n, true) }}",
        "{% set n = 100000000000 %}{{ [[]] | tojson(indent=n) }}",
        "{% set n = 100000000000 %}{{ '\t'.expandtabs(n) }}",
        "{% set n = 100000000000 %}{{ (1).to_bytes(n, 'big') }}",
        "{% set n = 100000000000 %}{{ 1 | round(n, 'ceil') }}",
        "{{ '%100000000000d' % 1 }}",
        "{% set n = 100000000000 %}{{ '%*d' % (n, 1) }}",
        "{{ '{:100000000000}'.format(1) }}",
        "{% set n = 100000000000 %}{{ '{:{}}'.format(1, n) }}",
        BIG + "{{ ns.y }}",
        BIG + "{{ ns.y ~ '' }}",
        BIG + "{{ ns.y | join }}",
        BIG + "{{ ns.y | map('trim') | join }}",
        BIG + "{{ ('\\n' * 1000) | indent(ns.x, blank=true) }}",
        BIG + "{{ ns.x.translate({97: ns.x}) }}",
        BIG + "{% for i in range(90000) %}{{ ns.x }}{% endfor %}",
        BIG + "{% macro m() %}{% for i in range(90000) %}{{ ns.x }}{% endfor %}{% endmacro %}{{ m() | length }}",
        BIG + "{% set t %}{% for i in range(90000) %}{{ ns.x }}{% endfor %}{% endset %}",
        BIG + "{% set ns.y = [] %}{% for i in range(90000) %}{% set ns.y = ns.y + [ns.x ~ i] %}{% endfor %}",
        "{% set count_round = joiner() %}" + 2 * "{% for a in range(99999) %}" + 2 * "{% endfor %}",
        "{{ lipsum(100000000) }}",
    ],
)
def test_templates_that_would_fill_the_memory(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="refused the messages"):
        tokenizer.chat_prompt(CONVERSATIONS["short"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ 'ab' | center(6) }}|{{ 'ab'.ljust(4) }}|{{ '%5.1f|%s' % (2.25, 'x') }}", "  ab  |ab  |  2.2|x"),
        ("{{ '{:>4}{a}'.format(1700000000, a='b') }}", "1700000000b"),
        ("{{ 'a\nb' | indent(2, true) }}{{ {'a': [1]} | tojson(indent=2) }}", '  a\n  b{\n  "a": [\n    1\n  ]\n}'),
        ("{{ [1, 2] | map('string') | join(', ') }}{{ 'a-b'.replace('-', '+') }}", "1, 2a+b"),
        ("{% macro m(x) %}{{ x + '!' }}{% endmacro %}{% for x in 'ab' %}{{ m(x) }}{% endfor %}", "a!b!"),
    ],
)
def test_templates_that_make_little(tmp_path: Path, template: str, expected: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template=template))
    for _ in range(2):
        assert tokenizer.chat_prompt(CONVERSATIONS["short"]) == expected


def test_model_without_template_says_so(byte: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte.chat_prompt(CONVERSATIONS["short"])


def test_added_tokens_keep_their_spelling(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer = Tokenizer(save(tmp_path, backend))
    ids = tokenizer.encode("a<tool call>b")
    assert "".join(stream(tokenizer, ids)) == "a<tool call>b"


def test_some_special_tokens_can_stay(byte: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (byte, pieces):
        ids = tokenizer.encode("hello<|user|> you<pad>")
        kept = [tokenizer.token_to_id("<|user|>") or 0]
        detokenizer = IncrementalDetokenizer(tokenizer, kept=kept)
        shown = "".join([*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()])
        assert shown.split() == ["hello<|user|>", "you"]


def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)
