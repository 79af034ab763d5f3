// The map of a long matrix: zoom by wheel, pinch, double click and keys, move by drag and keys, read any weight.

import { clamp, count, weightText } from "./numbers.js";
import { el, svg, word } from "./elements.js";
import { LEFT, TOP, breadcrumb, forbidden, marks, minimap, rulers } from "./rulers.js";
import { Tiles } from "./tiles.js";
import { legend } from "./square.js";

const LEAST = 8; // words a side of the smallest window
export const complete = ({ i, j }) => ({ i0: 0, i1: i, j0: 0, j1: j });

export class MatrixMap {
  constructor(page, source, box, readout, onwindow) {
    const own = page.long, { head } = source;
    this.page = page; this.source = source; this.box = box; this.readout = readout; this.head = head; this.own = own;
    this.onwindow = onwindow; this.cursor = null; this.onrow = null; this.hatched = null;
    this.view = own.view ?? complete(head);
    // A tile that comes late may be the one under the pointer.
    this.tiles = new Tiles(page, source, () => { this.request(); if (this.place) this.read(...this.place); });
    // The strongest links, as far as they compare with the first of them.
    const links = source.links(200), least = source.peak[links[0]] / 4;
    this.links = links.filter((i) => source.peak[i] >= least).map((i) => ({ i, j: source.peakAt[i] }));
    this.canvas = el("canvas", { class: "heat map-canvas", "aria-hidden": "true" });
    this.over = svg("svg", { class: "map-over", tabindex: 0, "data-key": "map", role: "application",
      "aria-label": "Map of the attention matrix. Arrow keys move, plus and minus zoom, 0 shows everything, Enter reads the row." });
    this.below = el("div", { class: "map-below" });
    box.replaceChildren(el("div", { class: "map-stage" }, this.canvas, this.over), this.below);
    this.listen();
    this.resize();
  }
  resize() {
    const { i, j } = this.head, space = this.box.clientWidth - LEFT - 4;
    this.width = Math.max(160, Math.min(space, 760, Math.max(280, innerHeight - TOP - 170)));
    this.height = Math.round(this.width * clamp(i / j, 0.25, 1));
    const dense = Math.min(2, devicePixelRatio || 1);
    Object.assign(this.canvas, { width: Math.round(this.width * dense), height: Math.round(this.height * dense) });
    for (const [name, size] of Object.entries({ left: LEFT, top: TOP, width: this.width, height: this.height })) {
      this.canvas.style.setProperty(name, `${size}px`);
    }
    this.over.setAttribute("width", LEFT + this.width + 4);
    this.over.setAttribute("height", TOP + this.height + 4);
    this.draw();
  }
  // One picture a frame, however many events there are.
  request() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; if (this.box.isConnected) this.draw(); });
  }
  draw() {
    const { mode, fit } = this.options, { view, width, height } = this;
    const drawn = this.tiles.draw(this.canvas, view, mode, fit);
    const cross = this.cursor ? this.crosshair() : [];
    const place = `${Object.values(view)} ${width} ${height} ${!!this.source.exact}`;
    if (this.hatched?.place !== place) this.hatched = { place, shapes: forbidden(view, this.source.exact, width, height) };
    this.over.replaceChildren(...rulers(view, this.head.stack, width, height), ...this.hatched.shapes,
      ...(this.own.marks === false ? [] : marks(view, this.links, width, height)), ...cross,
      svg("rect", { class: "border", x: LEFT, y: TOP, width, height }));
    this.over.style.setProperty("touch-action", this.isComplete ? "pan-y" : "none");
    const sizes = (n) => this.go(this.around((view.i0 + view.i1) / 2, (view.j0 + view.j1) / 2, n));
    this.page.keepingFocus(() => this.below.replaceChildren(minimap(view, this.tiles.plane(mode,
      this.tiles.scale(complete(this.head), mode, fit)), this.head),
      el("div", {}, el("p", { class: "crumbs" }, breadcrumb(view, this.head, sizes)),
        el("p", { class: "hint", "data-read": "level", text: this.level(drawn) }), legend(this.page, drawn.scale, fit
          ? "fitted: " : ""))));
  }
  get options() { return { mode: this.own.mode, fit: this.page.state.fit }; }
  get isComplete() { return this.view.i1 - this.view.i0 >= this.head.i - 1e-6; }
  // What a cell of the picture is, and how true it is.
  level({ exact, missing, served = null, level = 0 }) {
    const { error, bits, isExact } = this.source.exact ?? {}, [r, c] = this.source.tiles;
    const what = { mean: "the share of a row that falls into a cell, on average", max: "the largest weight in a cell",
      beyond: "by how much the largest weight in a cell exceeds an equal share, and what its key or its distance gets on average" }[this.own.mode];
    if (served) return servedLevel(served, level, missing, what);
    if (exact && missing) return "computing exact weights …";
    const off = `weights from q and k of ${bits} bits, off by at most ${weightText(100 * error)} % of their value`;
    if (exact) return `${isExact ? "Exact" : "Not exact"}: ${off}. Colour: ${what}.`;
    const tiles = `${r} × ${c} stored tiles${this.isComplete ? "" : ", magnified"}. Colour: ${what}.`;
    if (this.source.exact) return `${tiles} Zoom in to ${count(2048)} ${this.head.stack.rows.units} for ${isExact ? "exact " : ""}weights.`;
    return `${tiles} ${this.source.why ? `No exact weights: ${this.source.why}.`
      : this.page.vectorsPending ? "" : "Queries and keys of this head are not in the page: show(layer=…, head=…) brings them."}`;
  }
  crosshair() {
    const { view, width, height, cursor: [i, j] } = this, [x, y] = [width / (view.j1 - view.j0),
      height / (view.i1 - view.i0)];
    const [left, top] = [LEFT + (j - view.j0) * x, TOP + (i - view.i0) * y];
    const size = Math.max(x, 9), tall = Math.max(y, 9);
    return [svg("rect", { class: "marker", x: left + x / 2 - size / 2, y: top + y / 2 - tall / 2, width: size,
      height: tall })];
  }
  // A window of so many words around a place.
  around(i, j, words) {
    const { head } = this, share = clamp(words / Math.max(head.i, head.j), 0, 1);
    const side = (length) => clamp(length * share, Math.min(LEAST, length), length);
    const span = (at, length) => { const from = clamp(at - side(length) / 2, 0, length - side(length)); return [from,
      from + side(length)]; };
    const [[i0, i1], [j0, j1]] = [span(i, head.i), span(j, head.j)];
    return { i0, i1, j0, j1 };
  }
  go(view) {
    this.view = this.own.view = view;
    this.request();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.onwindow(view), 150);
  }
  // Zoom so that the place under the pointer stays there.
  zoom(factor, i, j) {
    const { view, head } = this;
    const span = (from, to, at, length) => {
      const size = clamp((to - from) / factor, Math.min(LEAST, length), length), share = (at - from) / (to - from);
      const first = clamp(at - share * size, 0, length - size);
      return [first, first + size];
    };
    const [[i0, i1], [j0, j1]] = [span(view.i0, view.i1, i, head.i), span(view.j0, view.j1, j, head.j)];
    this.go({ i0, i1, j0, j1 });
  }
  move(rows, cols) {
    const { view, head } = this, shift = (from, to, by, length) => { const d = clamp(by, -from, length - to);
      return [from + d, to + d]; };
    const [[i0, i1], [j0, j1]] = [shift(view.i0, view.i1, rows, head.i), shift(view.j0, view.j1, cols, head.j)];
    this.go({ i0, i1, j0, j1 });
  }
  // The row and the key at a place of the screen, with fractions.
  at({ clientX, clientY }) {
    const box = this.over.getBoundingClientRect(), { view, width, height } = this;
    return [view.i0 + ((clientY - box.top - TOP) / height) * (view.i1 - view.i0),
      view.j0 + ((clientX - box.left - LEFT) / width) * (view.j1 - view.j0)];
  }
  inside([i, j]) { const { view } = this; return i >= view.i0 && i < view.i1 && j >= view.j0 && j < view.j1; }
  read(i, j) {
    this.place = [i, j];
    const { rows, cols } = this.head.stack, { exact, tiles: [r, c] } = this.source;
    const [row, key] = [clamp(Math.floor(i), 0, this.head.i - 1), clamp(Math.floor(j), 0, this.head.j - 1)];
    const cells = this.width / (this.view.j1 - this.view.j0);
    const link = () => [word(named(rows, row)), el("span", { class: "arrow", text: " → " }), word(named(cols, key)), " "];
    if (exact && cells >= 0.5) {
      const masked = !exact.visible(row, key);
      this.readout.replaceChildren(...link(), masked ? el("span", { class: "who", "data-read": "weight", text: "the mask forbids it" })
          : el("b", { "data-read": "weight", text: weightText(exact.weight(row, key)) }), " ",
        exact.isExact && !masked ? el("span", { class: "who", text: "exact" }) : "");
      return;
    }
    const sent = cells >= 0.5 ? this.tiles.served?.weight(row, key) ?? null : null;
    if (sent !== null) {
      this.readout.replaceChildren(...link(), sent < 0 ? el("span", { class: "who", "data-read": "weight",
        text: "the mask forbids it" }) : el("b", { "data-read": "weight", text: weightText(sent) }), " ",
        sent < 0 ? "" : el("span", { class: "who", text: "exact" }));
      return;
    }
    const [a, b] = [Math.floor((row * r) / this.head.i), Math.floor((key * c) / this.head.j)];
    const { mode } = this.own, mean = mode === "mean", [first, second] = [spanText(a, r, this.head.i), spanText(b, c, this.head.j)];
    this.readout.replaceChildren(`${rows.units} `, el("b", { text: first }), ` ${mean ? "give" : "to"} ${cols.units} `, el("b",
      { text: second }),
      { mean: " a share of ", max: ": at most ", beyond: ": beyond their places at most " }[mode], el("b",
        { "data-read": "tile", text: weightText(mean ? this.source.share(a, b) : mode === "beyond"
          ? this.source.beyond(a, b) : this.source.most(a, b)) }));
  }
  listen() { gestures(this); }
}

// What the cells are that a server computed, and what is still missing.
function servedLevel({ failed, done, last, source: { server: { who }, head: { stack: { rows: { units } } } } }, level, missing, what) {
  if (failed) return `No tiles: ${failed}`;
  const size = 2 ** (last - level);
  if (missing && done !== null) return `The ${who} computes the first levels of the map: ${Math.round(100 * done)} %.`;
  if (missing) return `The ${who} computes …`;
  return size === 1 ? `Exact, computed by the ${who}. Colour: ${what}.`
    : `Cells of ${count(size)} × ${count(size)} ${units}, computed by the ${who}. Colour: ${what}.`;
}

const spanText = (n, tiles, length) => `${count(Math.floor((n * length) / tiles))}–${count(Math.floor(((n + 1) * length) / tiles) - 1)}`;
export const named = (sequence, n) => (sequence.tokens ? `${n} ${sequence.label(n).slice(0, 24)}` : count(n));

// Pointer, wheel and keys.
function gestures(map) {
  const { over } = map, pointers = new Map();
  let moved = 0, pinch = null;
  const spread = () => { const [a, b] = [...pointers.values()]; return Math.hypot(a.clientX - b.clientX,
    a.clientY - b.clientY); };
  const middle = () => { const [a, b] = [...pointers.values()]; return { clientX: (a.clientX + b.clientX) / 2,
    clientY: (a.clientY + b.clientY) / 2 }; };
  const on = (name, act, options) => over.addEventListener(name, act, options);
  on("wheel", (event) => {
    const place = map.at(event), out = event.deltaY > 0;
    if (!map.inside(place) || (out && map.isComplete)) return; // the page scrolls on
    event.preventDefault();
    map.zoom(2 ** clamp(-event.deltaY / 240, -1, 1), ...place);
    map.read(...place);
  }, { passive: false });
  on("pointerdown", (event) => {
    if (!map.inside(map.at(event))) return;
    pointers.set(event.pointerId, event);
    try { over.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone */ }
    moved = 0;
    pinch = pointers.size === 2 ? spread() : null;
  });
  on("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before && pointers.size === 1) {
      const [was, is] = [map.at(before), map.at(event)];
      moved += Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY);
      if (moved > 3) map.move(was[0] - is[0], was[1] - is[1]);
    }
    if (before) pointers.set(event.pointerId, event);
    if (pointers.size === 2 && pinch) {
      moved = 99;
      map.zoom(spread() / pinch, ...map.at(middle()));
      pinch = spread();
    }
    const place = map.at(event);
    if (!before && map.inside(place)) map.read(...place);
  });
  const up = (event) => {
    const place = map.at(event);
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && moved <= 3 && map.inside(place)) choose(map,
      ...place);
    pinch = null;
  };
  on("pointerup", up);
  on("pointercancel", up);
  on("dblclick", (event) => { if (map.inside(map.at(event))) map.zoom(event.shiftKey ? 0.25 : 4, ...map.at(event)); });
  on("keydown", (event) => mapKey(map, event));
}

function choose(map, i, j) {
  map.cursor = [Math.floor(i), Math.floor(j)];
  map.read(i, j);
  map.onrow?.(Math.floor(i));
  map.request();
}

// Arrows move the mark, and the window with it; plus and minus zoom around it, 0 shows everything, Enter reads the row.
function mapKey(map, event) {
  const { view, head } = map, step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0,
    -1] }[event.key];
  const side = Math.max(view.i1 - view.i0, view.j1 - view.j0), far = Math.max(1,
    Math.round(side / 48)) * (event.shiftKey ? 8 : 1);
  map.cursor ??= [Math.floor((view.i0 + view.i1) / 2), Math.floor((view.j0 + view.j1) / 2)];
  if (step) {
    const [i, j] = (map.cursor = [clamp(map.cursor[0] + step[0] * far, 0, head.i - 1),
      clamp(map.cursor[1] + step[1] * far, 0, head.j - 1)]);
    const out = (at, from, to) => (at < from ? at - from : at + 1 > to ? at + 1 - to : 0);
    map.move(out(i, view.i0, view.i1), out(j, view.j0, view.j1));
  } else if (["+", "=", "-", "0", "Home", "Enter"].includes(event.key)) {
    if (event.key === "0" || event.key === "Home") map.go(complete(head));
    else if (event.key === "Enter") choose(map, ...map.cursor);
    else map.zoom(event.key === "-" ? 0.5 : 2, map.cursor[0] + 0.5, map.cursor[1] + 0.5);
  } else return;
  event.preventDefault();
  map.read(...map.cursor);
}
