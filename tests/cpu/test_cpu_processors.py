"""Every path of the kernels: chosen, built for each processor whose instructions this one has, and under sanitizers."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cli.options import read_defaults
from kvern.cpu import build, kernel_library, processor, ready
from kvern.cpu.build import CHECK_TIMEOUT, compile_library
from kvern.cpu.check import GROUPS
from kvern.cpu.kernel_library import NATIVE, find_compiler, library_path, processor_flags
from kvern.cpu.processor import X86, Isa, chosen_isa, forced_isa, usable_isas
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_method import LinearShape
from kvern.layers.unquantized import CompiledMethod, PackedMethod, Unquantized, UnquantizedMethod
from tests.support.cache_folder import load_kernels, pretend_tiles

WARNINGS = ("-Wall", "-Wextra", "-Werror")
USABLE = [isa.name for isa in usable_isas()]

SUPPRESSED = """
# Python and PyTorch are not built for the sanitizer, which does not see how their threads wait for each other.
race:libtorch_cpu.so
race:libgomp
called_from_lib:libtorch_cpu.so
called_from_lib:libgomp
"""
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}


def answers(path: Path, **environment: str) -> str:
    """What the check of a library says, a line for each group."""
    setarch = shutil.which("setarch")
    still = [setarch, platform.machine(), "-R"] if environment and setarch else []  # where the sanitizer expects memory
    command = [*still, sys.executable, "-m", "kvern.cpu.check", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=8 * CHECK_TIMEOUT, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def compiled(tmp_path: Path, *flags: str) -> Path:
    path = tmp_path / "kernels.so"
    compile_library(path, find_compiler(), (*flags, *WARNINGS))
    return path


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_a_library_has_nothing_in_common_with_others() -> None:
    path = library_path(EngineConfig().cache_folder, find_compiler())
    said = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in said.splitlines()]
    assert "kvern_norm" in [name for _, name in symbols]
    assert [name for kind, name in symbols if kind == "u" or (kind == "T") != name.startswith("kvern_")] == []


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the machine be of a kind, with the features of some sets of instructions."""

    def pretend(kind: str, *isas: Isa, forced: str = "") -> None:
        monkeypatch.setattr(platform, "machine", lambda: kind)
        found = frozenset().union(*(isa.features for isa in isas))
        monkeypatch.setattr(processor, "features", lambda: found)
        monkeypatch.setenv(processor.VARIABLE, forced)

    return pretend


@pytest.mark.parametrize("count", range(1, len(X86) + 1))
def test_a_processor_has_the_instructions_up_to_the_first_that_it_lacks(
    count: int, pretend: Callable[..., None]
) -> None:
    names = [isa.name for isa in X86]
    pretend("x86_64", *X86[:count], *X86[count + 1 :])
    assert [isa.name for isa in usable_isas()] == names[:count]
    assert processor_flags() == NATIVE
    for place, name in enumerate(names):
        pretend("AMD64", *X86[:count], forced=name)
        if place < count:
            assert forced_isa() == chosen_isa() == X86[place]
            assert processor_flags() == (NATIVE if X86[place].flags == X86[count - 1].flags else X86[place].flags)
            continue
        with pytest.raises(ConfigError, match=f"KVERN_CPU_ISA is '{name}'.*choose one of {', '.join(names[:count])},"):
            processor_flags()


@pytest.mark.parametrize(("kind", "name"), [("aarch64", "neon"), ("arm64", "neon"), ("riscv64", "scalar")])
def test_other_processors_have_one_set(kind: str, name: str, pretend: Callable[..., None]) -> None:
    pretend(kind, X86[1])
    assert [isa.name for isa in usable_isas()] == [name]
    assert forced_isa() is None
    for wrong in {"neon", "scalar", "avx2", "sse9"} - {name}:
        pretend(kind, forced=wrong)
        with pytest.raises(ConfigError, match=f"{wrong}.*choose one of {name},"):
            chosen_isa()


@pytest.mark.parametrize("wrong", ["AVX2", "avx2 ", "native", "avx512_fp16", "0"])
def test_what_is_unknown_is_refused_at_the_start(
    wrong: str, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else would need no kernel."""
    monkeypatch.setenv(processor.VARIABLE, wrong)
    for options in ({"cpu_kernels": False}, {"dtype": "float16"}, {}):
        with pytest.raises(ConfigError, match=f"KVERN_CPU_ISA is '{wrong}'.*{', '.join(USABLE)}"):
            LLM(str(tiny_model), threads=1, **options)
    monkeypatch.setattr(sys, "argv", ["kvern.cpu.ready", "/nowhere"])
    with pytest.raises(SystemExit, match=f"KVERN_CPU_ISA is '{wrong}'"):
        ready.main()


def test_the_variable_is_no_option() -> None:
    assert read_defaults([], {processor.VARIABLE: "avx2"}).given == frozenset()


@pytest.mark.parametrize("name", [isa.name for isa in X86])
def test_layers_are_those_of_the_forced_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a processor that is pretended to have all of them."""
    pretend_tiles(monkeypatch, there=name != "amx")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "features", lambda: frozenset().union(*(isa.features for isa in X86)))
    monkeypatch.setenv(processor.VARIABLE, name)
    with_kernels, without = (
        Build(torch.bfloat16, torch.device("cpu"), 8, groups) for groups in (frozenset({"cpu_linear"}), frozenset())
    )
    shape = LinearShape(16, 8, torch.bfloat16, torch.device("cpu"))
    packs = name not in ("scalar", "avx2")
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        plain = PackedMethod if packs and supported else UnquantizedMethod
        assert type(Unquantized().linear(shape, without)) is plain
        assert type(Unquantized().linear(shape, with_kernels)) is (plain if name == "amx" else CompiledMethod)
    pretend_tiles(monkeypatch, there=name != "amx", own=True)
    assert type(Unquantized().linear(shape, with_kernels)) is CompiledMethod


@pytest.mark.parametrize("name", USABLE)
def test_answers_come_in_every_way_that_this_machine_can_go(
    name: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The library is always the one for all of its instructions; the nightly tests compile the others."""
    load_kernels("cpu_sampling", 1)
    real = library_path(EngineConfig().cache_folder, find_compiler())
    monkeypatch.setenv(processor.VARIABLE, name)
    monkeypatch.setattr(kernel_library, "READY_MADE", tmp_path)
    for isa in usable_isas():
        shutil.copy(real, kernel_library.ready_made_path(isa.flags))
    monkeypatch.setattr(build, "_check", lambda path: dict.fromkeys(GROUPS, ""))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    caplog.set_level(logging.INFO, "kvern")
    with LLM(str(tiny_model), dtype="bfloat16", threads=1, cache_dir=str(tmp_path / "cache")) as llm:
        first = [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [8]], params)]
        assert first == [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [8]], params)]
    assert f"use {name}, which came with the package" in caplog.text


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # on a busy machine: all sources are compiled
@pytest.mark.parametrize("name", [*USABLE, "native"])
def test_kernels_answer_rightly_and_compile_without_warnings(name: str, tmp_path: Path) -> None:
    flags = {isa.name: isa.flags for isa in usable_isas()} | {"native": NATIVE}
    path = compiled(tmp_path, *flags[name])
    assert answers(path) == "".join(f"{group} \n" for group in GROUPS)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # on a busy machine: all sources are compiled
def test_a_name_means_the_same_in_all_sources(tmp_path: Path) -> None:
    if "clang" in find_compiler().version:
        pytest.skip("it does not compare sources")
    compiled(tmp_path, "-O1", "-flto", "-Wodr")


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # on a busy machine: all sources are compiled
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    path = compiled(tmp_path, *NATIVE, *SANITIZERS[name], "-g1", "-O1")
    runtime = subprocess.run(
        [find_compiler().command, f"-print-file-name=lib{name[0]}san.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    suppressed = tmp_path / "suppressed"
    suppressed.write_text(SUPPRESSED)
    said = answers(
        path,
        LD_PRELOAD=runtime,
        ASAN_OPTIONS="detect_leaks=0",  # Python keeps what it has until the end
        TSAN_OPTIONS=f"suppressions={suppressed}:exitcode=66:ignore_noninstrumented_modules=1",
    )
    assert said == "".join(f"{group} \n" for group in GROUPS)
