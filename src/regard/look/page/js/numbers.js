// Arithmetic on weights, attention written out, and numbers as text.

export const range = (n) => Array.from({ length: n }, (_, i) => i);
export const sum = (x) => { let s = 0; for (const v of x) s += v; return s; };
export const largest = (x) => { let best = 0; for (let n = 1; n < x.length; n++) if (x[n] > x[best]) best = n;
  return best; };
// At most so many of a list, spread evenly from its first to its last.
export const spread = (list, most) => (list.length <= most ? list
  : range(most).map((n) => list[Math.round((n * (list.length - 1)) / (most - 1))]));
// The first of n things that falls into one of so many tiles.
export const edge = (tile, tiles, n) => Math.floor((tile * n) / tiles);
export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

export function dot(a, b) {
  let s = 0;
  for (let n = 0; n < a.length; n++) s += a[n] * b[n];
  return s;
}

// softmax of scores, −∞ where nothing may be seen; a row that sees nothing stays 0.
export function softmax(scores) {
  const m = Math.max(...scores);
  if (m === -Infinity) return scores.map(() => 0);
  const e = scores.map((s) => Math.exp(s - m)), l = sum(e);
  return e.map((x) => x / l);
}

export const entropy = (w) => sum(w.map((x) => (x > 0 ? -x * Math.log(x) : 0)));

// How alike are a query and a key; each is one of regard's scores with its defaults, times the slider.
export const SIMILARITIES = {
  scaled: { name: "scaled dot", formula: "q·k / √d", of: (q, k) => dot(q, k) / Math.sqrt(q.length) },
  dot: { name: "dot", formula: "q·k", of: dot },
  cosine: { name: "cosine", formula: "q·k / |q||k|", of: (q, k) => dot(q, k) / (Math.sqrt(dot(q, q) * dot(k, k))
    || 1) },
  gaussian: { name: "Gaussian", formula: "−|q − k|² / 2", of: (q, k) => { let s = 0; for (let n = 0; n < q.length;
    n++) s -= (q[n] - k[n]) ** 2; return s / 2; } },
  additive: { name: "additive", formula: "Σ tanh(q + k)", of: (q, k) => { let s = 0; for (let n = 0; n < q.length;
    n++) s += Math.tanh(q[n] + k[n]); return s; } },
};

export function mix(row, v) {
  const y = new Array(v[0].length).fill(0);
  row.forEach((w, j) => { for (let e = 0; e < y.length; e++) y[e] += w * v[j][e]; });
  return y;
}

// Numbers as text: a real minus sign, always so many digits.
export function fixed(x, digits = 3) {
  if (x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return "–";
  const text = Math.abs(x) >= 1e5 ? Math.abs(x).toExponential(2) : Math.abs(x).toFixed(digits);
  return (x < 0 && Number(text) !== 0 ? "−" : "") + text;
}

export const weightText = (w) => (w > 0 && w < 5e-4 ? w.toExponential(1) : fixed(w, 3));
// In a picture no number is longer than its neighbours.
export const brief = (w) => (w > 0 && w < 5e-4 ? "<0.001" : fixed(w, 3));
export const near = (x) => fixed(x, Math.abs(x) >= 10 ? 0 : 2);
// Round numbers that enclose a range: three to seven, as far apart as 1, 2 or 5 times a power of ten.
export function roundMarks(low, high) {
  const span = high - low || Math.abs(high) || 1, unit = 10 ** Math.floor(Math.log10(span / 3));
  const step = unit * [1, 2, 5, 10].find((n) => span / (n * unit) <= 5);
  const first = Math.floor(low / step + 1e-9), last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return range(last - first + 1).map((n) => Number(((first + n) * step).toPrecision(12)));
}
export const markText = (x) => (x && Math.abs(x) < 0.01 ? x.toExponential() : String(x)).replaceAll("-", "−");
export const count = (n) => n.toLocaleString("en");
