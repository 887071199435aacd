"""An engine whose disk breaks: `python -m tests.support.broken_disk MODEL FOLDER FLAG` prints what it saw, as JSON.

It runs with a library before the system's (`SHIM`), in which reads and writes of pages fail with EIO while the file
FLAG exists.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>
struct iovec;
typedef ssize_t (*call)(int, const struct iovec *, int, off64_t, int);
static ssize_t tried(const char *name, int file, const struct iovec *parts, int count, off64_t at, int flags) {
  const char *flag = getenv("BROKEN_DISK");
  if (flag && !access(flag, F_OK)) { errno = EIO; return -1; }
  return ((call)dlsym(RTLD_NEXT, name))(file, parts, count, at, flags);
}
#define CALL(name, real) \
  ssize_t name(int f, const struct iovec *p, int n, off64_t a, int flags) { return tried(real, f, p, n, a, flags); }
CALL(preadv2, "preadv64v2")
CALL(preadv64v2, "preadv64v2")
CALL(pwritev2, "pwritev64v2")
CALL(pwritev64v2, "pwritev64v2")
"""


def make_shim(folder: Path) -> Path:
    """Compiles the library."""
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def main(model: str, folder: str, flag: Path) -> dict[str, Any]:
    from kvern import LLM
    from kvern.cache import messages
    from tests.support.idle import is_idle
    from tests.support.served import eventually
    from tests.support.tiers import answer, figures, forget, settle, tier_of

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvern").addHandler(handler)
    logging.getLogger("kvern").setLevel(logging.WARNING)
    messages.PAGE_TOKENS = 8
    prompt = [*range(20, 61)]
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_size": 4, "max_model_len": 64}
    with LLM(model, kv_tier=(f"disk:{folder}:1GB",), kv_cache_tokens=120, max_batch_requests=2, **options) as llm:
        tier_of(llm).computing = None
        expected, _ = answer(llm, prompt)
        forget(llm)
        flag.touch()
        same = []
        for number in range(8):
            found, _ = answer(llm, prompt)
            answer(llm, [*range(100 + number, 130 + number)])
            same.append(found.token_ids == expected.token_ids)
            forget(llm)
        broken = figures(llm)
        flag.unlink()

        def is_loaded() -> bool:
            found, cached = answer(llm, prompt)
            forget(llm)
            return cached == 40 and found.token_ids == expected.token_ids

        eventually(is_loaded)
        settle(llm)
        return {
            "same": all(same),
            "failures": broken.failures,
            "is_on": figures(llm).is_on,
            "idle": is_idle(llm),
            "warnings": said,
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
