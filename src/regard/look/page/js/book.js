// The content of a page: sequences, stacks of layers, heads and their weights as words.

import { largest, range, sum } from "./numbers.js";
import { Stored } from "./stored.js";

export function openBook(header) {
  const sequences = header.sequences.map((s) => ({
    ...s, special: new Set(s.special), unknown: new Set(s.unknown), ...namesOf(s.tokens),
    picture: s.image === undefined ? null : { pixels: header.array(s.image), shape: header.shape(s.image) },
    rtl: s.tokens ? rightToLeft(s.tokens, s.special) : false, ...unitsOf(s.tokens ? patchColumns(s) : 0),
  }));
  const stacks = header.stacks.map((s, n) => ({ ...s, n, rows: sequences[s.rows], cols: sequences[s.cols],
    heads: [] }));
  const heads = [];
  header.layers.forEach((layer, place) => layer.held.forEach((head, n) => {
    const one = new Head(header, layer, place, head, n, stacks[layer.stack], heads.length);
    stacks[layer.stack].heads.push(one);
    heads.push(one);
  }));
  const total = sum(header.all.map(([, , heads]) => heads));
  return { header, sequences, stacks, heads, total };
}

// What a sequence calls its tokens: the label as it is, and the name, which numbers those that occur several times.
export function namesOf(tokens) {
  let names = null;
  return { label: (n) => (tokens ? tokens[n] : String(n)), name: (n) => (tokens ? (names ??= numbered(tokens))[n] : String(n)) };
}

export const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

// The direction of a text is that of its first strong letter.
function rightToLeft(tokens, special) {
  const skip = new Set(special);
  for (let n = 0; n < Math.min(tokens.length, 400); n++) {
    const strong = skip.has(n) ? null : tokens[n].match(/\p{L}/u);
    if (strong) return RIGHT_TO_LEFT.test(strong[0]);
  }
  return false;
}

// What the positions of a sequence are called: patches of an image, or words.
export const unitsOf = (patches) => ({ patches, unit: patches ? "patch" : "word", units: patches ? "patches" : "words" });

// How many patches an image has in a row, if the tokens are places of patches ("3,8"); 0 for words.
export function patchColumns({ tokens, special }) {
  const skip = new Set(special), places = tokens.filter((_, n) => !skip.has(n)).map((text) => text.match(/^(\d+),(\d+)$/));
  if (places.length < 4 || places.includes(null)) return 0;
  const columns = Math.max(...places.map((place) => Number(place[2]))) + 1;
  return places.every((place, n) => Number(place[1]) * columns + Number(place[2]) === n) ? columns : 0;
}

export class Head {
  constructor(header, layer, place, head, n, stack, id) {
    this.header = header; this.layer = layer; this.place = place; this.head = head; this.n = n; this.stack = stack;
    this.id = id; this.i = stack.rows.length; this.j = stack.cols.length; this.sheets = new Map(); this.split = {};
    this._w = this._stored = this._visible = undefined; // read when they are needed
    this.name = layer.name ? `layer ${layer.index}, head ${head}` : layer.heads > 1 ? `head ${head}` : "these weights";
    this.brief = layer.name ? `${layer.index}·${head}` : `${head}`;
  }
  // This head's part of one of its layer's arrays, (heads, a, b); heads may share values and keys.
  part(name) {
    const { held, with_vectors, per_value: v, per_key: k, [name]: ref } = this.layer;
    const n = (name === "w" || name === "visible" ? held : with_vectors).indexOf(this.head);
    if (ref === undefined || n < 0) return null;
    const [many, a, b] = this.header.shape(ref), sharing = { v, k }[name] ?? 1;
    const at = many === 1 ? 0 : sharing > 1 ? Math.floor(this.head / sharing) : n;
    return this.header.array(ref).subarray(at * a * b, (at + 1) * a * b);
  }
  vectors(name) {
    const flat = this.part(name);
    if (!flat) return null;
    const size = this.header.shape(this.layer[name]).at(-1), length = flat.length / size;
    return (this.split[name] ??= range(length).map((n) => flat.subarray(n * size, (n + 1) * size)));
  }
  get w() { return (this._w ??= this.part("w")); }
  get stored() { return (this._stored ??= new Stored(this)); }
  at(i, j) { return this.w[i * this.j + j]; }
  row(i) { return this.w.subarray(i * this.j, (i + 1) * this.j); }
  visible(i, j) {
    if (this._visible === undefined) this._visible = this.part("visible");
    return !this._visible || this._visible[i * this.j + j] > 0;
  }
  // What a picture shows of a weight: −1 where the mask forbids it.
  shown(i, j) { return this.visible(i, j) ? this.at(i, j) : -1; }

  // The weights of words: what a word is given is the sum over its tokens, how it looks the mean over them.
  // Hidden tokens leave their share to the others, so that a row keeps its sum.
  sheet(options) {
    const key = `${options.hide}${options.merge}`;
    if (!this.sheets.has(key)) {
      const [rows, cols] = [reading(this.stack.rows, options), reading(this.stack.cols, options)];
      this.sheets.set(key, new Sheet(this, rows, cols, rows.groups.map((group) => this.readRow(group, cols))));
    }
    return this.sheets.get(key);
  }
  readRow([from, to], cols) {
    const mean = new Float64Array(this.j), row = new Float64Array(cols.groups.length);
    for (let i = from; i < to; i++) for (let j = 0, at = i * this.j; j < this.j;
      j++) mean[j] += this.w[at + j] / (to - from);
    cols.groups.forEach(([a, b], n) => { for (let j = a; j < b; j++) row[n] += mean[j]; });
    let hidden = 0;
    for (const j of cols.hidden) hidden += mean[j];
    const shown = sum(row);
    return hidden && shown ? row.map((x) => (x * (shown + hidden)) / shown) : row;
  }
}

// The weights of one head as they are read, and how much of them is habit.
class Sheet {
  constructor(head, rows, cols, w) {
    this.head = head; this.rows = rows; this.cols = cols; this.w = w; this.same = head.stack.same; this.bests = [];
  }
  // Whether the mask forbids a word to look at another one, with all their tokens. A weight of 0 alone does not say so.
  masked(i, j) {
    const [a, b] = this.rows.groups[i], [c, d] = this.cols.groups[j];
    for (let n = a; n < b; n++) for (let m = c; m < d; m++) if (this.head.visible(n, m)) return false;
    return true;
  }
  // Sums and counts of what every word is given, and of what is given at every distance.
  get habits() {
    if (this._habits) return this._habits;
    const { w } = this, [m, n] = [w.length, this.cols.labels.length], zeros = (size) => new Float64Array(size);
    const to = zeros(n), seen = zeros(n), far = zeros(m + n), met = zeros(m + n);
    w.forEach((row, i) => {
      for (let j = 0; j < n; j++) {
        const x = row[j];
        if (!(x > 0)) continue;
        to[j] += x; seen[j]++; far[j - i + m] += x; met[j - i + m]++;
      }
    });
    return (this._habits = { to, seen, far, met });
  }
  // The word that a row is tied to beyond habit: more than it gives that word, or that distance, anyway.
  // Special tokens, and a word itself, count only where there is nothing else; a word without weight never does:
  // the mask may forbid it. The key is null where the row gives no word any weight.
  best(i) {
    if (this.bests[i]) return this.bests[i];
    const { to, seen, far, met } = this.habits, m = this.w.length, row = this.w[i];
    const one = { key: row.some(Number.isNaN) ? 0 : null, beyond: -Infinity };
    row.forEach((x, j) => {
      if (x === 0) return;
      const own = x > 0 ? 1 : 0, others = (total, count) => (total - x) / Math.max(1, count - own), d = j - i + m;
      const habit = Math.max(others(to[j], seen[j]), this.same ? others(far[d], met[d]) : -Infinity);
      const barred = (this.cols.special[j] ? 2 : 0) + (this.same && i === j ? 2 : 0);
      if (x - habit - barred > one.beyond) Object.assign(one, { key: j, beyond: x - habit - barred });
    });
    return (this.bests[i] = one);
  }
  // The word that a headline names: the one the row is tied to, or, where no word gets more than habit gives it,
  // the one it looks at most; null where it looks at nothing.
  named(i) {
    const { key, beyond } = this.best(i);
    return key === null || beyond > 0 ? key : largest(this.w[i]);
  }
}

function reading(sequence, { hide, merge }) {
  const { length, label, special, words } = sequence;
  const all = merge && words ? words : range(length).map((n) => [n, n + 1, label(n)]);
  const gone = (n) => hide && special.has(n) && special.size < length;
  const groups = all.filter(([a]) => !gone(a));
  const at = new Array(length).fill(-1);
  groups.forEach(([a, b], n) => { for (let t = a; t < b; t++) at[t] = n; });
  const labels = groups.map((g) => g[2]);
  const inside = new Set(merge ? [] : (words ?? []).flatMap(([a, b]) => range(b - a - 1).map((n) => a + 1 + n)));
  return { groups, at, labels, names: numbered(labels), hidden: range(length).filter(gone), rtl: sequence.rtl,
    special: groups.map(([a]) => special.has(a)), unknown: groups.map(([a]) => sequence.unknown.has(a)),
    inside: groups.map(([a]) => inside.has(a)), unit: sequence.unit, units: sequence.units, patches: merge ? 0 : sequence.patches, picture: merge ? null : sequence.picture };
}

// Words that occur several times get a number, as a subscript: the₁, the₂.
export function numbered(labels) {
  const total = new Map(), seen = new Map(), digits = "₀₁₂₃₄₅₆₇₈₉";
  for (const label of labels) total.set(label, (total.get(label) ?? 0) + 1);
  return labels.map((label) => {
    if (total.get(label) === 1) return label;
    seen.set(label, (seen.get(label) ?? 0) + 1);
    return label + [...String(seen.get(label))].map((digit) => digits[digit]).join("");
  });
}

// The heads for the word that is shown, the most telling first; two to begin with that look at different words.
export function ranked({ stack, state, row }) {
  const heads = stack.heads.filter((head) => state.layer === null || head.place === state.layer);
  const beyond = new Map(heads.map((head) => [head, bestOf(head, state, row).beyond]));
  return heads.sort((a, b) => beyond.get(b) - beyond.get(a) || a.id - b.id);
}
export function bestOf(head, state, row) {
  if (head.stack.long) return head.stored.best(row);
  const sheet = head.sheet(state);
  return sheet.best(Math.max(0, sheet.rows.at[row]));
}
export function firstTwo(heads, { state, row }) {
  if (heads.length < 2 || heads[0].stack.long) return heads.slice(0, 1);
  const key = (head) => bestOf(head, state, row).key, other = heads.find((head) => key(head) !== key(heads[0]));
  return [heads[0], other ?? heads[1]];
}
