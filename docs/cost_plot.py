"""Draw docs/pictures/cost.svg again, the time that `regard.cost` says: `python docs/cost_plot.py`."""

from __future__ import annotations

import math
from pathlib import Path

import regard

PICTURE = Path(__file__).parent / "pictures" / "cost.svg"
LENGTHS = {2**20: "1M", 10**7: "10M", 10**8: "100M tokens"}
RANKS = [4**n for n in range(7)]
LINKS = {"h200-nvlink": ("NVLink", ""), "h200-100gbit": ("100 Gb/s", ' stroke-dasharray="5 3"')}
SHAPE = (1, 32, 8)
WIDE, TALL, EDGE = 560, 300, 46


def at(ranks: float, seconds: float) -> tuple[float, float]:
    """The place of a point, on logarithmic axes."""
    x = EDGE + (WIDE - 2 * EDGE) * math.log(ranks) / math.log(RANKS[-1])
    y = TALL - EDGE - (TALL - 1.6 * EDGE) * (math.log10(seconds) + 2) / 8  # from 10 ms to 10^6 s
    return round(x, 1), round(y, 1)


def drawn() -> str:
    """The picture."""
    parts = []
    for power in range(-2, 7, 2):
        x, y = at(1, 10.0**power)
        parts.append(
            f'<path d="M{x} {y}H{WIDE - EDGE}" stroke="#ddd"/><text x="{x - 6}" y="{y + 4}">{10.0**power:g} s</text>'
        )
    for ranks in RANKS:
        x, y = at(ranks, 0.01)
        parts.append(f'<text x="{x}" y="{y + 16}" class="below">{ranks:,}</text>')
    for length, label in LENGTHS.items():
        for machine, (link, dashes) in LINKS.items():
            costs = [
                regard.cost((*SHAPE, length, 128), n, mask=regard.causal(), backward=True, machine=machine)
                for n in RANKS
            ]
            points = [at(n, cost.seconds) for n, cost in zip(RANKS, costs, strict=True)]
            line = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="#0a66ad" stroke-width="1.5"{dashes}/>')
            for (x, y), n, cost in zip(points, RANKS, costs, strict=True):
                fill = "#0a66ad" if cost.fits else "#fff"
                parts.append(
                    f'<circle cx="{x}" cy="{y}" r="3.5" fill="{fill}" stroke="#0a66ad">'
                    f"<title>{label}, {n:,} ranks, {link}: {cost}</title></circle>"
                )
        x, y = at(1, costs[0].seconds)
        parts.append(f'<text x="{x + 8}" y="{y - 6}" class="name">{label}</text>')
    parts.append(f'<text x="{WIDE / 2}" y="{TALL - 8}" class="below">ranks</text>')
    style = "text{font:11px sans-serif;fill:#555;text-anchor:end}.below{text-anchor:middle}"
    style += ".name{text-anchor:start;fill:#111}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}" role="img" '
        f'aria-label="Seconds of a forward and backward pass by ranks"><style>{style}</style>'
        f'<rect width="{WIDE}" height="{TALL}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn())
