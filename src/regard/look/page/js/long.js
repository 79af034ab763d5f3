// Long inputs: a map, numbers of rows and columns, the strongest links, exact rows.
// The views ask the source alone: here it is the data of the page, and a server could answer `pool` and `row` for any part.

import { clamp, count, largest, sum, weightText } from "./numbers.js";
import { el, heat, lane, lanes, shade, svg, table, word } from "./elements.js";
import { headChoice, stackChoice } from "./page.js";
import { legend } from "./square.js";

export class Stored {
  constructor(head) {
    const { header, layer: { long, held } } = head, n = held.indexOf(head.head), [r, c] = long.tiles;
    const part = (name, size) => header.array(long[name]).subarray(n * size, (n + 1) * size);
    Object.assign(this, { head, rows: long.rows, tiles: long.tiles, map: part("pool", r * c),
      exact: part("exact", long.rows.length * head.j) });
    Object.assign(this, { entropy: part("entropy", head.i), peak: part("peak", head.i), peakAt: part("peak_at", head.i),
      received: part("received", head.j), settled: long.settled });
  }
  // What the rows of a tile give its columns, a row on average.
  share(a, b) {
    const [r, c] = this.tiles, { i } = this.head;
    return this.map[a * c + b] / Math.max(1, edge(a + 1, r, i) - edge(a, r, i));
  }
  // The share that gets the strongest colour. The few tiles above it, such as the first rows of a causal text, which
  // see hardly anything else, would leave the others pale. It is at least four times the mean: where all tiles are
  // alike, their small differences must not look like structure.
  get scale() {
    if (this._scale) return this._scale;
    const [r, c] = this.tiles, all = Float32Array.from({ length: r * c }, (_, n) => this.share(Math.floor(n / c), n % c));
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
  // Sums of weights in rows × cols tiles of a part of the matrix; null for a part that is not held.
  async pool(rows, cols, i, j) {
    const complete = i[0] === 0 && i[1] === this.head.i && j[0] === 0 && j[1] === this.head.j;
    return complete && rows === this.tiles[0] && cols === this.tiles[1] ? this.map : null;
  }
  // The exact weights of a row; null for a row that is not held.
  async row(i) {
    const n = this.rows.indexOf(i);
    return n < 0 ? null : this.exact.subarray(n * this.head.j, (n + 1) * this.head.j);
  }
}

export function long(page, box) {
  const own = (page.long ??= { row: null });
  const bar = el("div", { class: "controls" }), message = el("p", { class: "readout", "aria-live": "polite" });
  const map = el("div", { class: "longmap" }), strips = el("div", {}), rows = el("div", {}),
    links = el("div", { class: "links" });
  box.append(bar, message, el("div", { class: "halves" }, map, strips, rows, links));
  return () => {
    const { head, stack } = page, source = (page.source = head.stored);
    if (!source.rows.includes(own.row)) own.row = source.rows.includes(page.state.word) ? page.state.word
      : source.rows[0];
    bar.replaceChildren(...[stackChoice(page), headChoice(page)].filter(Boolean));
    message.replaceChildren(`${count(head.i)} words look at ${count(head.j)}`);
    tileMap(page, source, map, message);
    strips.replaceChildren(
      profile("entropy of every row", source.entropy, stack.rows),
      profile("largest weight of every row", source.peak, stack.rows),
      profile("attention received by every word", source.received, stack.cols));
    exactRows(page, source, rows, own);
    links.replaceChildren(...strongest(page, source));
  };
}

export const edge = (n, tiles, length) => Math.floor((n * length) / tiles);
const named = (sequence, n) => (sequence.tokens ? `${n} ${sequence.label(n).slice(0, 24)}` : count(n));

function tileMap(page, source, box, message) {
  const { head, tiles: [r, c], scale } = source, { paint } = page, share = (a, b) => source.share(a, b);
  const canvas = heat(r, c, (a, b) => paint.tint(shade(share(a, b), scale)));
  const span_ = (n, tiles, length) => el("b",
    { text: `${count(edge(n, tiles, length))}–${count(edge(n + 1, tiles, length) - 1)}` });
  canvas.addEventListener("mousemove", (event) => {
    const [a, b] = tileUnder(canvas, event, r, c);
    message.replaceChildren("words ", span_(a, r, head.i), " give words ", span_(b, c, head.j), " a share of ",
      el("b", { "data-read": "tile", text: weightText(share(a, b)) }));
  });
  const caption = `${r} × ${c} tiles; down: the words that look, across: the words looked at. Colour: the share of a tile’s rows.`;
  box.replaceChildren(el("figure", { role: "img", "aria-label": `Map of the matrix in ${r} by ${c} tiles` }, canvas,
    el("figcaption", { text: caption })),
    legend(page, scale, "≥ "));
}

// Which of rows × cols cells of a canvas the pointer is over.
export function tileUnder(canvas, event, rows, cols) {
  const box = canvas.getBoundingClientRect(), at = (share, n) => clamp(Math.floor(share * n), 0, n - 1);
  return [at((event.clientY - box.top) / box.height, rows), at((event.clientX - box.left) / box.width, cols)];
}

// A number for every word as a strip: the mean and the largest of what falls on a pixel.
function profile(title, numbers, sequence) {
  const [width, height] = [640, 54], n = numbers.length, bins = Math.min(n, width), high = [], mean = [];
  for (let b = 0; b < bins; b++) {
    const part = numbers.subarray(edge(b, bins, n), edge(b + 1, bins, n));
    high.push(part[largest(part)]);
    mean.push(sum(part) / part.length);
  }
  const most = Math.max(...high) || 1, best = largest(numbers), x = (b) => (b * width) / bins,
    average = sum(numbers) / n;
  const area = (y) => `M0 ${height}${y.map((v, b) => `L${x(b)} ${height - (v / most) * height}H${x(b + 1)}`).join("")}L${width} ${height}Z`;
  const message = `mean ${weightText(average)}, largest ${weightText(numbers[best])}`;
  return el("figure", { class: "profile" }, el("figcaption", {}, title, el("span", { class: "who" }, ` ${message} at `,
    word(sequence.label(best)))),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${message}` },
      svg("path", { class: "range", d: area(high) }), svg("path", { class: "mean", d: area(mean) })));
}

async function exactRows(page, source, box, own) {
  const { rows, cols } = page.stack, row = await source.row(own.row), best = topOf(row, 12);
  const chip = (i) => el("button", {
    class: "chip", "data-key": `row-${i}`, "aria-pressed": String(i === own.row), text: named(rows, i),
    onclick: () => { own.row = i; exactRows(page, source, box, own); },
  });
  const line = (j) => el("li", {}, word(named(cols, j)),
    lanes([lane("var(--accent)", row[j] / row[best[0]], weightText(row[j]), { "data-row": own.row, "data-j": j })]));
  page.keepingFocus(() => box.replaceChildren(el("h2", { text: "Exact rows" }),
    el("div", { class: "chips", role: "group", "aria-label": "Rows this page holds" }, source.rows.map(chip)),
    profile(`where ${named(rows, own.row)} looks`, row, cols), el("ol", { class: "best" }, best.map(line))));
}

// The places of the n largest numbers, in one pass.
function topOf(numbers, n) {
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

function strongest(page, { peak, peakAt, settled }) {
  const { rows, cols, same } = page.stack;
  // The first rows of a causal text see few words, and give each of them much.
  const weight = peak.map((w, i) => (i < settled || (same && peakAt[i] === i) ? 0 : w));
  const best = topOf(weight, 20).filter((i) => weight[i] > 0);
  const caption = same ? "The largest weights between two words, one a row"
    : "The largest weights of the matrix, one a row";
  const body = best.map((i) => [word(named(rows, i)), word(named(cols, peakAt[i])), peak[i]]);
  return [el("h2", { text: "Strongest links" }), el("div", { class: "scroll" }, table(caption, ["from", "to", "weight"],
    body))];
}
