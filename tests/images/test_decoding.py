"""Images are decoded in processes that may die, while others' answers go on."""

import base64
import faulthandler
import gc
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvern import LLM, SamplingParams
from kvern.cache.images import ImagePool
from kvern.images.file import ImageFile, read_file
from kvern.images.settings import ImageSettings, settings_of
from kvern.io.children import READY, receive, send
from kvern.models.image_models import vision_of
from kvern.models.loader import read_config
from kvern.runner import decoder_process
from kvern.runner.decoders import ENDED, Decoded, Decoders
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of
from tests.support.lost_encoders import FOLDER, STAGES
from tests.support.processors import installed_package
from tests.support.served import children_of, command_of, eventually, serving
from tests.support.vision_models import FAMILIES, make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROCESS = "kvern.runner.decoder_process"


def engine(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", threads=1, max_model_len=512, max_batch_requests=8)


def talk(*parts: Image.Image | str) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def saved(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen3_vl", tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def read(folder: Path) -> ImageSettings:
    vision = vision_of(read_config(folder))
    assert vision is not None
    return settings_of(folder, vision)


@pytest.fixture
def decoders(folder: Path) -> Iterator[Decoders]:
    made = Decoders(folder, 1)
    yield made
    made._work.close()


def decoded(decoders: Decoders, *files: bytes) -> list[Decoded]:
    found: dict[int, Decoded] = {}
    for number, data in enumerate(files):
        decoders.begin(number, data)

    def ended() -> bool:
        found.update(decoders.finished())
        return len(found) == len(files)

    eventually(ended)
    return [found[number] for number in range(len(files))]


def processes(parent: int) -> list[int]:
    """Those that decode, the one that forks them first."""
    forking = [child for child in children_of(parent) if PROCESS in command_of(child)]
    return [*forking, *(child for one in forking for child in children_of(one))]


def test_pixels_are_those_that_this_process_makes(decoders: Decoders, read: ImageSettings) -> None:
    files = [saved(picture(30 + 50 * number, 90, number)) for number in range(3)]
    files.insert(1, files[0][:1500])
    first, broken, *others = decoded(decoders, *files)
    assert isinstance(broken, str) and broken.startswith("an image cannot be decoded: ")
    for data, pixels in zip([files[0], *files[2:]], [first, *others], strict=True):
        assert isinstance(pixels, memoryview) and pixels.tobytes() == read.patches(read_file(data, "x")).tobytes()


def test_the_next_image_has_a_new_child(decoders: Decoders) -> None:
    good = saved(picture(40, 40))
    assert not isinstance(decoded(decoders, good)[0], str)
    for victim in (1, 0):  # the child, then the process that forks
        before = processes(os.getpid())
        os.kill(before[victim], signal.SIGKILL)
        if not victim:
            os.kill(before[1], signal.SIGKILL)
        eventually(lambda: not command_of(before[1]))  # noqa: B023
        assert not isinstance(decoded(decoders, good)[0], str)
        assert before[1] not in processes(os.getpid())


@pytest.mark.parametrize("how", ["memory", "crash", "time"])
def test_what_an_image_does_to_its_child(how: str, read: ImageSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(settings: ImageSettings, file: object) -> Any:
        if how == "memory":
            return bytearray(1 << 40)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while True:
            pass

    monkeypatch.setattr(ImageSettings, "patches", harm)
    monkeypatch.setattr(decoder_process, "SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        try:
            faulthandler.disable()
            decoder_process.serve(theirs, read)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        assert ours.recv(1) == READY
        send(ours, saved(picture(20, 20)))
        said = receive(ours)
        assert said is None if how != "memory" else said is not None and b"more memory than 48 bytes a pixel" in said
        assert how != "memory" or receive(ours) is None, "its memory goes with it"
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == {"memory": 0, "crash": signal.SIGSEGV, "time": signal.SIGPROF}[how]


def test_an_image_that_is_cancelled_too_late_is_forgotten(decoders: Decoders) -> None:
    decoders.begin(1, saved(picture(20, 20)))
    eventually(lambda: bool(decoders._work.done))
    decoders.cancel(1)
    assert [number for number, _ in decoders.finished()] == [1] and not decoders._work.cancelled


def test_a_child_that_dies_costs_its_image(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def lost(child: Any, data: bytes) -> Decoded:
        asked.append(data)
        raise ConnectionError

    good = saved(picture(40, 40))
    with monkeypatch.context() as patched:
        patched.setattr("kvern.runner.decoders._ask", lost)
        assert decoded(decoders, good) == [ENDED]
    assert len(asked) == 1 and not isinstance(decoded(decoders, good)[0], str)


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_processes_end_with_their_engine(end: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(picture(40, 40)))
    code = (
        "import sys, time; from pathlib import Path; from kvern.runner.decoders import Decoders\n"
        "made = Decoders(Path(sys.argv[1]), 1); made.begin(1, Path(sys.argv[2]).read_bytes())\n"
        "while not made.finished(): time.sleep(0.01)\n"
        "print('done', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "a.png")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        children = processes(parent.pid)
        assert len(children) == 2
        if end == "killed":
            parent.kill()
        parent.stdin.close()
    eventually(lambda: not any(map(command_of, children)))


class Gate:
    """A decoder whose results come when the gate is opened."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.is_open = False
        self.cancelled: list[int] = []

    def begin(self, number: int, data: bytes) -> None:
        self.decoder.begin(number, data)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self.decoder.cancel(number)

    def finished(self) -> list[tuple[int, Decoded]]:
        found: list[tuple[int, Decoded]] = self.decoder.finished() if self.is_open else []
        return found


def gated(llm: Any) -> tuple[ImagePool, Gate]:
    pool = core_of(llm).scheduler.cache.extension(ImagePool)
    pool._decoder = gate = Gate(pool._decoder)
    return pool, gate


def run(step: Callable[[], object], until: Callable[[], bool]) -> None:
    while not until():
        step()


def test_others_go_on_while_an_image_is_decoded(folder: Path) -> None:
    with engine(folder) as llm:
        [expected] = llm.chat(talk(picture(90, 60, 1), "what"), PARAMS)
        core_of(llm).scheduler.cache.tree.clear()
        pool, gate = gated(llm)
        held = engine_of(llm)
        asked = llm.chat_request(talk(picture(90, 60, 2), "what"), PARAMS)
        gone = held.add("gone", asked.prompt, PARAMS)
        seen = held.add("seen", asked.prompt, PARAMS)
        text = held.add("text", "what is this", PARAMS)
        run(held.step, lambda: text.finished)
        before = list(getattr(asked.prompt, "token_ids", ())).index(FAMILIES["qwen3_vl"].image_id)
        computed = [core_of(llm).scheduler.get(name).num_computed_tokens for name in ("gone#0", "seen#0")]
        assert computed == [before, before] and not seen.outputs[0].token_ids and pool.decoded == 1
        held.abort(["gone"])
        assert not gate.cancelled, "another wants it"
        held.abort(["seen"])
        run(held.step, lambda: not held.has_work)
        assert len(gate.cancelled) == 1 and gone.finished and is_idle(llm)
        again = held.add("again", llm.chat_request(talk(picture(90, 60, 1), "what"), PARAMS).prompt, PARAMS)
        run(held.step, lambda: again.finished)  # its rows are in the pool
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids and (pool.decoded, pool.encoded) == (1, 1)
        later = held.add("later", asked.prompt, PARAMS)
        gate.is_open = True
        run(held.step, lambda: later.finished)
        assert len(later.outputs[0].token_ids) == 6 and pool.encoded == 2 and is_idle(llm)


def test_files_go_with_their_requests(folder: Path) -> None:
    """The rows of an image stay, for others who send it, and the file does not."""

    def files() -> list[ImageFile]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is ImageFile and each.data]

    before = files()
    with engine(folder) as llm:
        llm.chat([talk(picture(50, 50), "what"), talk(picture(60, 50), "what")], PARAMS)
        pool = core_of(llm).scheduler.cache.extension(ImagePool)
        assert len(pool._images) == 2 and files() == before


def test_a_failing_encoder_ends_its_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(folder) as llm:
        monkeypatch.setattr("kvern.runner.image_rows.normalized", lambda patches, settings: patches[:0])
        found = llm.chat([talk(picture(50, 50), "what"), talk("what is this")], PARAMS, on_error="return")
        assert str(found[0].failure).startswith("an image cannot be encoded: ") and found[1].failure is None
        monkeypatch.undo()
        assert is_idle(llm)
        [again] = llm.chat(talk(picture(50, 50), "what"), PARAMS)
        assert len(again.outputs[0].token_ids) == 6


@pytest.mark.nightly
def test_an_engine_that_is_killed_meanwhile_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request loses its engine while its image is decoded, and the next one while it is encoded."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    before = decoding(folder)  # for engines of other tests, which are collected as garbage some time
    url = "data:image/png;base64," + base64.b64encode(saved(picture(90, 60))).decode()
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    options = ("--dtype", "float32", "--max-model-len", "512", "--threads", "1", "--logits-processors", "lose engine")
    with installed_package(tmp_path / "package"), serving("--model", str(folder), *options) as served:
        client, first = served.client(), served.engine_pid()

        def ask() -> str | None:
            said = client.chat.completions.create(
                model=str(folder), messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=6
            )
            return said.choices[0].message.content

        found = ask()
        assert all((tmp_path / stage).exists() for stage in STAGES) and served.figure("engine_restarts_total") == 2
        assert first != served.engine_pid() and found == ask()
        eventually(lambda: decoding(folder) - before == {*processes(served.engine_pid())})
    with engine(folder) as llm:
        [expected] = llm.chat(talk(picture(90, 60), "what"), PARAMS.replace(ignore_eos=False))
    assert found == expected.outputs[0].text


def decoding(folder: Path) -> set[int]:
    """All processes that decode images for this model."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    return {one for one in numbers if PROCESS in (said := command_of(one)) and str(folder) in said}
