"""What a long page costs: `python -m bench.page` writes bench/results/page.json.

One head of 100,000 tokens is saved, opened in headless Chromium, zoomed and moved; its tiles are asked of the server; and
an atlas of 1,024 heads is drawn from data in the page. Figures are seconds of this machine, beside the load it had.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import regard
from regard.look import View
from regard.look.serve.pyramid import Pyramid
from regard.look.serve.server import PageServer

from .rows import RESULTS, Row, read, row, write

CHROMIUM = os.environ.get("REGARD_CHROMIUM") or shutil.which("chromium") or "chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def load() -> str:
    """The machine's load, which every absolute figure depends on."""
    return f"a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def long_head(length: int, size: int, causal: bool) -> regard.Weights:
    numbers = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, size, generator=numbers) for _ in "qk")
    words = [f"w{n % 997}" for n in range(length)]
    return regard.weights(q, k, mask=regard.causal() if causal else None).label(words)


def saving(weights: regard.Weights, path: Path, name: str) -> list[Row]:
    shape, size = list(weights.shape), weights._factors.q.shape[-1]
    regard.weights(torch.randn(1, 2000, size)).see("entropy", "peak")  # compiled before it is timed
    before, wall = time.process_time(), time.perf_counter()
    weights.show().save(path)
    cpu, wall = time.process_time() - before, time.perf_counter() - wall
    cores = os.cpu_count() or 1
    vectors = 4 * (weights.shape[-2] + weights.shape[-1]) * size
    return [
        row(f"{name} saved: seconds", shape, load(), [wall], 30, None),
        row(f"{name} saved, CPU time over the {cores} cores: seconds", shape, load(), [cpu / cores], 30, None),
        row(f"{name}, size of the page", shape, "bytes of q and k, 2 MB more", [(path.stat().st_size - 2e6) / vectors], 1.4, None),
    ]  # fmt: skip


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


#: Zooms in, moves and zooms out again, one event a frame; the milliseconds between the frames.
FRAMES = """async () => {
  const over = document.querySelector('.map-over'), box = over.getBoundingClientRect(), times = [];
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.6, bubbles: true, cancelable: true };
  let last = null;
  const frame = () => new Promise((done) => requestAnimationFrame((now) => { if (last !== null) times.push(now - last); last = now; done(); }));
  for (let n = 0; n < 90; n++) {
    if (n < 30 || n >= 60) over.dispatchEvent(new WheelEvent('wheel', { ...at, deltaY: n < 30 ? -60 : 60 }));
    else over.dispatchEvent(new KeyboardEvent('keydown', { key: n % 2 ? 'ArrowRight' : 'ArrowDown', shiftKey: true, bubbles: true }));
    await frame();
  }
  return times;
}"""
TILE = """async () => {
  const page = await regard, { exact } = page.head.stored, times = [], i = page.head.i;
  for (let n = 0; n < 12; n++) {
    const from = performance.now(), a = Math.floor((n * (i - 256)) / 12);
    exact.block(a, a + 256, Math.floor(a / 2), Math.floor(a / 2) + 256);
    times.push((performance.now() - from) / 1000);
  }
  return times;
}"""


def opening(path: Path, shape: list[int], name: str) -> list[Row]:
    with browser() as running:
        firsts = []
        for _ in range(3):
            tab = running.new_page(viewport={"width": 1440, "height": 900})
            began = time.perf_counter()
            tab.goto(path.as_uri(), wait_until="commit")
            tab.wait_for_selector(".map-canvas")
            firsts.append(time.perf_counter() - began)
            if len(firsts) < 3:
                tab.close()
        tab.evaluate("async () => (await regard).vectors")
        frames = [1000 / ms for ms in tab.evaluate(FRAMES)]
        tiles = tab.evaluate(TILE)
    return [
        row(f"{name}, first picture: seconds", shape, load(), firsts, 1.5, None),
        row(f"{name}, zoom and pan, frames a second", shape, load(), frames, 30, None, "higher"),
        row(f"{name}, exact tile in the page: seconds", shape, load(), tiles, 0.06, None),
    ]


def serving(weights: regard.Weights, device: str, name: str, must: float) -> list[Row]:
    """Tiles below the first levels, at the server and in the process."""
    shape, machine = list(weights.shape), torch.cuda.get_device_name() if device != "cpu" else ""
    pyramid = Pyramid(weights.to(device), 0)
    wall = time.perf_counter()
    pyramid.compute_first(lambda done: None)
    first = time.perf_counter() - wall
    figures = [
        row(f"{name}, levels 0–{pyramid.first_level}: seconds", shape, load(), [first], None, None, device=machine)
    ]
    for z in range(pyramid.first_level + 1, pyramid.last + 1):
        across, times = pyramid._tiles(z, pyramid.i), []
        for n in range(5):
            before, wall = time.process_time(), time.perf_counter()
            pyramid.tile(z, n * across // 8, across - 1 - n * across // 8, "max")
            spent = time.perf_counter() - wall
            times.append(spent if device != "cpu" else min(spent, time.process_time() - before))
        figures.append(
            row(f"{name}, a tile of level {z}: seconds", shape, load(), times[1:], must, None, device=machine)
        )
    return figures


def answering(length: int) -> list[Row]:
    """One exact tile through the server, its network included."""
    weights = long_head(length, 64, False)
    server = PageServer(lambda: View(weights))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert server.first is not None
    while server.first.packed is None:
        time.sleep(0.05)
    request = urllib.request.Request(
        f"http://{server.guard.hosts[0]}/tiles?look={server.first.id}&head=0.0&by=max&tile=6.1.3",
        headers={"Cookie": server.guard.cookie.partition(";")[0]},
    )
    times = []
    for _ in range(9):
        began = time.perf_counter()
        urllib.request.urlopen(request).read()
        times.append(time.perf_counter() - began)
    server.shutdown()
    server.server_close()
    return [row("an exact tile through the server: seconds", list(weights.shape), load(), times[1:], 0.15, None)]


def thumbnails(folder: Path) -> list[Row]:
    """A thumbnail has 48 × 48 cells whatever the length: 400 tokens stand for 8,000, which take minutes to pool."""
    numbers = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1024, 400, 8, generator=numbers) for _ in "qk")
    path = folder / "atlas.html"
    regard.weights(q, k).show(head=0).save(path)
    samples = []
    with browser() as running:
        for _ in range(3):
            tab = running.new_page(viewport={"width": 1440, "height": 900})
            tab.goto(path.as_uri())
            tab.wait_for_selector(".map-canvas")
            began = time.perf_counter()
            tab.click("#tab-overview")
            tab.wait_for_selector(".headcell canvas")
            tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            samples.append(time.perf_counter() - began)
            count = tab.locator(".headcell canvas").count()
            assert count == 1024, count
    return [row("an atlas of 1,024 thumbnails: seconds", [1024, 400, 400], load(), samples, 1.5, None)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--length", type=int, default=100_000)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--only", choices=("save", "serve", "atlas"))
    args = arguments.parse_args()
    figures: list[Row] = []
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        if args.only in (None, "save"):
            for size, causal in ((64, False), (32, True)):
                weights = long_head(args.length, size, causal)
                title = f"one head, d{size}{', causal' if causal else ''}"
                figures += saving(weights, folder / "page.html", title)
                figures += opening(folder / "page.html", list(weights.shape), title)
        if args.only in (None, "serve"):
            must = 0.15 if args.device == "cpu" else 0.03
            figures += serving(long_head(args.length, 64, False), args.device, f"served on {args.device}", must)
            figures += answering(min(args.length, 20_000))
        if args.only in (None, "atlas"):
            figures += thumbnails(folder)
    # Parts that were not measured now stay as they were.
    measured = {(figure.what, str(figure.shape)) for figure in figures}
    earlier = read("page") if (RESULTS / "page.json").exists() else []
    write("page", [one for one in earlier if (one.what, str(one.shape)) not in measured] + figures)


if __name__ == "__main__":
    main()
