// Exact weights of a long input, computed in the page from stored queries and keys: exp(scale · q·k + bias − lse).

import { half } from "./data.js";

// Of all 65,536 numbers of 16 bits, their values.
let halves = null;
function fromHalves(bits) {
  halves ??= Float32Array.from({ length: 65536 }, (_, n) => half(n));
  const numbers = new Float32Array(bits.length);
  for (let n = 0; n < bits.length; n++) numbers[n] = halves[bits[n]];
  return numbers;
}

export class Exact {
  // spec: where the arrays of a head stand in the buffer, as `VectorBlock` wrote them.
  constructor(spec, buffer, i, j) {
    const array = (Kind, place) => (place ? new Kind(buffer, place[0], place[1]) : null);
    const vectors = (place) => (spec.bits === 16 ? fromHalves(array(Uint16Array, place)) : array(Float32Array, place));
    this.i = i; this.j = j; this.d = spec.d; this.scale = spec.scale; this.bits = spec.bits; this.error = spec.error;
    this.intervals = spec.intervals; this.q = vectors(spec.q); this.k = vectors(spec.k);
    this.lse = array(Float32Array, spec.lse); this.lo = array(Int32Array, spec.lo);
    this.hi = array(Int32Array, spec.hi); this.bias = array(Float32Array, spec.bias);
  }
  // "exact" is said only where no weight is off by more than 0.1 %.
  get isExact() { return this.error <= 1e-3; }
  visible(i, j) {
    if (!this.lo) return true;
    for (let r = 0; r < this.intervals; r++) {
      if (j >= this.lo[r * this.i + i] && j < this.hi[r * this.i + i]) return true;
    }
    return false;
  }
  weight(i, j) {
    if (!this.visible(i, j)) return 0;
    const { d, q, k } = this;
    let s = 0;
    for (let n = 0, a = i * d, b = j * d; n < d; n++) s += q[a + n] * k[b + n];
    return Math.exp(s * this.scale + (this.bias ? this.bias[j] : 0) - this.lse[i]);
  }
  // The weights from rows to keys, row after row; 0 where the mask allows nothing.
  block(rowFrom, rowTo, keyFrom, keyTo) {
    const width = keyTo - keyFrom, out = new Float32Array((rowTo - rowFrom) * width), { d, q, k, scale, lse, bias } = this;
    for (let i = rowFrom; i < rowTo; i++) {
      for (let r = 0; r < (this.lo ? this.intervals : 1); r++) {
        const first = this.lo ? Math.max(keyFrom, this.lo[r * this.i + i]) : keyFrom;
        const last = this.lo ? Math.min(keyTo, this.hi[r * this.i + i]) : keyTo;
        for (let j = first, at = (i - rowFrom) * width + first - keyFrom; j < last; j++, at++) {
          let s = 0;
          for (let n = 0, a = i * d, b = j * d; n < d; n++) s += q[a + n] * k[b + n];
          out[at] = Math.exp(s * scale + (bias ? bias[j] : 0) - lse[i]);
        }
      }
    }
    return out;
  }
  row(i) { return this.block(i, i + 1, 0, this.j); }
}
