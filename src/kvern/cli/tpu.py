"""``kvern tpu MODEL``: a model as a JAX function."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from kvern.cli.output import check_least, make_table, print_figures, print_lines, print_tables, refuse
from kvern.config import EngineConfig
from kvern.errors import ConfigError, in_a_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Chip = Literal["v5e", "v6e", "v5p"]
CHIPS: tuple[Chip, ...] = ("v5e", "v6e", "v5p")
OLDEST = 0, 10
"""The version of JAX whose Pallas the kernel is written for."""
INSTALL = "pip install 'kvern[tpu]'"
LONGEST = 4096
BOUND = 1e-4
"""The most by which logits may differ from PyTorch's, times the largest of them where that is above 1."""


@dataclass(frozen=True)
class TpuCommand:
    """Make a JAX function of a model built like Llama or Qwen3, and run it where JAX runs, or compile it for a TPU.

    The function is no backend of kvern serve, and no TPU has ever run it.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder, hub id, or the name of an embedded model."""
    prompt: str = "Once upon a time"
    """Text that the model goes on with."""
    max_tokens: int = 16
    """The most tokens of the answer, each the most likely one."""
    check: bool = False
    """Compare the logits of each token with those of kvern's PyTorch model, in float32."""
    compile: Literal["v5e", "v6e", "v5p", "all"] | None = None
    """Run nothing, and compile for a chip that need not be there: the memory that its steps take. Only the
    configuration of MODEL is read."""
    attention: Literal["auto", "pallas", "plain"] = "auto"
    """Attention by the Pallas kernel, which JAX interprets slowly where there is no TPU, or by plain operations; auto:
    the kernel on a TPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Numbers of weights and KV cache; auto: as the checkpoint has them."""
    max_model_len: int | None = None
    """The longest sequence in tokens. None: 4096, or as many as the model has positions for."""
    rows: int = 8
    """Sequences of a decode that is compiled."""

    def execute(self) -> int:
        """Runs or compiles; the exit code is 1 if logits differ, or a step cannot be compiled. Raises KvernError."""
        self._check()
        from kvern.models.embedder import spec_of_folder
        from kvern.models.hub import resolve_model
        from kvern.models.loader import choose_dtype, read_config
        from kvern.tpu.refusals import check

        folder = resolve_model(self.model, weights=self.compile is None).absolute()
        if folder.is_file():  # GGUF
            from kvern.models.folder import model_folder

            folder = model_folder(EngineConfig(model=str(folder)))
        spec = spec_of_folder(folder, read_config(folder))
        check(spec)
        most = spec.max_position_embeddings
        if (self.max_model_len or 0) > most:
            raise ConfigError(f"max_model_len is {self.max_model_len}, above the model's {most}: lower it")
        longest = self.max_model_len or min(most, LONGEST)
        if self.compile is None:
            return self._run(folder, longest)
        if str(choose_dtype(self.dtype, spec)) == "torch.float16":
            raise ConfigError(
                "dtype is float16, the model's own, which the compiler for TPUs refuses: give --dtype bfloat16"
            )
        return self._compile(folder, longest, CHIPS if self.compile == "all" else (self.compile,))

    def _check(self) -> None:
        check_least(self, "max_tokens", "max_model_len", "rows")
        if self.compile is None:
            refuse(self, TpuCommand, ("rows",), "it is a size of steps that --compile compiles")
        else:
            refuse(self, TpuCommand, ("prompt", "max_tokens", "check", "attention"), "with --compile nothing runs")
        if self.check and self.dtype == "bfloat16":
            raise ConfigError("dtype is bfloat16: --check compares what is computed in float32; drop one of them")
        for package in ("jax", *(["libtpu"] if self.compile is not None else [])):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"kvern tpu needs the package {package}, which is not installed: {INSTALL}")
        if tuple(map(int, (found := version("jax")).split(".")[:2])) < OLDEST:
            raise ConfigError(
                f"kvern tpu needs JAX {'.'.join(map(str, OLDEST))} or newer, and {found} is here: {INSTALL}"
            )

    def _run(self, folder: Path, longest: int) -> int:
        from kvern.models.loader import LoadOptions, load_model
        from kvern.text.tokenizer import Tokenizer
        from kvern.tpu import BLOCK_SIZE
        from kvern.tpu.generate import JaxModel, attention_named, compare

        tokenizer = Tokenizer(folder)
        if not (tokens := tokenizer.encode(self.prompt)):
            raise ConfigError("prompt is empty: give a text that the model goes on with")
        if len(tokens) + self.max_tokens > longest:
            raise ConfigError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {self.max_tokens}: together they are above "
                f"max_model_len {longest}; lower max_tokens"
            )
        dtype = "float32" if self.check else self.dtype
        decoder = load_model(folder, LoadOptions(dtype=dtype, max_model_len=longest))
        blocks = -(-(len(tokens) + self.max_tokens) // BLOCK_SIZE)
        try:
            model = JaxModel(decoder, attention_named(self.attention), blocks)
            answers = model.generate([tokens], self.max_tokens, tokenizer.eos_token_ids)
        except RuntimeError as error:  # as JAX raises it: no such backend, or too little memory there
            raise ConfigError(f"JAX cannot run this: {in_a_line(error)}") from error
        sys.stdout.write(f"{self.prompt}{tokenizer.decode(answers[0].tokens)}\n")
        if not self.check:
            return 0
        found = compare(decoder, answers)
        bound = BOUND * max(1.0, found.largest)
        rows = {"of the prompt's last token": found.prefill}
        if len(answers[0].tokens) > 1:  # the first one is the prompt's
            rows["of the answer's tokens"] = found.decode
        rows["allowed"] = bound
        print_figures("differences of logits from PyTorch's", [(name, f"{value:.1e}") for name, value in rows.items()])
        return int(not (found.prefill <= bound and found.decode <= bound))

    def _compile(self, folder: Path, longest: int, chips: Sequence[Chip]) -> int:
        from kvern.tpu.ahead import MEMORY, Request, compiled

        table = make_table("chip", "step", "weights", "KV cache", "temporary", "code", "all", "of", words=("step",))
        errors = []
        for chip in chips:
            for step in compiled(Request(str(folder), chip, self.dtype, self.rows, longest)):
                if step.error:
                    errors.append(f"{chip}, {step.name}: {step.error}")
                    continue
                own = step.arguments - step.caches, step.caches, step.temporary, step.code, step.total, MEMORY[chip]
                table.add_row(chip, step.name, *(f"{size / 1e9:.3f} GB" for size in own))
        print_tables(table)
        print_lines(*errors)
        return int(bool(errors))
