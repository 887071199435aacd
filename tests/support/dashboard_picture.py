"""Draws the Grafana dashboard without Grafana: python -m tests.support.dashboard_picture PROMETHEUS

A server of the small embedded model serves a changing number of clients for 100 seconds, while PROMETHEUS, the program,
reads its metrics. Each panel's own queries are then asked of it, and their answers drawn where the panel stands. Raises
SystemExit with the query if Prometheus refuses one.
"""

import html
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.served import KEY, SMALL, Served, eventually, serving

ROOT = Path(__file__).parents[2]
DASHBOARD, PICTURE = ROOT / "deploy/grafana/kvern.json", ROOT / "docs/images/dashboard.svg"
ROWS = ("Traffic", "Latency", "Where the time goes")
CLIENTS = (1, 4, 12, 6, 2)
PHASE, SCRAPE, INTERVAL = 20.0, 1, "10s"
"""Seconds of each number of clients, and between two looks of Prometheus; the range of its rates."""
COLORS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300")
UNIT, LEVEL, EDGE = 50, 28, 8
"""Pixels of a column and of a line of the dashboard, and between panels."""
Series = list[tuple[str, list[tuple[float, float]]]]


@contextmanager
def prometheus(program: str, target: str) -> Iterator[str]:
    """A Prometheus that reads the metrics of `target`, by its URL."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "job_name": "kvern",
            "authorization": {"credentials": KEY},
            "static_configs": [{"targets": [target]}],
        }
        config = {"global": {"scrape_interval": f"{SCRAPE}s"}, "scrape_configs": [job]}
        Path(folder, "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        files = f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"
        process = subprocess.Popen([program, *files, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: _answers(f"http://{address}/-/ready") or process.poll() is not None)
            if process.returncode is not None:
                raise SystemExit(f"{program} ended with {process.returncode}")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False


def load(served: Served) -> None:
    """Lets one number of clients after the other ask for PHASE seconds."""
    wanted, dice = [0], random.Random(0)

    def client(number: int) -> None:
        while wanted[0] >= 0:
            if number >= wanted[0]:
                time.sleep(0.1)
                continue
            prompt = "Once upon a time there was a fox. " * dice.randint(1, 6) + str(dice.randint(0, 9))
            options: dict[str, Any] = {"max_tokens": dice.randint(20, 200), "extra_body": {"ignore_eos": True}}
            served.client().completions.create(model="kvern-1m", prompt=prompt, **options)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(max(CLIENTS))]
    for thread in threads:
        thread.start()
    for count in CLIENTS:
        wanted[0] = count
        time.sleep(PHASE)
    wanted[0] = -1
    for thread in threads:
        thread.join()


def asked(url: str, panel: Mapping[str, Any], begin: float, end: float) -> Series:
    """The answers of Prometheus to a panel's queries, each with its name."""
    found: Series = []
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", INTERVAL).replace("$model_name", ".*")
        query = query.replace("$__range", f"{int(end - begin)}s")
        fields = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": SCRAPE})
        try:
            answer = json.load(urllib.request.urlopen(f"{url}/api/v1/query_range?{fields}", timeout=30))
        except OSError as error:
            raise SystemExit(f"{panel['title']}: Prometheus refuses {query}: {error}") from error
        for series in answer["data"]["result"]:
            name = target.get("legendFormat") or ""
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            name = re.sub(r"{{\w+}} ?", "", name)  # a label that it does not have
            found.append((name, [(float(moment), float(value)) for moment, value in series["values"]]))
    return found


def chosen(panels: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The panels of ROWS, with the line at which each stands in the picture."""
    line, shown, first = 0, False, 0
    for panel in panels:
        place = panel["gridPos"]
        if panel["type"] == "row":
            shown, first = panel["title"] in ROWS, place["y"] - line
        if shown:
            yield panel, place["y"] - first
            line = max(line, place["y"] - first + place["h"])


def drawn(panel: Mapping[str, Any], line: int, series: Series, begin: float, end: float) -> str:
    """A panel as SVG."""
    place = panel["gridPos"]
    left, top = place["x"] * UNIT + EDGE, line * LEVEL + EDGE
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<text x="{left}" y="{top + 14}" class="row">{title}</text>'
    width, height = place["w"] * UNIT - EDGE, place["h"] * LEVEL - EDGE
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    series = [(name, [one for one in points if one[1] == one[1]]) for name, points in series]
    series = [(name, points) for name, points in series if any(value for _, value in points)]
    sums: dict[float, float] = {}
    lines, highest = [], 1e-9
    for name, points in series:
        lower = [(moment, sums.get(moment, 0.0) if stacked else 0.0) for moment, _ in points]
        upper = [(moment, value + below) for (moment, value), (_, below) in zip(points, lower, strict=True)]
        sums |= dict(upper)
        highest = max(highest, *(value for _, value in upper))
        lines.append((name, lower, upper))
    unit = defaults.get("unit", "")
    highest = min(highest, 1.0) if stacked and unit == "percentunit" else 1.1 * highest

    def at(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(
            f"{left + 46 + (moment - begin) / (end - begin) * (width - 56):.1f},"
            f"{top + height - 34 - min(value / highest, 1) * (height - 64):.1f}"
            for moment, value in points
        )

    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" class="panel"/>']
    parts.append(f'<text x="{left + 8}" y="{top + 18}" class="title">{title}</text>')
    if not lines:
        parts.append(f'<text x="{left + width / 2}" y="{top + height / 2}" class="axis">No data</text>')
        return "\n".join(parts)
    for share in (0.0, 0.5, 1.0):
        y = top + height - 34 - share * (height - 64)
        parts.append(f'<path d="M{left + 46} {y:.1f}H{left + width - 10}" class="grid"/>')
        text = worded(share * highest, unit)
        parts.append(f'<text x="{left + 42}" y="{y + 4:.1f}" class="axis" text-anchor="end">{text}</text>')
    x = left + 10
    for (name, lower, upper), color in zip(lines, COLORS * 3, strict=False):
        if stacked:
            parts.append(f'<polygon points="{at([*upper, *lower[::-1]])}" fill="{color}" fill-opacity="0.6"/>')
        parts.append(f'<polyline points="{at(upper)}" stroke="{color}" fill="none" stroke-width="1.5"/>')
        if x + 7 * len(name) < left + width:
            y = top + height - 12
            parts.append(f'<path d="M{x} {y - 4}h12" stroke="{color}" stroke-width="3"/>')
            parts.append(f'<text x="{x + 16}" y="{y}" class="axis">{html.escape(name)}</text>')
            x += 30 + 7 * len(name)
    return "\n".join(parts)


def worded(value: float, unit: str) -> str:
    """A number as Grafana writes it."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        return f"{value:.2g} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


STYLE = """<style>
text{font-family:Inter,Helvetica,Arial,sans-serif;fill:#ccccdc}
.row{font-size:14px}.title{font-size:13px;font-weight:500}.axis{font-size:11px;fill:#9a9aa8}
.panel{fill:#181b1f;stroke:#2c2f35}.grid{stroke:#2c2f35}
</style>"""


def main(program: str) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with (
        serving(*SMALL, "--max-batch-requests", "8") as served,
        prometheus(program, f"{served.host}:{served.port}") as url,
    ):
        begin = time.time()
        load(served)
        end = time.time()
        answers = {panel["id"]: asked(url, panel, begin + 10, end) for panel in panels if panel.get("targets")}
    shown = list(chosen(panels))
    parts = [drawn(panel, line, answers.get(panel["id"], []), begin + 10, end) for panel, line in shown]
    size = 24 * UNIT + EDGE, max(line + panel["gridPos"]["h"] for panel, line in shown) * LEVEL + EDGE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}">{STYLE}'
    ground = f'<rect width="{size[0]}" height="{size[1]}" fill="#111217"/>'
    PICTURE.write_text("\n".join([head, ground, *parts, "</svg>\n"]))


if __name__ == "__main__":
    main(sys.argv[1])
