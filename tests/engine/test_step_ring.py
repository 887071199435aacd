"""The last steps of an engine in shared memory: what is read is what was written, of living engines of this user."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvern.engine import step_ring
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.step_ring import SIZE, STEP, STEPS, StepRing, make_ring, read_steps, ring_path
from kvern.engine.step_watch import RunningFile, StepWatch
from kvern.request.events import CAUSES
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(step_ring, "FOLDER", tmp_path)
    return tmp_path


def write(ring: StepRing, count: int = 1) -> None:
    for number in range(count):
        ring.write((float(number), 0.5, 7), 2, 1, 40)


def test_the_last_steps_are_read_in_order(folder: Path) -> None:
    ring = StepRing(folder / "ring")
    assert read_steps(ring.path) == []
    write(ring, 3)
    steps = read_steps(ring.path)
    assert [step.number for step in steps] == [1, 2, 3]
    assert steps[-1] == (3, 2.0, 0.5, 7, 2, 1, 40)
    write(ring, STEPS)
    assert [step.number for step in read_steps(ring.path)] == [*range(4, STEPS + 4)]


def test_a_step_that_is_being_written_is_left_out(folder: Path) -> None:
    ring = StepRing(folder / "ring")
    write(ring, 3)
    with ring.path.open("r+b") as file:
        file.seek(SIZE - (STEPS - 2) * STEP.size)
        file.write((4099).to_bytes(8, sys.byteorder))
    assert [step.number for step in read_steps(ring.path)] == [1, 3]


def test_the_file_is_its_users_alone(folder: Path) -> None:
    assert StepRing(folder / "ring").path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        StepRing(folder / "ring")


def test_links_pipes_and_other_files_are_not_read(folder: Path) -> None:
    ring = StepRing(folder / "ring")
    (folder / "link").symlink_to(ring.path)
    with pytest.raises(OSError, match="symbolic"):
        read_steps(folder / "link")
    with pytest.raises(OSError, match="exists"):
        StepRing(folder / "link")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match="regular"):
        read_steps(folder / "pipe")
    (folder / "other").write_text("text")
    with (folder / "other").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="not a file of steps"):
            read_steps(folder / "other")


KILLED = """
import os, signal, sys
from pathlib import Path
from kvern.engine import step_ring
step_ring.FOLDER = Path(sys.argv[1])
step_ring.make_ring(Path("dead")).write((1.0, 2.0, 3), 4, 5, 6)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_an_engine_that_was_killed_is_recognised_and_removed(folder: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == -9
    (folder / "kvern-steps-new").touch()  # somebody is about to lock it
    (folder / "kvern-steps-link").symlink_to(ring_path("dead"))
    with pytest.raises(ValueError, match="has ended"):
        read_steps(ring_path("dead"))
    alive = make_ring(Path("alive"))
    assert alive is not None and not ring_path("dead").exists()
    other = make_ring(Path("other"))
    assert other is not None and sorted(path.name for path in folder.iterdir()) == [
        "kvern-steps-alive",
        "kvern-steps-link",
        "kvern-steps-new",
        "kvern-steps-other",
    ]


def test_without_room_an_engine_runs_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert make_ring(Path("full")) is None
    assert not list(folder.iterdir())


def test_a_core_writes_what_it_does(folder: Path) -> None:
    engine = SimulatedEngine(Setup())
    ring = StepRing(folder / "ring")
    watch = StepWatch(RunningFile(folder / "running"), lambda seconds: None, 1.0, ring=ring)
    engine.core = EngineCore(engine.scheduler, engine, timing=CoreTiming(watch=watch))  # type: ignore[arg-type]
    engine.add([1, 2, 3], 3)
    engine.add([4, 5, 6, 7], 2)
    while engine.core.has_work:
        engine.core.step()
    steps = read_steps(ring.path)
    assert [(step.rows, step.tokens, step.generated) for step in steps] == [
        (2, 7, 2),
        (2, 2, 4),
        (1, 1, 5),
    ]
    assert all(step.seconds >= 0 and step.ended <= time.monotonic() for step in steps)
    spent = engine.core.statistics().seconds[CAUSES.index("step")]
    assert spent == pytest.approx(sum(step.seconds for step in steps))
