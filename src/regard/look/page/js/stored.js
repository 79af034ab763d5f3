// What a page holds of a head of a long input: two maps, numbers of rows and columns, and exact weights.
// Views ask this source alone: `pool` for a map, `row` for a row.

import { clamp, edge, sum } from "./numbers.js";

export class Stored {
  constructor(head) {
    const { header, layer: { long, held } } = head, n = held.indexOf(head.head), [r, c] = long.tiles;
    const part = (name, size) => header.array(long[name]).subarray(n * size, (n + 1) * size);
    this.head = head; this.rows = long.rows; this.tiles = long.tiles; this.map = part("pool", r * c);
    this.largest = part("max", r * c);
    this.held = long.exact === undefined ? null : part("exact", long.rows.length * head.j); this.why = long.why;
    this.entropy = part("entropy", head.i); this.peak = part("peak", head.i); this.peakAt = part("peak_at", head.i);
    this.received = part("received", head.j); this.settled = long.settled; this.exact = null; this.promise = null;
    this.server = header.server ?? null;
  }
  // What the rows of a tile give its columns, a row on average.
  share(a, b) {
    const [r, c] = this.tiles, { i } = this.head;
    return this.map[a * c + b] / Math.max(1, edge(a + 1, r, i) - edge(a, r, i));
  }
  // The largest weight in a tile; −1 where the mask forbids them all, NaN where one is not a number.
  shown(a, b) { return this.largest[a * this.tiles[1] + b]; }
  most(a, b) { return Math.max(0, this.shown(a, b)) || 0; }
  // What a weight is expected to be for its place alone: an equal share of the keys that its row sees, the mean of its
  // key over the rows that see it or, of one sequence, the mean at its distance, whichever is most. What is seen, and how
  // far it is, is known by tiles.
  expected(i, j) {
    const { keys, distances } = this.habits, [r, c] = this.tiles, { head } = this;
    const key = clamp(Math.floor(j), 0, head.j - 1), row = clamp(Math.floor(i), 0, head.i - 1), a = Math.floor((row * r) / head.i);
    const most = Math.max(keys[key], this.equalShare(row, a));
    return head.stack.same ? Math.max(most, distances[Math.floor((key * c) / head.j) - a + r]) : most;
  }
  // The first rows of a causal text see as many keys as there are words so far.
  equalShare(row, a) { return 1 / Math.max(1, Math.min(this.habits.sees[a], this.settled ? row + 1 : Infinity)); }
  get habits() {
    if (this._habits) return this._habits;
    const [r, c] = this.tiles, { i, j } = this.head, size = (n, tiles, length) => edge(n + 1, tiles, length) - edge(n,
      tiles, length);
    const seen = new Float64Array(c), sees = new Float64Array(r), total = new Float64Array(r + c), cells = new Float64Array(r + c);
    for (let a = 0; a < r; a++) for (let b = 0; b < c; b++) {
      const weight = this.map[a * c + b];
      if (!(weight > 0)) continue;
      seen[b] += size(a, r, i);
      sees[a] += size(b, c, j);
      total[b - a + r] += weight;
      cells[b - a + r] += size(a, r, i) * size(b, c, j);
    }
    const keys = this.received.map((x, key) => x / Math.max(1, seen[Math.floor((key * c) / j)]));
    return (this._habits = { keys, sees, distances: total.map((x, n) => x / Math.max(1, cells[n])) });
  }
  // By how much the largest weight of a tile exceeds what is expected in it at most.
  beyond(a, b) {
    const [r, c] = this.tiles, { i, j } = this.head;
    if (!this._most) {
      const { keys } = this.habits;
      this._most = Float32Array.from({ length: c }, (_, n) => keys.subarray(edge(n, c, j), edge(n + 1, c, j)).reduce((x,
        y) => Math.max(x, y), 0));
    }
    const distance = this.head.stack.same ? this.habits.distances[b - a + r] : 0;
    return Math.max(0, this.most(a, b) - Math.max(this._most[b], distance, this.equalShare(edge(a, r, i), a)));
  }
  // The share that gets the strongest colour where the colours are fitted. The few tiles above it, such as the first rows
  // of a causal text, which see hardly anything else, would leave the others pale. It is at least four times the mean:
  // where all tiles are alike, their small differences must not look like structure.
  get scale() {
    if (this._scale) return this._scale;
    const [r, c] = this.tiles, all = Float32Array.from({ length: r * c }, (_, n) => this.share(Math.floor(n / c),
      n % c));
    const visible = all.filter((x) => x > 0).sort(), most = visible[Math.floor(0.998 * (visible.length - 1))] || 1;
    return (this._scale = Math.max(most, (4 * sum(visible)) / Math.max(1, visible.length)));
  }
  // The word that a row looks at most, and how much that is beyond what all rows give that word on average.
  best(i) {
    const key = this.peakAt[i], { cols, same } = this.head.stack;
    const barred = (cols.special.has(key) ? 2 : 0) + (same && key === i ? 2 : 0);
    const beyond = this.peak[i] - this.received[key] / this.head.i - barred;
    return { key, beyond: Number.isNaN(beyond) ? -Infinity : beyond };
  }
  // The rows with the largest weights to another word, one link a row, the strongest first.
  links(count) {
    const { peak, peakAt, settled } = this, { same } = this.head.stack;
    // The first rows of a causal text see few words, and give each of them much.
    const weight = peak.map((w, i) => (i < settled || (same && peakAt[i] === i) ? 0 : w));
    return topOf(weight, count).filter((i) => weight[i] > 0);
  }
  // Sums of weights in rows × cols tiles of the matrix; null for a part, or for tiles that are not held.
  async pool(rows, cols, i, j) {
    const complete = i[0] === 0 && i[1] === this.head.i && j[0] === 0 && j[1] === this.head.j;
    return complete && rows === this.tiles[0] && cols === this.tiles[1] ? this.map : null;
  }
  // The exact weights of a row: computed where queries and keys are there; null for a row that is not held.
  async row(i) {
    await this.promise;
    if (this.exact) return this.exact.row(i);
    if (this.server) return this.server.row(this.head, i);
    const n = this.rows.indexOf(i);
    return n < 0 ? null : this.held.subarray(n * this.head.j, (n + 1) * this.head.j);
  }
}

// The places of the n largest numbers, in one pass.
export function topOf(numbers, n) {
  const best = [];
  for (let m = 0; m < numbers.length; m++) {
    if (best.length === n && numbers[m] <= numbers[best[n - 1]]) continue;
    let at = best.length;
    while (at > 0 && numbers[best[at - 1]] < numbers[m]) at--;
    best.splice(at, 0, m);
    if (best.length > n) best.pop();
  }
  return best;
}
