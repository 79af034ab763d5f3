// A window of a long input as a short one: its words, and the exact weights between them, for the views of short inputs.

import { Head, namesOf } from "./book.js";
import { range } from "./numbers.js";
import { named } from "./map.js";

// What computes the weights of a window: queries and keys in the page, or a window that the server has sent.
const exactOf = (head) => head.stored.exact ?? head.stored.window;

// The head of the long input that a head of a window is a part of.
export const rootOf = (head) => head.base ?? head;

class WindowHead extends Head {
  constructor(base, stack, id, [i0, j0]) {
    const exact = exactOf(base);
    super(base.header, { ...base.layer, mask_name: exact.lo ? "the mask" : undefined, scale: exact.scale, d: exact.d,
      score: "dot product", q: exact.q && !exact.bias ? true : undefined, visible: exact.lo ? true : undefined }, base.place, base.head, base.n, stack, id);
    this.base = base; this.from = [i0, j0]; this.exact = exact;
  }
  get w() { return (this._w ??= this.exact.block(this.from[0], this.from[0] + this.i, this.from[1],
    this.from[1] + this.j)); }
  visible(i, j) { return this.exact.visible(this.from[0] + i, this.from[1] + j); }
  part() { return null; }
  vectors(name) {
    // With a bias the products alone would explain the scores wrongly.
    const { q, k, d, bias } = this.exact, flat = bias ? null : { q, k }[name], from = this.from[name === "q" ? 0 : 1];
    if (!flat) return null;
    return range(name === "q" ? this.i : this.j).map((n) => flat.subarray((from + n) * d, (from + n + 1) * d));
  }
}

// What a row of a window looks at most in the long text, where that is no word of the window; else null.
export function outside({ base, from, j, stack }, row) {
  if (!base) return null;
  const { peak, peakAt } = base.stored, i = from[0] + row, key = peakAt[i], inside = key >= from[1] && key < from[1] + j;
  return inside || !(peak[i] > 0) ? null : { name: named(stack.base.cols, key), weight: peak[i] };
}

// A stack of some rows and keys of a long one, with its heads that are exact. Equal rows and keys are one sentence.
export function windowStack(book, base, n, [i0, i1, j0, j1]) {
  const same = base.same && i0 === j0 && i1 === j1, rows = part(base.rows, i0, i1), cols = same ? rows : part(base.cols,
    j0, j1);
  const stack = { ...base, n, same, long: false, rows, cols, heads: [], window: [i0, i1, j0, j1], base };
  const exact = base.heads.filter(exactOf);
  stack.heads = exact.map((head, m) => new WindowHead(head, stack, book.heads.length + m, [i0, j0]));
  return stack;
}

function part(sequence, from, to) {
  const inside = (places) => new Set([...places].filter((n) => n >= from && n < to).map((n) => n - from));
  const words = sequence.words?.filter(([a, b]) => a >= from && b <= to).map(([a, b, label]) => [a - from, b - from,
    label]);
  const covered = words && words.reduce((sum, [a, b]) => sum + b - a, 0) === to - from;
  return { ...sequence, length: to - from, tokens: sequence.tokens?.slice(from, to) ?? null, words: covered ? words
    : null,
    special: inside(sequence.special), unknown: inside(sequence.unknown), patches: 0,
    ...(sequence.tokens ? namesOf(sequence.tokens.slice(from, to)) : { label: (n) => sequence.label(from + n), name: (n) => sequence.name(from + n) }) };
}
