// Tiles of a long matrix from the server, z.x.y of 256 × 256 cells: what is there is drawn, what is missing is asked for.

import { clamp } from "./numbers.js";
import { heat } from "./elements.js";

export const SIDE = 256; // cells a side of a tile
const SENT = 200, BATCH = 12; // tiles that are remembered, and those of one question

export class ServedTiles {
  constructor(page, source, again) {
    const { i, j } = source.head;
    this.page = page; this.source = source; this.again = again; this.i = i; this.j = j; this.cells = new Map();
    this.pictures = new Map(); this.wanted = []; this.running = false; this.done = null; this.failed = null;
    this.last = Math.max(0, Math.ceil(Math.log2(Math.max(i, j) / SIDE)));
  }
  // The level whose cells are at least a pixel large.
  level(view, canvas) {
    const words = Math.max((view.i1 - view.i0) / canvas.height, (view.j1 - view.j0) / canvas.width);
    return this.last - clamp(Math.ceil(Math.log2(words)), 0, this.last);
  }
  words(z) { return 2 ** (this.last - z); }
  draw(ctx, canvas, view, mode, scale) {
    const z = this.level(view, canvas), side = SIDE * this.words(z);
    const [x, y] = [canvas.width / (view.j1 - view.j0), canvas.height / (view.i1 - view.i0)];
    const middle = [(view.i0 + view.i1) / 2 / side, (view.j0 + view.j1) / 2 / side];
    this.wanted = [];
    for (let a = Math.floor(view.i0 / side); a * side < view.i1; a++) for (let b = Math.floor(view.j0 / side); b * side < view.j1; b++) {
      const place = [z, b, a].join("."), by = this.by(z, mode);
      if (!this.cells.has(`${by} ${place}`)) this.wanted.push({ place, by, far: Math.hypot(a + 0.5 - middle[0], b + 0.5 - middle[1]) });
      // The nearest level above that is there stands in for what is missing.
      for (let up = 0; up <= z; up++) {
        const one = [z - up, b >> up, a >> up], key = `${this.by(one[0], mode)} ${one.join(".")}`;
        if (!this.cells.has(key)) continue;
        const size = SIDE / 2 ** up, from = [((b % 2 ** up) * SIDE) / 2 ** up, ((a % 2 ** up) * SIDE) / 2 ** up];
        const to = [(b * side - view.j0) * x, (a * side - view.i0) * y, side * x, side * y];
        ctx.clearRect(...to); // what the mask forbids has no colour
        ctx.drawImage(this.picture(key, one, scale, mode === "beyond"), ...from, size, size, ...to);
        break;
      }
    }
    this.wanted.sort((one, other) => one.far - other.far);
    if (this.wanted.length && !this.running && !this.failed) this.run();
    return { level: z, exact: z === this.last, missing: this.wanted.length };
  }
  // Which tiles a mode needs: what is beyond the expected is computed here, from the largest weights.
  by(z, mode) { return mode === "mean" && z < this.last ? "mean" : "max"; }
  picture(key, place, scale, beyond) {
    const [z, x, y] = place, name = `${key} ${scale} ${beyond}`, { paint } = this.page, cells = this.cells.get(key);
    const words = this.words(z), middle = (tile, cell) => (tile * SIDE + cell + 0.5) * words;
    const expected = beyond ? (a, b) => this.source.expected(middle(y, a), middle(x, b)) : () => 0;
    this.cells.delete(key); // the latest used last
    this.cells.set(key, cells);
    if (this.pictures.size > 2 * SENT || this.painted !== paint) { this.pictures.clear(); this.painted = paint; }
    if (!this.pictures.has(name)) {
      // At the last level −1 is a weight that the mask forbids; above, a cell is forbidden where a stored tile is.
      const [r, c] = this.source.tiles, tile = (n, length, tiles) => Math.min(tiles - 1, Math.floor((n * tiles) / length));
      const hidden = (a, b) => this.source.shown(tile(middle(y, a), this.i, r), tile(middle(x, b), this.j, c)) < 0;
      const shown = (w, a, b) => (w < 0 || (!w && hidden(a, b)) ? -1 : Math.max(0, w - expected(a, b)));
      this.pictures.set(name, heat(SIDE, SIDE, (a, b) => paint.cell(shown(cells[a * SIDE + b], a, b), scale)));
    }
    return this.pictures.get(name);
  }
  // The weight of a cell at the last level: null if its tile is not there, −1 where the mask forbids it.
  weight(i, j) {
    const cells = this.cells.get(`max ${this.last}.${Math.floor(j / SIDE)}.${Math.floor(i / SIDE)}`);
    return cells ? cells[(i % SIDE) * SIDE + (j % SIDE)] : null;
  }
  async run() {
    this.running = true;
    const by = this.wanted[0].by, some = this.wanted.filter((one) => one.by === by).slice(0, BATCH).map((one) => one.place);
    let pause = 0;
    try {
      const { header, arrays } = await this.source.server.tiles(this.source.head, by, some);
      arrays.forEach((cells, n) => { if (cells) this.cells.set(`${by} ${some[n]}`, cells); });
      this.done = header.done;
      if (arrays.includes(null)) pause = 400;
      while (this.cells.size > SENT) this.cells.delete(this.cells.keys().next().value);
    } catch (error) {
      this.failed = error.message;
      setTimeout(() => { this.failed = null; this.again(); }, 3000);
    }
    setTimeout(() => { this.running = false; this.again(); }, pause);
  }
}
