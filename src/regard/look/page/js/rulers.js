// Rulers beside the map, which become words when there is space, its marks, and the small map of where one is.

import { clamp, count, range } from "./numbers.js";
import { el, hatching, svg } from "./elements.js";

export const LEFT = 86, TOP = 66;
const clip = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);

// Ticks of a ruler from `from` to `to` over so many pixels: every word where it fits, else round positions.
export function ticks(from, to, pixels) {
  const cell = pixels / (to - from), least = cell >= 12 ? 1 : 36 / cell;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  const step = least <= 1 ? 1 : [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
  const first = Math.ceil(from / step) * step;
  return range(Math.max(0, Math.floor((to - 1e-9 - first) / step) + 1)).map((n) => first + n * step)
    .map((at) => ({ at, place: (at + (step === 1 ? 0.5 : 0) - from) * cell, each: step === 1 }));
}

export function rulers({ i0, i1, j0, j1 }, { rows, cols }, width, height) {
  const name = (sequence, { at, each }) => (each && sequence.tokens ? clip(sequence.label(at), 11) : count(at));
  const row = (tick) => svg("text", { class: "ruler", x: LEFT - 6, y: TOP + tick.place, "text-anchor": "end",
    "dominant-baseline": "central", text: name(rows, tick) });
  const col = (tick) => svg("text", { class: "ruler", "dominant-baseline": "central",
    transform: `translate(${LEFT + tick.place} ${TOP - 6}) rotate(-90)`, text: name(cols, tick) });
  return [...ticks(i0, i1, height).filter((t) => t.each || t.place < height - 4).map(row),
    ...ticks(j0, j1, width).map(col)];
}

// Rings around the strongest links of the window: they are drawn whatever the colours do. Where rings would lie on one
// another, the strongest is drawn, and the others appear as one zooms in.
export function marks({ i0, i1, j0, j1 }, links, width, height) {
  const [x, y] = [width / (j1 - j0), height / (i1 - i0)], size = clamp(Math.max(x, y) / 2 + 2, 4, 40), rings = [];
  for (const { i, j } of links) {
    const ring = { cx: (j + 0.5 - j0) * x, cy: (i + 0.5 - i0) * y, link: `${i} ${j}` };
    const inside = ring.cx > 0 && ring.cx < width && ring.cy > 0 && ring.cy < height;
    if (inside && rings.every((one) => Math.hypot(one.cx - ring.cx,
      one.cy - ring.cy) > 2 * size + 10)) rings.push(ring);
  }
  return rings.map(({ cx, cy, link }) => svg("circle", { class: "ring", cx: LEFT + cx, cy: TOP + cy, r: size,
    "data-link": link }));
}

// The window within the complete matrix.
export function minimap(view, plane, { i, j }) {
  const size = 92, tall = clamp((size * i) / j, 24, size);
  const canvas = el("canvas", { class: "heat hatched", width: plane.width, height: plane.height, "aria-hidden": "true" });
  canvas.getContext("2d").drawImage(plane, 0, 0);
  const part = (from, to, length, pixels) => [(from / length) * pixels, Math.max(3, ((to - from) / length) * pixels)];
  const [[x, width], [y, height]] = [part(view.j0, view.j1, j, size), part(view.i0, view.i1, i, tall)];
  return el("div", { class: "minimap", style: { width: `${size}px`, height: `${tall}px` } }, canvas,
    svg("svg", { width: size, height: tall, "aria-hidden": "true" }, svg("rect", { class: "marker", x, y, width,
      height })));
}

// The way to where one is: all words, and ever smaller windows around the middle of this one.
export function breadcrumb(view, { i, j, stack }, go) {
  const side = Math.max(view.i1 - view.i0, view.j1 - view.j0), total = Math.max(i, j);
  const sizes = [total, ...[65536, 8192, 1024, 128].filter((n) => n < total * 0.7 && n > side * 1.4), Math.round(side)]
    .filter((n, at, all) => n >= side - 1 && all.indexOf(n) === at);
  return sizes.flatMap((n, at) => [at ? el("span", { class: "arrow", text: " › " }) : null,
    el("button", { class: "crumb", "data-key": `crumb-${at}`, "aria-current": at === sizes.length - 1 ? "true"
      : undefined,
      text: `${count(n)} ${stack.rows.units}`, onclick: () => go(n) })]).filter(Boolean);
}

// What the mask forbids in a window, as far as the page knows it: hatched, strip by strip of rows. Of several rows in a
// strip, what all of them may not see.
export function forbidden({ i0, i1, j0, j1 }, exact, width, height) {
  if (!exact?.lo) return [];
  const rows = Math.ceil(i1) - Math.floor(i0), strips = Math.min(rows, Math.floor(height / 2)), [x, y] = [width / (j1 - j0), height / (i1 - i0)], runs = [];
  for (let n = 0; n < strips; n++) {
    const [first, last] = strips === rows ? [Math.floor(i0) + n, Math.floor(i0) + n + 1] : [0, 1].map((m) => Math.floor(i0 + ((n + m) * (i1 - i0)) / strips));
    const [up, down] = [first, last].map((i) => Math.round(clamp((i - i0) * y, 0, height)));
    let from = j0;
    for (const [lo, hi] of [...seenBy(exact, first, Math.min(last, exact.i)), [j1, j1]]) {
      const to = Math.min(lo, j1);
      if ((to - from) * x >= 1) runs.push(`M${LEFT + (from - j0) * x} ${TOP + up}h${(to - from) * x}v${down - up}h${(from - to) * x}z`);
      from = Math.max(from, hi);
    }
  }
  return runs.length ? [hatching("hatch"), svg("path", { class: "masked", fill: "url(#hatch)", d: runs.join("") })] : [];
}

// The keys that some of these rows see, as intervals in order, without overlaps.
function seenBy({ lo, hi, i: length, intervals }, first, last) {
  const all = [];
  for (let r = 0; r < intervals; r++) for (let i = first; i < last; i++) {
    const [from, to] = [lo[r * length + i], hi[r * length + i]], before = all.at(-1);
    if (from >= to) continue;
    if (before && from <= before[1] && to >= before[0]) { before[0] = Math.min(from, before[0]); before[1] = Math.max(to, before[1]); } else all.push([from, to]);
  }
  all.sort((a, b) => a[0] - b[0]);
  return all;
}
