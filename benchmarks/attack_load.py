"""Everything in `attacks.py` against a server of `soak_attacked.py`, again and again, from a process of its own.

    python benchmarks/attack_load.py http://127.0.0.1:8000 FOLDER [PATTERN]

An attacker's own computing is no load of the server, so this process runs at low priority. When it is ready, it prints
an empty line, and reads when to begin and to end. Then it prints a line of JSON for every attack: its name, its answer,
when it began and ended; the last line is about the fuzzer. Times are those of time.monotonic().
"""

import asyncio
import itertools
import json
import os
import random
import re
import sys
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from attacks import Act, Attacker, attacks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.fuzz_requests import FIXED, Findings, Requests, send

HOSTILE, CROWD_KEY, OPERATOR = "soak-hostile", "soak-crowd", "soak-operator"
LOAD = "/v1/load_lora_adapter"
ATTACKERS = 2
CROWD = 300
"""Long streams of one key."""
CROWD_SECONDS = 120
PAUSE = 0.25
"""Seconds between two adapters."""
FUZZER = "the fuzzer"


async def repeat(attacker: Attacker, acts: list[tuple[str, Act]], end: float, chance: random.Random) -> None:
    """All of them in another order each time, one at a time."""
    while acts and time.monotonic() < end:
        chance.shuffle(acts)
        for name, act in acts:
            began = time.monotonic()
            if began > end:
                return
            status = await act(attacker)
            tell(name, status, began)


def tell(name: str, status: str, began: float) -> None:
    print(json.dumps([name, status, began, time.monotonic()]), flush=True)


def adapter_acts(folder: Path) -> list[tuple[str, Act]]:
    """An operator whose files are hostile, too."""

    async def load(attacker: Attacker, path: Path) -> str:
        await asyncio.sleep(PAUSE)
        body = json.dumps({"lora_name": path.name, "lora_path": str(path)}).encode()
        status: str = await attacker.post(LOAD, body)
        return status

    return [(f"an adapter: {path.name}", partial(load, path=path)) for path in hostile_adapters(folder)]


def hostile_adapters(folder: Path) -> list[Path]:
    """Folders that no adapter should be, below `folder`."""
    slow = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "(a|aa|model.*)*" * 8 + "$b"}
    configs = {"slow-pattern": json.dumps(slow), "deep": "[" * 100_000, "long": " " * (2 << 20), "none": ""}
    tensor = {"dtype": "F32", "shape": [4, 1], "data_offsets": [0, 16]}
    header = json.dumps({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": tensor}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(16)
    paths = [folder / name for name in (*configs, "pipe", "endless")]
    for path in paths:
        path.mkdir()
        config = path / "adapter_config.json"
        if path.name == "pipe":
            os.mkfifo(config)
        elif path.name == "endless":
            config.symlink_to("/dev/zero")
        else:
            config.write_text(configs[path.name])
            (path / "adapter_model.safetensors").write_bytes(weights)
    return paths


def fuzz(url: str, description: dict[str, object], end: float) -> Findings:
    """What the fuzzer makes, one request at a time."""
    findings, parts = Findings(), urlsplit(url)
    probes = Requests(description, FIXED).several(random.Random(2))
    while time.monotonic() < end:
        send((parts.hostname or "", parts.port or 0), itertools.islice(probes, 20), findings, HOSTILE, width=1)
    return findings


async def main(url: str, folder: Path, pattern: str = "") -> None:
    """Attack between the two times that are read; those whose names match `pattern`."""
    description = httpx2.get(f"{url}/openapi.json", headers={"authorization": f"Bearer {OPERATOR}"}).json()

    def chosen(acts: list[tuple[str, Act]]) -> list[tuple[str, Act]]:
        return [(name, act) for name, act in acts if re.search(pattern, name)]

    chance = random.Random(1)
    hostile, operator = Attacker(url, HOSTILE), Attacker(url, OPERATOR)
    every, crowd = list(attacks()), chosen([("long streams", Attacker.long_stream)])
    print(flush=True)
    begin, end = map(float, sys.stdin.readline().split())
    os.nice(19)
    await asyncio.sleep(begin - time.monotonic())
    running = [asyncio.create_task(repeat(hostile, chosen(every), end, chance)) for _ in range(ATTACKERS)]
    running.append(asyncio.create_task(repeat(operator, chosen(adapter_acts(folder)), end, chance)))
    crowds = [
        asyncio.create_task(repeat(Attacker(url, CROWD_KEY, CROWD_SECONDS), list(crowd), end, chance))
        for _ in range(CROWD)
    ]
    findings = await asyncio.to_thread(fuzz, url, description, end if re.search(pattern, FUZZER) else 0)
    await asyncio.gather(*running)
    for stream in crowds:
        stream.cancel()
    await asyncio.gather(*crowds, return_exceptions=True)
    print(json.dumps({"requests": sum(findings.statuses.values()), "wrong": findings.wrong}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
