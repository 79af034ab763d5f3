// The picture of a window of a long matrix: stored tiles, magnified, and exact ones of 256 × 256 words as they are made.

import { clamp, edge } from "./numbers.js";
import { heat } from "./elements.js";
import { SIDE, ServedTiles } from "./served_tiles.js";

const CACHED = 160;
export const EXACT_WORDS = 2048; // a side: windows up to here are filled with exact tiles

export class Tiles {
  constructor(page, source, again) {
    this.page = page; this.source = source; this.again = again; this.computed = new Map(); this.painted = new Map();
    this.queue = []; this.planes = new Map();
    this.served = source.server ? new ServedTiles(page, source, again) : null;
  }
  // Whether a window is small enough for exact tiles.
  isExact({ i0, i1, j0, j1 }) { return !!this.source.exact && Math.max(i1 - i0, j1 - j0) <= EXACT_WORDS; }
  // The weight that gets the strongest colour: 1, or where the colours are fitted what is largest in the window.
  scale(view, mode, fit) {
    if (!fit) return 1;
    if (mode === "mean" && !this.isExact(view)) return this.source.scale;
    const [r, c] = this.source.tiles, { i, j } = this.source.head;
    // The first rows of a causal text see few words and give each of them much: they do not fix the scale of the others.
    const settled = Math.ceil((this.source.settled / i) * r), first = Math.floor((view.i0 / i) * r);
    let most = 0;
    for (let a = view.i1 > 2 * this.source.settled ? Math.max(first, settled) : first; a < Math.min(r,
      (view.i1 / i) * r); a++) {
      for (let b = Math.floor((view.j0 / j) * c); b < Math.min(c, (view.j1 / j) * c); b++) most = Math.max(most,
        this.source.most(a, b));
    }
    return most || 1;
  }
  draw(canvas, view, mode, fit) {
    const ctx = canvas.getContext("2d"), scale = this.scale(view, mode, fit), exact = this.isExact(view);
    ctx.imageSmoothingEnabled = false;
    ctx.clearRect(0, 0, canvas.width, canvas.height); // what is hatched has no colour
    // Where the intervals of the mask are known they are hatched to the word.
    canvas.classList.toggle("hatched", !this.source.exact);
    const { i, j } = this.source.head, [r, c] = this.source.tiles;
    const plane = this.plane(mode, exact ? this.scale(view, mode, fit) : scale);
    ctx.drawImage(plane, (view.j0 / j) * c, (view.i0 / i) * r, ((view.j1 - view.j0) / j) * c,
      ((view.i1 - view.i0) / i) * r,
      0, 0, canvas.width, canvas.height);
    this.queue = [];
    if (exact) this.drawExact(ctx, canvas, view, mode, scale);
    else if (this.served) return { scale, ...this.served.draw(ctx, canvas, view, mode, scale), served: this.served };
    if (this.queue.length && !this.running) this.run();
    return { scale, exact, missing: this.queue.length };
  }
  // The stored map of the matrix as one small picture.
  plane(mode, scale) {
    const key = `${mode} ${scale}`, { paint } = this.page, [r, c] = this.source.tiles;
    if (!this.planes.has(key)) {
      if (this.planes.size > 8) this.planes.clear();
      const { source } = this, at = { mean: (a, b) => source.share(a, b), max: (a, b) => source.most(a, b),
        beyond: (a, b) => source.beyond(a, b) }[mode];
      this.planes.set(key, heat(r, c, (a, b) => paint.cell(source.shown(a, b) >= 0 ? at(a, b) : source.shown(a, b), scale)));
    }
    return this.planes.get(key);
  }
  drawExact(ctx, canvas, view, mode, scale) {
    const { i, j } = this.source.head, [x, y] = [canvas.width / (view.j1 - view.j0),
      canvas.height / (view.i1 - view.i0)];
    // So many words become one cell, at least a pixel large, that shows the largest of their weights: none vanishes.
    const pool = clamp(2 ** Math.ceil(Math.log2(1 / Math.min(x, y))), 1, 64);
    const middle = [(view.i0 + view.i1) / 2 / SIDE, (view.j0 + view.j1) / 2 / SIDE];
    for (let a = Math.floor(view.i0 / SIDE); a * SIDE < view.i1; a++) for (let b = Math.floor(view.j0 / SIDE);
      b * SIDE < view.j1; b++) {
      const key = `${a} ${b}`, weights = this.computed.get(key);
      const [rows, cols] = [Math.min(SIDE, i - a * SIDE), Math.min(SIDE, j - b * SIDE)];
      if (rows <= 0 || cols <= 0) continue;
      if (!weights) {
        this.queue.push({ key, a, b, far: Math.hypot(a + 0.5 - middle[0], b + 0.5 - middle[1]) });
        continue;
      }
      this.computed.delete(key); // the latest used last
      this.computed.set(key, weights);
      const picture = this.picture(key, weights, rows, cols, pool, mode, scale, [a * SIDE, b * SIDE]);
      ctx.drawImage(picture, (b * SIDE - view.j0) * x, (a * SIDE - view.i0) * y, Math.ceil(cols / pool) * pool * x,
        Math.ceil(rows / pool) * pool * y);
    }
    this.queue.sort((one, other) => other.far - one.far);
  }
  picture(key, weights, rows, cols, pool, mode, scale, [i0, j0]) {
    const name = `${key} ${pool} ${mode} ${scale}`, { paint } = this.page, { source } = this;
    const beyond = mode === "beyond" ? (w, i, j) => Math.max(0, w - source.expected(i0 + i, j0 + j)) : (w) => w;
    if (this.painted.size > 4 * CACHED) this.painted.clear();
    if (!this.painted.has(name)) {
      const [m, n] = [Math.ceil(rows / pool), Math.ceil(cols / pool)];
      this.painted.set(name, heat(m, n, (a, b) => {
        let most = 0, total = 0;
        const [last, end] = [Math.min(rows, (a + 1) * pool), Math.min(cols, (b + 1) * pool)];
        for (let i = a * pool; i < last; i++) for (let j = b * pool; j < end; j++) {
          const w = beyond(weights[i * cols + j], i, j);
          total += w;
          if (w > most || Number.isNaN(w)) most = w; // nothing is more than NaN
        }
        return paint.cell(mode === "mean" ? total / (last - a * pool) : most, scale);
      }));
    }
    return this.painted.get(name);
  }
  // Compute what the window lacks, the middle first, a few milliseconds at a time.
  run() {
    this.running = true;
    const step = () => {
      const end = performance.now() + 12;
      do {
        const next = this.queue.pop();
        if (!next) break;
        const { i, j } = this.source.head, [a, b] = [next.a * SIDE, next.b * SIDE];
        this.computed.set(next.key, this.source.exact.block(a, Math.min(i, a + SIDE), b, Math.min(j, b + SIDE)));
        if (this.computed.size > CACHED) this.computed.delete(this.computed.keys().next().value);
      } while (performance.now() < end);
      this.running = false;
      this.again();
    };
    setTimeout(step, 0);
  }
}

// The positions of the rows, or keys, of a stored tile.
export const tileSpan = (n, tiles, length) => [edge(n, tiles, length), edge(n + 1, tiles, length)];
