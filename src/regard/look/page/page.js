// The attention of a model, as a page. One module for a saved page, a notebook and a server.
// Sections: data, numbers, elements, the book (what is shown), the page (state and frame), then one section a view.
// Text of the subject reaches the document through textContent alone.

// ── Data ──────────────────────────────────────────────────────────────────────────────────────────────────────────
// One block: length of the header, header in JSON, arrays. Bytes of one place of a number stand together.

const WIDTH = { f4: 4, f2: 2, u4: 4, u1: 1 };

async function inflate(base64) {
  const text = atob(base64.trim());
  const packed = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) packed[n] = text.charCodeAt(n);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unpack(bytes) {
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  let offset = 4 + size;
  const places = header.arrays.map(([kind, ...shape]) => {
    const count = shape.reduce((a, b) => a * b, 1);
    const place = { kind, shape, count, offset };
    offset += count * WIDTH[kind];
    return place;
  });
  const made = [];
  header.array = (n) => (made[n] ??= numbers(bytes, places[n]));
  header.shape = (n) => places[n].shape;
  return header;
}

function numbers(bytes, { kind, count, offset }) {
  const width = WIDTH[kind];
  const raw = new Uint8Array(count * width);
  for (let b = 0; b < width; b++) {
    const from = offset + b * count;
    for (let n = 0; n < count; n++) raw[n * width + b] = bytes[from + n];
  }
  if (kind === "f4") return new Float32Array(raw.buffer);
  if (kind === "u4") return new Int32Array(raw.buffer);
  return kind === "u1" ? raw : Float32Array.from(new Uint16Array(raw.buffer), half);
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// ── Numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────

const range = (n) => Array.from({ length: n }, (_, i) => i);
const sum = (x) => { let s = 0; for (const v of x) s += v; return s; };
const largest = (x) => { let best = 0; for (let n = 1; n < x.length; n++) if (x[n] > x[best]) best = n; return best; };
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function dot(a, b) {
  let s = 0;
  for (let n = 0; n < a.length; n++) s += a[n] * b[n];
  return s;
}

// softmax of scores, −∞ where nothing may be seen; a row that sees nothing stays 0.
function softmax(scores) {
  const m = Math.max(...scores);
  if (m === -Infinity) return scores.map(() => 0);
  const e = scores.map((s) => Math.exp(s - m)), l = sum(e);
  return e.map((x) => x / l);
}

const entropy = (w) => sum(w.map((x) => (x > 0 ? -x * Math.log(x) : 0)));

// How alike are a query and a key; each is one of regard's scores with its defaults, times the slider.
const SIMILARITIES = {
  scaled: { name: "scaled dot", formula: "q·k / √d", of: (q, k) => dot(q, k) / Math.sqrt(q.length) },
  dot: { name: "dot", formula: "q·k", of: dot },
  cosine: { name: "cosine", formula: "q·k / |q||k|", of: (q, k) => dot(q, k) / (Math.sqrt(dot(q, q) * dot(k, k))
    || 1) },
  gaussian: { name: "Gaussian", formula: "−|q − k|² / 2", of: (q, k) => { let s = 0; for (let n = 0; n < q.length;
    n++) s -= (q[n] - k[n]) ** 2; return s / 2; } },
  additive: { name: "additive", formula: "Σ tanh(q + k)", of: (q, k) => { let s = 0; for (let n = 0; n < q.length;
    n++) s += Math.tanh(q[n] + k[n]); return s; } },
};

// Attention written out, for a few hundred words: every row of scores and weights, and the outputs.
function attention(q, k, v, { similarity, factor, visible }) {
  const like = SIMILARITIES[similarity].of;
  const s = q.map((a, i) => k.map((b, j) => (visible(i, j) ? factor * like(a, b) : -Infinity)));
  const w = s.map(softmax);
  const y = v && w.map((row) => mix(row, v));
  return { s, w, y };
}

function mix(row, v) {
  const y = new Array(v[0].length).fill(0);
  row.forEach((w, j) => { for (let e = 0; e < y.length; e++) y[e] += w * v[j][e]; });
  return y;
}

// Numbers as text: a real minus sign, always so many digits.
function fixed(x, digits = 3) {
  if (x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return "–";
  const text = Math.abs(x) >= 1e5 ? Math.abs(x).toExponential(2) : Math.abs(x).toFixed(digits);
  return (x < 0 && Number(text) !== 0 ? "−" : "") + text;
}

const weightText = (w) => (w > 0 && w < 5e-4 ? w.toExponential(1) : fixed(w, 3));
// In a picture no number is longer than its neighbours.
const brief = (w) => (w > 0 && w < 5e-4 ? "<0.001" : fixed(w, 3));
const near = (x) => fixed(x, Math.abs(x) >= 10 ? 0 : 2);
const count = (n) => n.toLocaleString("en");

// ── Elements ──────────────────────────────────────────────────────────────────────────────────────────────────────

function make(node, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (key === "text") node.textContent = value;
    else if (key === "value" || key === "checked") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, props, ...children) => make(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => make(document.createElementNS("http://www.w3.org/2000/svg", tag), props,
  children);
// A word in its own direction, whatever stands around it.
const word = (text) => el("bdi", { class: "token", text: text.length > 60 ? text.slice(0, 59) + "…" : text,
  title: text.length > 24 ? text : undefined });

function choice(label, key, options, value, onchange) {
  const menu = el("select", { "data-key": key, onchange: (e) => onchange(e.target.value) },
    options.map(([id, text]) => el("option", { value: id, text })));
  menu.value = value;
  return el("label", { class: "field" }, el("span", { text: label }), menu);
}

function tick(label, key, on, onchange) {
  return el("label", { class: "tick" }, el("input", { type: "checkbox", "data-key": key, checked: on,
    onchange: (e) => onchange(e.target.checked) }), el("span", {}, label));
}

// The table behind a picture; written when it is opened.
function behind(caption, write) {
  const box = el("div", { class: "scroll" });
  const fold = el("details",
    { class: "behind", ontoggle: () => { if (fold.open) box.replaceChildren(table(caption, ...write())); } },
    el("summary", { text: "The same as a table" }), box);
  return fold;
}

function table(caption, head, rows) {
  const cell = (x) => (x instanceof Node ? x : document.createTextNode(typeof x === "number" ? weightText(x) : x));
  return el("table", {}, el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, head.map((x) => el("th", { scope: "col" }, cell(x))))),
    el("tbody", {}, rows.map((row) => el("tr", {},
      row.map((x, n) => (n ? el("td", {}, cell(x)) : el("th", { scope: "row" }, cell(x))))))));
}

// A bar of a share of the width with its number, and several under one another.
const lane = (colour, share, text, props) => el("span",
  { class: "lane", style: { "--colour": colour, "--w": `${100 * share}%` } },
  el("i"), el("b", { ...props, text }));
const lanes = (all) => el("span", { class: "lanes" }, all);

// Colours of the theme, read from the style sheet: one hue for weights, two for signed numbers.
function palette(root) {
  const read = (name) => getComputedStyle(root).getPropertyValue(name).trim().split(/\s+/).map(Number);
  const stops = range(5).map((n) => read(`--tint-${n}`));
  const [minus, plus] = [read("--minus"), read("--plus")];
  const blend = (a, b, t) => a.map((x, c) => Math.round(x + (b[c] - x) * t));
  const tint = (x) => {
    const at = clamp(Number.isFinite(x) ? x : 0, 0, 1) * 4, n = Math.min(3, Math.floor(at));
    return blend(stops[n], stops[n + 1], at - n);
  };
  const signed = (x) => blend(stops[0], x < 0 ? minus : plus, Math.min(1, Math.abs(x)));
  return { tint, signed, css: ([r, g, b]) => `rgb(${r} ${g} ${b})`,
    ink: ([r, g, b]) => (r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#101418" : "#fbfcfd") };
}

// Small weights must be seen beside large ones: colour goes with a root of the weight.
const shade = (w, most) => (most > 0 ? (w / most) ** 0.6 : 0);

// A heat map of rows × cols numbers, one pixel each; the style sheet makes the pixels large.
function heat(rows, cols, colour) {
  const canvas = el("canvas", { class: "heat", width: cols, height: rows, "aria-hidden": "true" });
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(Math.max(1, cols), Math.max(1, rows));
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) image.data.set([...colour(r, c), 255],
    4 * (r * cols + c));
  ctx.putImageData(image, 0, 0);
  return canvas;
}

// A vector as a strip of signed cells.
function strip(vector, most, paint, label) {
  const canvas = heat(1, vector.length, (_, c) => paint.signed(most ? vector[c] / most : 0));
  return el("span", { class: "strip", role: "img", "aria-label": label }, canvas);
}

// ── The book: sequences, stacks of layers, heads ──────────────────────────────────────────────────────────────────

function openBook(header) {
  const sequences = header.sequences.map((s) => ({
    ...s, special: new Set(s.special), label: (n) => (s.shown ? s.shown[n] : String(n)),
    rtl: s.shown ? rightToLeft(s.shown, s.special) : false,
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

const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;

// The direction of a text is that of its first strong letter.
function rightToLeft(tokens, special) {
  const skip = new Set(special);
  for (let n = 0; n < Math.min(tokens.length, 400); n++) {
    const strong = skip.has(n) ? null : tokens[n].match(/\p{L}/u);
    if (strong) return RIGHT_TO_LEFT.test(strong[0]);
  }
  return false;
}

class Head {
  constructor(header, layer, place, head, n, stack, id) {
    Object.assign(this, { header, layer, place, head, n, stack, id, i: stack.rows.length, j: stack.cols.length,
      sheets: new Map() });
    this.name = layer.name ? `layer ${layer.index}, head ${head}` : layer.heads > 1 ? `head ${head}` : "these weights";
    this.brief = layer.name ? `${layer.index}·${head}` : `${head}`;
  }
  // This head's part of one of its layer's arrays, (heads, a, b); heads may share values and keys.
  part(name) {
    const { held, walked, per_value: v, per_key: k, [name]: ref } = this.layer;
    const n = (name === "w" ? held : walked).indexOf(this.head);
    if (ref === undefined || n < 0) return null;
    const [many, a, b] = this.header.shape(ref), sharing = { v, k }[name] ?? 1;
    const at = many === 1 ? 0 : sharing > 1 ? Math.floor(this.head / sharing) : n;
    return this.header.array(ref).subarray(at * a * b, (at + 1) * a * b);
  }
  vectors(name) {
    const flat = this.part(name);
    if (!flat) return null;
    const size = this.header.shape(this.layer[name]).at(-1), length = flat.length / size;
    return range(length).map((n) => flat.subarray(n * size, (n + 1) * size));
  }
  get w() { return (this._w ??= this.part("w")); }
  at(i, j) { return this.w[i * this.j + j]; }
  row(i) { return this.w.subarray(i * this.j, (i + 1) * this.j); }
  visible(i, j) { const seen = this.part("visible"); return !seen || seen[i * this.j + j] > 0; }

  // The weights of words: what a word is given is the sum over its tokens, how it looks the mean over them.
  // Hidden tokens leave their share to the others, so that a row keeps its sum.
  sheet(options) {
    const key = `${options.hide}${options.merge}`;
    if (!this.sheets.has(key)) {
      const [rows, cols] = [reading(this.stack.rows, options), reading(this.stack.cols, options)];
      this.sheets.set(key, new Sheet(rows, cols, rows.groups.map((group) => this.readRow(group, cols)), this.stack.same));
    }
    return this.sheets.get(key);
  }
  readRow([from, to], cols) {
    const mean = (a, b) => {
      let total = 0;
      for (let i = from; i < to; i++) for (let j = a; j < b; j++) total += this.at(i, j);
      return total / (to - from);
    };
    const row = Float64Array.from(cols.groups, ([a, b]) => mean(a, b));
    const kept = sum(row), hidden = sum(cols.hidden.map((j) => mean(j, j + 1)));
    return hidden && kept ? row.map((x) => (x * (kept + hidden)) / kept) : row;
  }
}

// The weights of one head as they are read, and how much of them is habit.
class Sheet {
  constructor(rows, cols, w, same) {
    Object.assign(this, { rows, cols, w, same, most: Math.max(...w.map((row) => row[largest(row)])), found: [] });
  }
  // Sums and counts of what every word is given, and of what is given at every distance.
  get habits() {
    if (this._habits) return this._habits;
    const { w } = this, [m, n] = [w.length, this.cols.labels.length], zeros = (size) => new Float64Array(size);
    const to = zeros(n), seen = zeros(n), far = zeros(m + n), met = zeros(m + n);
    w.forEach((row, i) => row.forEach((x, j) => {
      if (!(x > 0)) return;
      to[j] += x; seen[j]++; far[j - i + m] += x; met[j - i + m]++;
    }));
    return (this._habits = { to, seen, far, met });
  }
  // The word that a row is tied to beyond habit: more than it gives that word, or that distance, anyway.
  // Special tokens, and a word itself, count only where there is nothing else.
  best(i) {
    if (this.found[i]) return this.found[i];
    const { to, seen, far, met } = this.habits, m = this.w.length, one = { key: 0, beyond: -Infinity };
    this.w[i].forEach((x, j) => {
      const own = x > 0 ? 1 : 0, others = (total, count) => (total - x) / Math.max(1, count - own), d = j - i + m;
      const habit = Math.max(others(to[j], seen[j]), this.same ? others(far[d], met[d]) : -Infinity);
      const barred = (this.cols.special[j] ? 2 : 0) + (this.same && i === j ? 2 : 0);
      if (x - habit - barred > one.beyond) Object.assign(one, { key: j, beyond: x - habit - barred });
    });
    return (this.found[i] = one);
  }
}

function reading(sequence, { hide, merge }) {
  const { length, label, special, words } = sequence;
  const all = merge && words ? words : range(length).map((n) => [n, n + 1, label(n)]);
  const gone = (n) => hide && special.has(n) && special.size < length;
  const groups = all.filter(([a]) => !gone(a));
  const at = new Array(length).fill(-1);
  groups.forEach(([a, b], n) => { for (let t = a; t < b; t++) at[t] = n; });
  return { groups, at, labels: groups.map((g) => g[2]), hidden: range(length).filter(gone),
    special: groups.map(([a]) => special.has(a)), rtl: sequence.rtl };
}

// The heads for a word, the most telling first; two to begin with that look at different words.
function ranked({ stack, state }) {
  const heads = stack.heads.filter((head) => state.layer === null || head.place === state.layer);
  return stack.long ? heads : [...heads].sort((a, b) => bestOf(b, state).beyond - bestOf(a, state).beyond
    || a.id - b.id);
}
function bestOf(head, state) {
  const sheet = head.sheet(state);
  return sheet.best(Math.max(0, sheet.rows.at[state.word]));
}
function firstTwo(heads, state) {
  if (heads.length < 2 || heads[0].stack.long) return heads.slice(0, 1);
  const first = heads[0], other = heads.find((head) => bestOf(head, state).key !== bestOf(first, state).key);
  return [first, other ?? heads[1]];
}

// ── The page: state, frame, tabs ──────────────────────────────────────────────────────────────────────────────────

class Page {
  constructor(root, header) {
    this.root = root;
    this.book = header.kind === "attention" ? openBook(header) : null;
    this.header = header;
    const start = header.start;
    this.state = {
      view: null, stack: start?.stack ?? 0, word: start?.word ?? 0, hover: null, hide: start?.hide ?? false,
        merge: start?.merge ?? false, theme: "auto",
      chosen: start?.asked.length ? start.asked.map(([place, h]) => this.book.heads.findIndex((x) => x.place === place
        && x.head === h)) : null,
      layer: start?.asked.length ? null : start?.layer ?? null, cell: null,
    };
    this.views = Object.entries(VIEWS).filter(([, view]) => view.when?.(this) ?? this.book?.stacks.some(view.stack));
    this.state.view = this.views.find(([, view]) => !this.book || (view.stack?.(this.stack) ?? true))[0];
    this.frame();
    this.open(this.state.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => { const width = root.clientWidth; if (width !== this.width) { this.width = width;
      this.refresh?.(true); } }).observe(root);
  }
  get stack() { return this.book.stacks[this.state.stack]; }
  get paint() { return palette(this.root); }
  get row() { return this.state.hover ?? this.state.word; }
  // The heads that are shown: those chosen, else those that matter for the word.
  get heads() {
    const { chosen } = this.state;
    return chosen ? chosen.map((id) => this.book.heads[id]) : firstTwo(ranked(this), this.state);
  }
  get head() { return this.heads[0] ?? this.stack.heads[0]; }
  colour(n) { return `var(--h${n % 4})`; }
  set(changes) {
    if (Object.entries(changes).every(([key, value]) => this.state[key] === value)) return;
    Object.assign(this.state, changes);
    const key = document.activeElement?.getAttribute("data-key");
    const redraw = ["stack", "hide", "merge", "theme"].some((name) => name in changes);
    if (redraw) this.draw(); else this.refresh?.();
    const again = key && this.root.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
  }
  // Another stack: the word and the heads start anew there.
  setStack(n) {
    const stack = this.book.stacks[n];
    const i = stack.rows === this.stack.rows ? this.state.word : telling(stack);
    this.set({ stack: n, word: i, hover: null, chosen: null, layer: null });
  }
  choose(head, view) {
    this.state.chosen = [head.id];
    if (head.stack.n !== this.state.stack) Object.assign(this.state,
      { stack: head.stack.n, word: telling(head.stack) });
    this.open(view);
  }
  frame() {
    const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (e) => this.tabKey(e) },
      this.views.map(([id, view]) => el("button", { role: "tab", id: `tab-${id}`, "data-key": `tab-${id}`,
        "aria-controls": "view", text: view.name, onclick: () => this.open(id) })));
    this.main = el("main", { id: "view", role: "tabpanel", tabindex: "-1" });
    this.root.className = "regard";
    this.root.replaceChildren(
      el("header", { class: "top" }, el("p", { class: "mark", text: "regard" }),
        el("h1", {}, el("bdi", { text: this.header.title })),
        el("button", { class: "quiet theme", "data-key": "theme", "aria-label": "Change between light and dark",
          title: "light / dark", onclick: () => this.turn() }, "◐")),
      ...(this.views.length > 1 ? [tabs] : []), this.main, this.foot());
  }
  foot() {
    const { notes, refused } = this.header;
    return el("footer", {}, notes.map((note) => el("p", { text: note })),
      refused.length ? el("details", {},
        el("summary", { text: `${refused.length} ${refused.length > 1 ? "modules were" : "module was"} not heard` }),
        el("ul", {}, refused.map(([name, why]) => el("li", {}, el("b", { text: name }), `: ${why}`)))) : null);
  }
  turn() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = this.state.theme === "auto" ? (dark ? "dark" : "light") : this.state.theme;
    const theme = now === "dark" ? "light" : "dark";
    this.root.ownerDocument.documentElement.setAttribute("data-theme", theme);
    this.set({ theme });
  }
  tabKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -99, End: 99 }[event.key];
    if (!step) return;
    event.preventDefault();
    const names = this.views.map(([id]) => id), at = names.indexOf(this.state.view);
    const to = Math.abs(step) === 99 ? (step < 0 ? 0 : names.length - 1) : (at + step + names.length) % names.length;
    this.open(names[to]);
    this.root.querySelector(`#tab-${names[to]}`).focus();
  }
  open(id) {
    this.state.view = id;
    const view = VIEWS[id];
    if (view.stack && !view.stack(this.stack)) {
      const n = this.book.stacks.findIndex(view.stack);
      Object.assign(this.state, { stack: n, word: telling(this.book.stacks[n]), chosen: null, hover: null,
        layer: null });
    }
    for (const [name] of this.views) {
      const tab = this.root.querySelector(`#tab-${name}`);
      tab?.setAttribute("aria-selected", String(name === id));
      tab?.setAttribute("tabindex", name === id ? "0" : "-1");
    }
    this.main.setAttribute("aria-labelledby", `tab-${id}`);
    this.draw();
  }
  draw() {
    const view = VIEWS[this.state.view];
    const box = el("section", { class: `view ${this.state.view}` });
    this.main.replaceChildren(el("p", { class: "look", text: view.look }), box);
    this.refresh = view.build(this, box) ?? null;
    this.refresh?.();
  }
}

// The row of a stack that some head ties most clearly.
function telling(stack) {
  if (stack.long) return 0;
  const rows = range(stack.rows.length).filter((i) => !stack.rows.special.has(i));
  const strength = rows.map((i) =>
    Math.max(...stack.heads.map((head) => head.sheet({ hide: false, merge: false }).best(i).beyond)));
  return rows[largest(strength)] ?? 0;
}

// Controls that several views share.

function readingControls(page) {
  const { rows, cols } = page.stack;
  const special = rows.special.size + cols.special.size > 0, merged = rows.words || cols.words;
  return [
    stackChoice(page),
    special ? tick("hide special tokens", "hide", page.state.hide, (hide) => page.set({ hide })) : null,
    merged ? tick("merge pieces to words", "merge", page.state.merge, (merge) => page.set({ merge })) : null,
    page.state.hide && special
      ? el("span", { class: "warn", text: "renormalised: the hidden tokens’ share is spread over the rest" }) : null,
  ];
}

function stackChoice(page) {
  const fits = page.book.stacks.filter((s) => VIEWS[page.state.view].stack?.(s) ?? true);
  if (fits.length < 2) return null;
  const name = (s) => {
    const names = s.heads.map((head) => head.layer.name);
    const first = (names[0] ?? "").split(".")[0] || "layers";
    const [rows, cols] = [count(s.rows.length), count(s.cols.length)];
    return `${first}: ${s.same ? `among ${rows} words` : `from ${rows} words to ${cols}`}`;
  };
  return choice("sentence", "stack", fits.map((s) => [s.n, name(s)]), page.state.stack,
    (n) => page.setStack(Number(n)));
}

function headChoice(page) {
  const heads = page.stack.heads;
  if (heads.length < 2) return null;
  return choice("head", "head", heads.map((head) => [head.id, head.name]), page.head.id,
    (id) => page.set({ chosen: [Number(id)] }));
}

function wordChoice(page) {
  const { rows } = page.stack;
  return choice("word", "word", range(rows.length).map((n) => [n, repeated(rows, n)]), page.state.word,
    (n) => page.set({ word: Number(n), hover: null }));
}

// A word that occurs twice is told apart by a number.
function repeated(rows, n) {
  const name = rows.label(n), places = rows.shown ? range(rows.length).filter((m) => rows.shown[m] === name) : [n];
  const short = name.length > 30 ? name.slice(0, 29) + "…" : name;
  return places.length > 1 ? `${short} (${places.indexOf(n) + 1} of ${places.length})` : short;
}

// ── Spotlight: one sentence, or two, and the lines from one word ──────────────────────────────────────────────────

const HOW = "Layer·head, the word it is tied to, and the weight; ordered by what exceeds the head’s habit, "
  + "the weight it gives that word or that distance anyway.";

function spotlight(page, box) {
  const { rows, cols } = page.head.sheet(page.state), { same } = page.stack, many = page.stack.heads.length > 1;
  const hero = el("div", { class: "hero", "aria-live": "polite" });
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const asking = sentence(page, rows, true), asked = same ? asking : sentence(page, cols, false);
  const side = (text) => el("p", { class: "side", text });
  const stage = el("div", { class: `stage ${same ? "one" : "two"}` }, lines,
    same ? asking : [side("these words look"), asking, asked, side("at these")]);
  const told = el("h2", {}), list = el("div", { class: "bars" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Heads" });
  box.append(hero, stage, el("div", { class: "controls" }, readingControls(page)), told,
    ...(many ? [el("p", { class: "hint", text: HOW }), chips] : []), list,
    behind("Weights of the lit word", () => spotlightTable(page)));
  return () => {
    const place = (i) => Math.max(0, rows.at[i]), i = place(page.row);
    const sheets = page.heads.map((head) => head.sheet(page.state));
    headline(page, hero, sheets, i);
    light(page, asking, asked, sheets, i);
    draw(lines, stage, asking, asked, sheets, i);
    const [before, after] = many ? ["Heads that say most about ", ""] : ["Where ", " looks"];
    told.replaceChildren(before, word(rows.labels[place(page.state.word)] ?? ""), after);
    chips.replaceChildren(...headChips(page, ranked(page)));
    list.replaceChildren(bars(page, sheets, i));
  };
}

// The words of a sentence; in one that asks, a word can be lit.
function sentence(page, read, asks) {
  const props = (start, n) => ({
    class: `word${read.special[n] ? " special" : ""}`, "data-n": n, role: asks ? "option" : "listitem",
    ...(asks && {
      "data-key": `word-${start}`, onkeydown: (event) => wordKey(event, page, read),
      onmouseenter: () => page.set({ hover: start }), onmouseleave: () => page.set({ hover: null }),
      onclick: () => page.set({ word: start, hover: null }),
    }),
  });
  const words = read.groups.map(([start, , label], n) =>
    el("span", props(start, n), el("span", { class: "num up" }), word(label), el("span", { class: "num down" })));
  return el("div", {
    class: `sentence${words.length > 40 ? " many" : ""}`, role: asks ? "listbox" : "list", dir: read.rtl ? "rtl"
      : "ltr",
    "aria-label": asks ? "Words; the arrow keys move the light" : "Words that are looked at",
  }, words);
}

function wordKey(event, page, read) {
  const forward = read.rtl ? "ArrowLeft" : "ArrowRight", back = read.rtl ? "ArrowRight" : "ArrowLeft";
  const at = read.at[page.state.word], last = read.groups.length - 1;
  const to = { [forward]: at + 1, [back]: at - 1, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, Enter: at,
    " ": at }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const [start] = read.groups[clamp(to, 0, last)];
  page.set({ word: start, hover: null });
  page.root.querySelector(`[data-key="word-${start}"]`)?.focus();
}

// What the lit word is tied to in every head that is on; and where most of its weight goes, if that is elsewhere.
function headline(page, hero, sheets, i) {
  hero.replaceChildren(...sheets.map((sheet, n) => {
    const { rows, cols, w } = sheet, { key } = sheet.best(i), most = largest(w[i]);
    const who = page.book.total > 1 ? [page.heads[n].name] : [];
    const rest = most === key ? [] : [who.length ? "; " : "", "most goes to ", word(cols.labels[most]),
      ` ${fixed(w[i][most], 2)}`];
    return el("p", { style: { "--colour": page.colour(n) } }, el("i", { class: "dot" }),
      el("span", {}, word(rows.labels[i]), el("span", { class: "arrow", text: " → " }), word(cols.labels[key])), " ",
      el("b", { class: "weight", text: fixed(w[i][key], 2) }), " ", el("span", { class: "who" }, who, rest));
  }));
  if (!sheets.length) hero.append(el("p", { class: "who", text: "No head is on. Choose one below." }));
}

// Shade every word by its weights, a band a head, and write the larger numbers: the first head above, the second below.
function light(page, asking, asked, sheets, i) {
  [...asking.children].forEach((node, n) => {
    node.classList.toggle("lit", n === i);
    node.setAttribute("aria-selected", String(n === i));
    node.setAttribute("tabindex", n === i ? "0" : "-1");
  });
  [...asked.children].forEach((node, n) => {
    const weights = sheets.map(({ w }) => w[i]?.[n] ?? 0), part = 100 / weights.length;
    const band = (w, h) => `color-mix(in srgb, ${page.colour(h)} ${w < 0.02 ? 0 : Math.round(70 * w ** 0.7)}%, transparent) `
      + `${part * h}% ${part * (h + 1)}%`;
    const ground = weights.length ? `linear-gradient(${weights.map(band).join(", ")})` : "none";
    node.querySelector(".token").style.setProperty("background", ground);
    [".up", ".down"].forEach((side, h) => {
      const number = node.querySelector(side);
      number.textContent = weights[h] >= 0.045 ? fixed(weights[h], 2) : "";
      number.style.setProperty("color", page.colour(h));
    });
  });
}

// Lines from the lit word; the heads take turns above and below the sentence.
function draw(lines, stage, asking, asked, sheets, i) {
  const frame = stage.getBoundingClientRect(), begin = asking.children[i]?.getBoundingClientRect(),
    same = asking === asked;
  lines.replaceChildren();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  if (!begin) return;
  sheets.forEach(({ w }, h) => w[i].forEach((weight, j) => {
    if (weight < 0.02 || (same && j === i)) return;
    const end = asked.children[j].getBoundingClientRect();
    const d = same ? arc(begin, end, frame, h % 2 === 0) : link(begin, end, frame, h);
    const style = { stroke: `var(--h${h % 4})` };
    lines.append(svg("path", { d, "stroke-width": 0.75 + 8 * weight, opacity: 0.2 + 0.7 * weight, style }));
  }));
}

function arc(a, b, frame, above) {
  const x = (r) => r.left + r.width / 2 - frame.left, y = (r) => (above ? r.top : r.bottom) - frame.top;
  const [x1, y1, x2, y2] = [x(a), y(a), x(b), y(b)];
  const lift = (above ? -1 : 1) * clamp(16 + 0.22 * Math.abs(x1 - x2), 20, frame.width < 600 ? 34 : 86);
  return `M${x1} ${y1}C${x1} ${y1 + lift} ${x2} ${y2 + lift} ${x2} ${y2}`;
}

function link(a, b, frame, h) {
  const x = (r) => r.left + r.width / 2 - frame.left + (h - 0.5) * 5;
  const y1 = a.bottom - frame.top, y2 = b.top - frame.top, middle = (y1 + y2) / 2;
  return `M${x(a)} ${y1}C${x(a)} ${middle} ${x(b)} ${middle} ${x(b)} ${y2}`;
}

const CHIPS = 8;
function headChips(page, heads) {
  const on = page.heads.map((head) => head.id);
  const open = page.state.all, some = open ? heads : heads.slice(0, CHIPS);
  const extra = open ? [] : page.heads.filter((head) => !some.includes(head));
  const chips = [...some, ...extra].map((head) => {
    const { rows, cols, w } = head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]),
      j = bestOf(head, page.state).key, n = on.indexOf(head.id);
    return el("button", {
      class: "chip", "data-key": `chip-${head.id}`, "aria-pressed": String(n >= 0),
        title: `${head.name}${head.layer.name ? ` (${head.layer.name})` : ""}`,
      style: n >= 0 ? { "--colour": page.colour(n) } : {}, onclick: () => toggle(page, head.id),
    }, el("span", { class: "brief", text: head.brief }), word(cols.labels[j]), el("b", { text: fixed(w[i][j], 2) }));
  });
  if (heads.length > CHIPS) chips.push(el("button", { class: "chip quiet", "data-key": "chip-all", text: open ? "fewer"
    : `all ${heads.length}`, onclick: () => page.set({ all: !open }) }));
  if (page.state.chosen) chips.push(el("button", { class: "chip quiet", "data-key": "chip-auto", text: "best two again",
    onclick: () => page.set({ chosen: null, layer: null }) }));
  return chips;
}

// At most four heads, so that colours stay apart.
function toggle(page, id) {
  const on = page.heads.map((head) => head.id);
  page.set({ chosen: on.includes(id) ? on.filter((x) => x !== id) : [...on, id].slice(-4) });
}

function bars(page, sheets, i) {
  if (!sheets.length) return el("span");
  const { cols } = sheets[0], most = (j) => Math.max(...sheets.map(({ w }) => w[i][j]));
  const order = range(cols.labels.length).sort((a, b) => most(b) - most(a)).slice(0, 6);
  const line = (j) => el("li", {}, word(cols.labels[j]),
    lanes(sheets.map(({ w }, h) => lane(page.colour(h), w[i][j], brief(w[i][j])))));
  return el("ol", { class: "best", "aria-label": "Words with the largest weights" }, order.map(line));
}

function spotlightTable(page) {
  const sheets = page.heads.map((head) => head.sheet(page.state));
  const { rows, cols } = sheets[0] ?? page.head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]);
  return [["word", ...page.heads.map((head) => head.name)],
    cols.labels.map((label, j) => [word(label), ...sheets.map(({ w }) => w[i][j])])];
}

// ── Walk: the six steps for one word ──────────────────────────────────────────────────────────────────────────────

function walk(page, box) {
  const embedded = page.header.embedded?.stack === page.state.stack ? page.header.embedded : null;
  const own = (page.walk ??= { source: "words", q: false, k: false, v: false, cell: null });
  if (!embedded) own.source = "head";
  const bar = el("div", { class: "controls" });
  const told = el("p", { class: "told" });
  const grid = el("div", { class: "scroll" });
  const cells = el("div", { class: "cells", "aria-live": "polite" });
  box.append(bar, told, grid, cells);
  const again = (change) => { Object.assign(own, change); page.refresh(); };
  return () => {
    const i = page.state.word;
    const steps = own.source === "head" ? stepsOfHead(page.head, i) : stepsOfWords(page, embedded, own, i);
    bar.replaceChildren(...walkControls(page, own, embedded, again));
    told.textContent = steps.told;
    grid.replaceChildren(stepTable(page, steps, i, own.cell, (j) => again({ cell: own.cell === j ? null : j })));
    cells.replaceChildren(...dotProduct(page, steps, i, own.cell));
  };
}

function walkControls(page, own, embedded, again) {
  const source = (id, text) => el("button", {
    class: "chip", "data-key": `walk-${id}`, "aria-pressed": String(own.source === id), text,
    onclick: () => again({ source: id, cell: null }),
  });
  const project = (x) => tick(["W", el("sub", { text: x })], `walk-W${x}`, own[x],
    (on) => again({ [x]: on, cell: null }));
  const both = [source("words", "word vectors"), source("head", "a recorded head")];
  return [
    stackChoice(page),
    wordChoice(page),
    embedded && el("span", { class: "group", role: "group", "aria-label": "What is walked through" }, both),
    ...(own.source === "words" ? ["q", "k", "v"].map(project) : [headChoice(page)]),
  ].filter(Boolean);
}

// The steps of basic self-attention on word vectors, W_q, W_k and W_v switched on one at a time.
// All products are in the page, but only the first coordinates of the vectors.
function stepsOfWords(page, embedded, own, i) {
  const { header } = page, t = page.stack.rows.length, few = header.shape(embedded.x)[1], { size } = embedded;
  const vectors = (name) => {
    const flat = header.array(embedded[own[name] ? name : "x"]);
    return range(t).map((n) => flat.subarray(n * few, (n + 1) * few));
  };
  const at = ((own.q ? 1 : 0) + (own.k ? 2 : 0)) * t * t + i * t;
  const raw = Array.from(header.array(embedded.dots).subarray(at, at + t));
  const scale = own.q || own.k ? 1 / Math.sqrt(size) : 1;
  const s = raw.map((x) => x * scale), w = softmax(s), v = vectors("v");
  return {
    told: toldOfWords(own), what: "q·k", scaleText: scale === 1 ? "by nothing" : `÷ √${size}`, size, values: size,
    q: vectors("q")[i], k: vectors("k"), v, raw, s, masked: s, hidden: false, w, y: mix(w, v),
  };
}

function toldOfWords(own) {
  const name = (x) => (own[x] ? `${x} = x·W${x}` : `${x} = x`);
  if (!own.q && !own.k && !own.v) {
    return "Basic self-attention on the model’s own word vectors, before positions: no parameters, q = k = v = x. "
      + "A word is most like itself; switch the projections on and see that change.";
  }
  return "The model’s own word vectors, before positions, through its first layer’s projections: "
    + `${["q", "k", "v"].map(name).join(", ")}, all heads joined as one.`;
}

function stepsOfHead(head, i) {
  const { layer } = head, w = Array.from(head.row(i)), keys = range(head.j);
  const q = head.vectors("q")?.[i], k = head.vectors("k"), v = head.vectors("v"), given = head.part("s");
  const raw = q ? keys.map((j) => dot(q, k[j])) : null;
  const s = given ? keys.map((j) => given[i * head.j + j]) : raw?.map((x) => x * layer.scale);
  const masked = s?.map((x, j) => (head.visible(i, j) ? x : -Infinity));
  return {
    told: toldOfHead(head, s, v), what: "q·k", scaleText: layer.score_name ?? scaling(layer),
    size: layer.d, values: v?.[0].length, mask: layer.mask_name, sink: layer.sink,
    q, k, v, raw, s, masked, hidden: masked?.includes(-Infinity), w, y: v && mix(w, v),
  };
}

function toldOfHead({ layer, name }, scores, values) {
  const said = [];
  if (!scores && layer.score === "Given") said.push("These weights came ready-made: only the last three of six steps are known.");
  else if (!scores) said.push("Of this head the page holds the weights alone.");
  if (!values) said.push("Without values the walk ends at the weights.");
  if (scores && values) said.push(`${layer.name ? `The recorded ${name}` : "One row of these weights"}, number by number.`);
  return said.join(" ");
}

function scaling({ scale, d }) {
  if (scale === 1 || scale === undefined) return "by nothing";
  return Math.abs(scale * Math.sqrt(d) - 1) < 1e-6 ? `÷ √${d}` : `× ${fixed(scale, 4)}`;
}

function stepTable(page, steps, i, picked, onpick) {
  const { rows, cols, same } = page.stack, t = cols.length;
  const words = range(t).map((j) => el("th", { scope: "col", class: same && i === j ? "self" : "" },
    word(cols.label(j))));
  const lines = [...stepsToWeights(page, steps, t, picked, onpick), ...(steps.v ? stepsToOutput(page, steps, t) : [])];
  return el("table", { class: "steps" }, el("caption", { class: "hidden", text: "The six steps" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, word(rows.label(i)), " looks at"), words)),
    el("tbody", {}, lines));
}

function stepLine(n, name, shape, cells, props) {
  const title = [el("span", { class: "step", text: n }), el("span", { text: name }),
    el("span", { class: "shape", text: shape })];
  return el("tr", props, el("th", { scope: "row" }, el("div", {}, title)), cells);
}

function stepsToWeights(page, steps, t, picked, onpick) {
  const { paint } = page, numbers = (x) => x.map((v) => el("td", { text: fixed(v, 2) }));
  const product = (x, j) => el("td", {}, el("button", {
    class: "cell", "data-key": `dot-${j}`, "aria-pressed": String(picked === j), text: fixed(x, 2),
    title: "the dot product, cell by cell", onclick: () => onpick(j),
  }));
  const weight = (w, j) => {
    const colour = paint.tint(shade(w, 1));
    return el("td", { class: "w", "data-j": j, style: { background: paint.css(colour), color: paint.ink(colour) },
      text: fixed(w, 3) });
  };
  const total = sum(steps.w), lines = [];
  if (steps.raw) lines.push(stepLine("1", steps.what, `1×${steps.size} · ${steps.size}×${t}`, steps.raw.map(product)));
  if (steps.s) {
    lines.push(stepLine("2", `${steps.raw ? "scaled" : "score"} ${steps.scaleText}`, `1×${t}`, numbers(steps.s)));
    const masked = steps.hidden ? `masked by ${steps.mask}` : "mask: none";
    lines.push(stepLine("3", masked, `1×${t}`, numbers(steps.masked), { class: steps.hidden ? "" : "pale" }));
  }
  const name = steps.sink ? `softmax, with a sink that takes ${fixed(1 - total, 3)}` : "softmax";
  lines.push(stepLine("4", name, `1×${t}, sum ${fixed(total, 2)}`, steps.w.map(weight)));
  return lines;
}

function stepsToOutput(page, steps, t) {
  const { paint } = page, few = 32, size = (x) => Math.max(...Array.from(x, Math.abs));
  const most = Math.max(...steps.v.map((v, j) => steps.w[j] * size(v)));
  const weighted = (v, j) => {
    const label = `${fixed(steps.w[j], 3)} times the value of ${page.stack.cols.label(j)}`;
    return el("td", {}, strip(Array.from(v.slice(0, few), (x) => x * steps.w[j]), most, paint, label));
  };
  const have = steps.v[0].length, shown = have < steps.values ? `first ${have} of ${steps.values}` : steps.values;
  const first = steps.y.slice(0, 6).map((x) => fixed(x, 2)).join(", ");
  const output = el("td", { colspan: t, class: "y" }, strip(steps.y.slice(0, few), size(steps.y), paint, "the output"),
    el("span", { class: "vector", text: `y = [${first}${steps.values > 6 ? ", …" : ""}]  (${shown} coordinates)` }));
  return [stepLine("5", "weight × value", `${t}×${steps.values}`, steps.v.map(weighted)),
    stepLine("6", "sum: the output y", `1×${steps.values}`, output)];
}

// The coordinates of a query and a key and their products, so many a line.
const COORDINATES = 16;
function dotProduct(page, steps, i, j) {
  if (!steps.q) return [];
  if (j === null) return [el("p",
    { class: "hint", text: "Choose a number of the first row to see its dot product cell by cell." })];
  const a = Array.from(steps.q), b = Array.from(steps.k[j]), products = a.map((x, n) => x * b[n]), total = steps.raw[j];
  const line = (name, x, from) => {
    const most = Math.max(...x.map(Math.abs)) || 1;
    const cells = x.slice(from, from + COORDINATES).map((v) => {
      const colour = page.paint.signed(v / most);
      return el("td", { style: { background: page.paint.css(colour), color: page.paint.ink(colour) },
        text: fixed(v, 2) });
    });
    return el("tr", {}, el("th", { scope: "row", text: name }), cells);
  };
  const parts = range(Math.ceil(a.length / COORDINATES)).map((n) => n * COORDINATES);
  const told = a.length < steps.size
    ? `The first ${a.length} of ${steps.size} coordinates; the other products sum to ${fixed(total - sum(products), 3)}.`
    : `All ${steps.size} products sum to ${fixed(total, 3)}.`;
  return [
    el("h3", {}, "q of ", word(page.stack.rows.label(i)), " · k of ", word(page.stack.cols.label(j)),
      ` = ${fixed(total, 3)}`),
    el("div", { class: "scroll" }, el("table", { class: "products" },
      parts.map((from) => el("tbody", {}, line("q", a, from), line("k", b, from), line("q × k", products, from))))),
    el("p", { class: "hint", text: told }),
  ];
}

// ── Play: change the rules and see what the weights do ────────────────────────────────────────────────────────────

function play(page, box) {
  const t = page.stack.rows.length;
  const own = (page.play ??= { similarity: "scaled", power: 0, causal: false, window: false, width: 2,
    recorded: true });
  own.order = own.order?.length === t ? own.order : range(t);
  const picks = el("span", { class: "picks" }), scale = el("output", {}), result = el("div", { class: "plays" });
  const update = () => {
    scale.textContent = `× ${fixed(2 ** own.power, 2)}`;
    result.replaceChildren(...played(page, own));
  };
  playControls(page, box, own, picks, scale, (change) => { Object.assign(own, change); update(); });
  box.append(result);
  return () => {
    picks.replaceChildren(...[stackChoice(page), wordChoice(page), headChoice(page)].filter(Boolean));
    update();
  };
}

function playControls(page, box, own, picks, scale, again) {
  const { same, rows } = page.stack, masked = page.head.layer.visible !== undefined;
  const slider = el("input", {
    type: "range", min: -5, max: 5, step: 0.1, value: own.power, "data-key": "power", "aria-label": "scale",
    oninput: (e) => again({ power: Number(e.target.value) }),
  });
  const width = el("input", {
    type: "number", min: 0, max: rows.length, value: own.width, "data-key": "width",
      "aria-label": "words to either side",
    oninput: (e) => again({ width: Math.max(0, Number(e.target.value) || 0) }),
  });
  const similarities = Object.entries(SIMILARITIES).map(([id, s]) => [id, `${s.name}: ${s.formula}`]);
  const button = (key, text, cls, order) => el("button", { class: cls, "data-key": key, text,
    onclick: () => again({ order: order() }) });
  const places = same ? [
    tick("causal mask", "causal", own.causal, (causal) => again({ causal })),
    el("span", { class: "pair" }, tick("window of", "window", own.window, (window) => again({ window })), width),
  ] : [];
  box.append(
    el("div", { class: "controls" }, picks,
      choice("similarity", "similarity", similarities, own.similarity, (similarity) => again({ similarity }))),
    el("div", { class: "controls" }, el("label", { class: "field wide" }, el("span", { text: "scale" }), slider, scale),
      places,
      masked && tick("the recorded mask", "recorded", own.recorded, (recorded) => again({ recorded })),
      same && [button("shuffle", "shuffle the words", "chip", () => shuffled(rows.length)),
        button("unshuffle", "put them back", "chip quiet", () => range(rows.length))]));
}

// Attention by the rules that were chosen, with the words in the order they stand in.
function played(page, own) {
  const { head } = page, { same, rows } = page.stack, [q, k, v] = ["q", "k", "v"].map((name) => head.vectors(name));
  if (!q) return [el("p", { class: "hint",
    text: "Of this head the page holds the weights alone; choose another one." })];
  const visible = (i, j) => (!own.causal || j <= i) && (!own.window || Math.abs(i - j) <= own.width)
    && (!own.recorded || head.visible(i, j));
  const ordered = (vectors, order) => (vectors && order ? order.map((n) => vectors[n]) : vectors);
  const attend = (order, factor) => attention(ordered(q, order), ordered(k, same && order), ordered(v, same && order),
    { similarity: own.similarity, factor, visible });
  const factor = 2 ** own.power, now = attend(own.order, factor), place = own.order.indexOf(page.state.word);
  page.played = now;
  // Every similarity is multiplied by the factor, so a row at another scale is its scores times a number.
  const rowAt = (power) => softmax(now.s[place].map((s) => (s * 2 ** power) / factor));
  return [
    saturation(now.w[place], rowAt, own.power),
    playBars(page, now.w[place], own.order, place),
    playMap(page, now.w),
    same && v ? outputs(page, now.y, attend(range(rows.length), factor).y, own) : el("span"),
    behind("Weights as computed in this page", () => playTable(page, now.w, own.order)),
  ];
}

// Any order but the one the words stand in.
function shuffled(t) {
  const order = range(t);
  for (let n = t - 1; n > 0; n--) {
    const m = Math.floor(Math.random() * (n + 1));
    [order[n], order[m]] = [order[m], order[n]];
  }
  return t > 1 && order.every((x, n) => x === n) ? order.reverse() : order;
}

// Peak and entropy of the row at every scale, and where the slider stands.
function saturation(w, rowAt, power) {
  const most = Math.log(w.length) || 1, [width, height] = [300, 110], across = (p) => ((p + 5) / 10) * width;
  const points = range(41).map((n) => {
    const p = -5 + n / 4, row = rowAt(p);
    return [across(p), Math.max(...row), entropy(row) / most];
  });
  const [peak, h, x] = [Math.max(...w), entropy(w), across(power)];
  const curve = (n, share, colour, cls) => [
    svg("polyline", { class: cls, points: points.map((p) => `${p[0]},${height - p[n] * height}`).join(" "),
      style: { stroke: colour } }),
    svg("circle", { cx: x, cy: height - share * height, r: 4, style: { fill: colour } }),
  ];
  const number = (name, value, colour, more) => el("span", { style: { "--colour": colour } },
    el("i", { class: "dot" }), `${name} `, el("b", { "data-read": name, text: fixed(value, 3) }), more);
  const said = peak > 0.95 ? "saturated: nearly all on one word" : h > 0.95 * most ? "nearly uniform: every word alike"
    : "in between";
  const label = `peak ${fixed(peak, 3)}, entropy ${fixed(h, 3)}`;
  return el("figure", { class: "saturation" },
    el("div", { class: "pairs" }, number("peak", peak, "var(--accent)"), number("entropy", h, "var(--h0)",
      ` of ${fixed(most, 2)} nats`)),
    svg("svg", { viewBox: `-6 -8 ${width + 12} ${height + 16}`, role: "img", "aria-label": label },
      svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
      svg("line", { class: "mark", x1: x, x2: x, y1: -4, y2: height }),
      curve(1, peak, "var(--accent)", "curve"), curve(2, h / most, "var(--h0)", "curve dashed")),
    el("figcaption", { text: `small scale ← → large scale; now ${said}` }));
}

function playBars(page, w, order, place) {
  const { same, rows, cols } = page.stack, most = Math.max(...w) || 1, name = (j) => (same ? order[j] : j);
  const shown = w.length > 30 ? range(w.length).sort((a, b) => w[b] - w[a]).slice(0, 20) : range(w.length);
  const line = (j) => el("li", { class: same && j === place ? "lit" : "" }, word(cols.label(name(j))),
    lanes([lane("var(--accent)", w[j] / most, brief(w[j]), { "data-j": name(j) })]));
  return el("figure", { class: "bars" }, el("figcaption", {}, word(rows.label(order[place])), " looks at"),
    el("ol", { class: "best tight" }, shown.map(line)));
}

function playMap(page, w) {
  const { paint } = page, most = Math.max(...w.map((row) => Math.max(...row)));
  const map = heat(w.length, w[0].length, (r, c) => paint.tint(shade(w[r][c], most)));
  return el("figure", { class: "map" }, el("figcaption", { text: "all words at once" }), map);
}

// Shuffle the words and the outputs are shuffled the same way, unless a mask tells places apart.
function outputs(page, y, straight, own) {
  const few = 24, size = (row) => Math.max(...row.map(Math.abs));
  const gap = Math.max(...y.map((row, n) => size(row.map((x, e) => x - straight[own.order[n]][e]))));
  const moved = own.order.some((x, n) => x !== n), exact = gap <= 1e-5 * Math.max(...straight.map(size));
  const most = Math.max(...y.map((row) => size(row.slice(0, few))));
  const said = !moved ? "Shuffle the words: does each keep its output?"
    : exact ? "Shuffled words, outputs shuffled the same way: every word keeps its output. Attention sees a set."
      : `Now places matter: with this mask outputs change by up to ${fixed(gap, 2)}.`;
  const line = (row, n) => el("li", {}, word(page.stack.rows.label(own.order[n])), strip(row.slice(0, few), most,
    page.paint, "output"));
  return el("figure", { class: "outputs" }, el("figcaption", { text: "outputs y" }),
    el("ol", {}, y.slice(0, 60).map(line)),
    el("p", { class: "hint", "data-read": "equivariant", text: said }));
}

function playTable(page, w, order) {
  const { same, rows, cols } = page.stack, few = 60, name = (j) => cols.label(same ? order[j] : j);
  const body = w.slice(0, few).map((row, n) => [word(rows.label(order[n])), ...Array.from(row.slice(0, few))]);
  return [["", ...w[0].slice(0, few).map((_, j) => word(name(j)))], body];
}

// ── Square: the whole matrix ──────────────────────────────────────────────────────────────────────────────────────

function square(page, box) {
  const bar = el("div", { class: "controls" }), stage = el("div", { class: "matrix" });
  const told = el("p", { class: "readout", "aria-live": "polite" });
  box.append(bar, told, stage, behind("Weights", () => {
    const { rows, cols, w } = page.head.sheet(page.state);
    return [["", ...cols.labels.map(word), "sum"], w.map((row, i) => [word(rows.labels[i]), ...row, sum(row)])];
  }));
  let drawn = null;
  return (resized) => {
    const sheet = page.head.sheet(page.state);
    if (resized === true || drawn?.sheet !== sheet) {
      bar.replaceChildren(...[headChoice(page), ...readingControls(page)].filter(Boolean));
      drawn = matrix(page, stage, sheet);
    }
    const [i, j] = page.state.cell ?? [Math.max(0, sheet.rows.at[page.state.word]), null];
    drawn.mark(i, j);
    const row = sheet.w[i] ?? [], key = j ?? largest(row);
    told.replaceChildren(word(sheet.rows.labels[i] ?? ""), el("span", { class: "arrow", text: " → " }),
      word(sheet.cols.labels[key] ?? ""),
      el("b", { "data-read": "cell", text: fixed(row[key], 4) }),
        el("span", { class: "who", text: `row sum ${fixed(sum(row), 3)}` }));
  };
}

// Cells on a canvas; names, row sums and the marked row and column above it.
function matrix(page, stage, sheet) {
  const { rows, cols, w, most } = sheet, { paint } = page, [m, n] = [rows.labels.length, cols.labels.length];
  const letters = (labels) => clamp(Math.max(...labels.slice(0, 60).map((x) => x.length)), 2, 12) * 7.6 + 12;
  const [left, top, right] = [letters(rows.labels), letters(cols.labels), 78];
  const cell = clamp((stage.clientWidth - left - right) / n, 1, 40), [width, height] = [cell * n, cell * m];
  const canvas = heat(m, n, (i, j) => paint.tint(shade(w[i][j], most)));
  for (const [name, size] of Object.entries({ left, top, width, height })) canvas.style.setProperty(name, `${size}px`);
  const place = { left, top, cell, width, height };
  const [rowNames, colNames] = [names(rows.labels, place, false), names(cols.labels, place, true)];
  const [across, down] = [svg("rect", { class: "marker" }), svg("rect", { class: "marker" })];
  const over = svg("svg", {
    width: left + width + right, height: top + height + 6, tabindex: 0, "data-key": "matrix", role: "img",
    "aria-label": "The attention matrix. Arrow keys move from cell to cell.",
  }, rowNames.filter(Boolean), colNames.filter(Boolean), rowSums(w, place), across, down);
  pointAt(page, over, sheet, place);
  stage.replaceChildren(canvas, over, legend(page, most));
  const frame = (node, sizes) => { for (const [key, value] of Object.entries(sizes)) node.setAttribute(key, value); };
  const mark = (i, j) => {
    frame(across, { x: left, y: top + i * cell, width, height: cell });
    frame(down, { x: left + (j ?? 0) * cell, y: top, width: j === null ? 0 : cell, height });
    rowNames.forEach((node, r) => node && node.classList.toggle("on", r === i));
    colNames.forEach((node, c) => node && node.classList.toggle("on", c === j));
  };
  return { sheet, mark };
}

// Names beside the rows or above the columns; where cells are small, every so many.
function names(labels, { left, top, cell }, upright) {
  const step = Math.max(1, Math.ceil(11 / cell)), clip = (text) => (text.length > 12 ? text.slice(0, 11) + "…" : text);
  return labels.map((text, n) => {
    if (n % step) return null;
    const middle = (n + 0.5) * cell;
    const where = upright ? { transform: `translate(${left + middle} ${top - 8}) rotate(-90)` } : { x: left - 8,
      y: top + middle, "text-anchor": "end" };
    return svg("text", { class: "name", "dominant-baseline": "central", ...where, text: clip(text) });
  });
}

function rowSums(w, { left, top, cell, width }) {
  const x = left + width + 8, step = Math.max(1, Math.ceil(11 / cell));
  const bar = (total, i) => svg("rect", { class: "sum", x, y: top + (i + 0.2) * cell, height: Math.max(1, 0.6 * cell),
    width: 26 * Math.min(1, total || 0) });
  const number = (total, i) => svg("text", { class: "tiny", x: x + 30, y: top + (i + 0.5) * cell,
    "dominant-baseline": "central", text: fixed(total, 2) });
  return [svg("text", { class: "tiny", x, y: top - 8, text: "row sums" }),
    w.map((row, i) => (i % step ? null : svg("g", {}, bar(sum(row), i), cell > 9 && number(sum(row), i))))];
}

const ARROWS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };

// Pointer and arrow keys choose a cell; a click lights its row.
function pointAt(page, over, { rows, cols }, { left, top, cell }) {
  const [m, n] = [rows.labels.length, cols.labels.length];
  const at = (event) => {
    const box = over.getBoundingClientRect();
    const [i, j] = [Math.floor((event.clientY - box.top - top) / cell),
      Math.floor((event.clientX - box.left - left) / cell)];
    return i >= 0 && i < m && j >= 0 && j < n ? [i, j] : null;
  };
  const go = (where) => { if (String(where) !== String(page.state.cell)) page.set({ cell: where }); };
  over.addEventListener("mousemove", (event) => go(at(event)));
  over.addEventListener("mouseleave", () => go(null));
  over.addEventListener("click",
    (event) => { if (at(event)) page.set({ word: rows.groups[at(event)[0]][0], hover: null }); });
  over.addEventListener("keydown", (event) => {
    const move = ARROWS[event.key];
    if (!move) return;
    event.preventDefault();
    const [i, j] = page.state.cell ?? [Math.max(0, rows.at[page.state.word]), 0];
    go([clamp(i + move[0], 0, m - 1), clamp(j + move[1], 0, n - 1)]);
  });
}

function legend(page, most, low = 0) {
  const { paint } = page, [from, to] = low ? [weightText(low), weightText(most)] : ["0", fixed(most, 2)];
  return el("p", { class: "legend", "aria-hidden": "true" }, from, heat(1, 64, (_, c) => paint.tint(shade(c / 63, 1))),
    to);
}

// ── Overview: all layers and heads by one number, and by two ──────────────────────────────────────────────────────

const METRICS = {
  entropy: "How spread out a head looks, in nats: 0 is one word, large is everywhere.",
  mean_distance: "How far away a head looks, in words, the sink left out.",
  sink: "The share of its weight that a head puts on the word all heads give most to: attention parked, not used.",
  previous: "The mean weight on the word before.",
  induction: "The mean weight on what followed the same word earlier: a head that continues what it saw.",
};

// Every head there is, also those whose weights the page does not hold, with its numbers.
function everyHead(page) {
  const { metrics, all } = page.header;
  return all.flatMap(([index, layer, heads, place], row) => range(heads).map((head) => ({
    row, index, layer, head,
    name: layer || all.length > 1 ? `layer ${index}, head ${head}` : `head ${head}`,
    held: page.book.heads.find((one) => one.place === place && one.head === head),
    value: (by) => metrics[by][row]?.[head] ?? null,
  })));
}

function overview(page, box) {
  const have = Object.keys(METRICS).filter((by) => page.header.metrics[by].some(Boolean)), heads = everyHead(page);
  const own = (page.overview ??= { by: have[0], x: have[0], y: have[1] ?? have[0], at: null });
  const told = el("p", { class: "hint" }), grid = el("div", { class: "scroll" }), plot = el("div", { class: "plot" }),
    peek = el("div", { class: "peek" });
  const look = (one) => { own.at = one; peek.replaceChildren(...peekAt(page, one, have)); };
  const update = () => {
    told.textContent = METRICS[own.by];
    grid.replaceChildren(metricGrid(page, own, heads, look));
    plot.replaceChildren(...(have.length > 1 ? [scatter(page, own, heads, look)] : []));
    // Sharpest first for entropy, largest first otherwise, as in `Recording.heads`.
    const rank = (one) => (one.value(own.by) ?? NaN) * (own.by === "entropy" ? -1 : 1);
    look(own.at ?? heads[largest(heads.map((one) => (Number.isNaN(rank(one)) ? -Infinity : rank(one))))]);
  };
  const menu = (label, key, name) => choice(label, key, have.map((by) => [by, by]), own[name], (by) => { own[name] = by;
    update(); });
  box.append(el("div", { class: "controls" }, menu("number", "metric", "by")), told, el("div", { class: "columns" },
    grid, peek),
    have.length > 1 ? el("div", { class: "controls" }, menu("across", "axis-x", "x"), menu("up", "axis-y", "y")) : "",
      plot,
    behind("Every head", () => [["layer", "head", ...have],
      heads.map((one) => [`${one.index} ${one.layer}`, String(one.head), ...have.map((by) => one.value(by) ?? "–")])]));
  update();
}

function peekAt(page, { name, held, value }, have) {
  const number = (by) => [el("dt", { text: by }), el("dd", { text: value(by) === null ? "–" : fixed(value(by), 2) })];
  const map = held && !held.stack.long ? [heat(held.i, held.j, (i, j) => page.paint.tint(shade(held.at(i, j), 1)))]
    : [];
  const open = held ? el("button", { class: "chip", "data-key": "open-head", text: "open this head",
    onclick: () => openHead(page, held) })
    : el("p", { class: "hint", text: "This page does not hold its weights." });
  return [el("p", {}, el("b", { text: name })), el("dl", {}, have.map(number)), ...map, open];
}

const openHead = (page, head) => page.choose(head, head.stack.long ? "long" : head.stack.same ? "spotlight" : "cross");

// Where a number stands between the smallest and the largest.
function span(heads, by) {
  const numbers = heads.map((one) => one.value(by)).filter((x) => x !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return { low, high, part: (x) => (high > low ? (x - low) / (high - low) : 0.5) };
}

function metricGrid(page, own, heads, look) {
  const { all } = page.header, { paint } = page, { part } = span(heads, own.by);
  const key = (event, { row, head }) => {
    const move = ARROWS[event.key];
    if (!move) return;
    event.preventDefault();
    page.root.querySelector(`[data-key="head-${row + move[0]}-${head + move[1]}"]`)?.focus();
  };
  const reached = own.at ?? heads[0];
  const cell = (one) => {
    const x = one.value(own.by), colour = paint.tint(x === null ? 0 : 0.04 + 0.96 * part(x));
    return el("td", {}, el("button", {
      class: "headcell", "data-key": `head-${one.row}-${one.head}`, tabindex: one.name === reached.name ? 0 : -1,
      style: { background: paint.css(colour), color: paint.ink(colour) },
      "aria-label": `${one.name}: ${x === null ? "unknown" : fixed(x, 2)}`, text: x === null ? "–"
        : fixed(x, x >= 10 ? 0 : x >= 1 ? 1 : 2),
      onmouseenter: () => look(one), onfocus: () => look(one), onkeydown: (e) => key(e, one), onclick: () => one.held
        && openHead(page, one.held),
    }));
  };
  const widest = Math.max(...all.map(([, , count]) => count));
  return el("table", { class: "grid" }, el("caption", { class: "hidden", text: `${own.by} of every head` }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: all[0][1] ? "layer" : "" }),
      range(widest).map((h) => el("th", { scope: "col", text: String(h) })))),
    el("tbody", {}, all.map(([index, name], row) => el("tr", {},
      el("th", { scope: "row", title: name, text: String(index) }),
      heads.filter((one) => one.row === row).map(cell)))));
}

function scatter(page, own, heads, look) {
  const [width, height] = [520, 300], [sx, sy] = [span(heads, own.x), span(heads, own.y)], { paint } = page,
    deepest = Math.max(1, page.header.all.length - 1);
  const point = (one) => svg("circle", {
    class: "point", r: 6, cx: sx.part(one.value(own.x)) * width, cy: height - sy.part(one.value(own.y)) * height,
    style: { fill: paint.css(paint.tint(0.3 + (0.7 * one.row) / deepest)) },
    onmouseenter: () => look(one), onclick: () => one.held && openHead(page, one.held),
  }, svg("title", { text: `${one.name}: ${own.x} ${fixed(one.value(own.x), 2)}, ${own.y} ${fixed(one.value(own.y), 2)}` }));
  const text = (t, props) => svg("text", { class: "tiny", ...props, text: t });
  return el("figure", {},
    svg("svg", { class: "scatter", viewBox: `-46 -16 ${width + 66} ${height + 56}`, role: "img",
      "aria-label": `${own.y} against ${own.x}, one point a head` },
      svg("path", { class: "axis", d: `M-10 -10V${height + 10}H${width + 10}` }),
      text(near(sx.low), { x: 0, y: height + 26 }),
        text(near(sx.high), { x: width, y: height + 26, "text-anchor": "end" }),
      text(near(sy.low), { x: -14, y: height, "text-anchor": "end" }),
        text(near(sy.high), { x: -14, y: 4, "text-anchor": "end" }),
      text(own.x, { x: width / 2, y: height + 34, "text-anchor": "middle" }),
        text(own.y, { transform: `translate(-30 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }),
      heads.filter((one) => one.value(own.x) !== null && one.value(own.y) !== null).map(point)),
    el("figcaption", { text: "One point a head; the later the layer, the stronger the colour." }));
}

// ── Long inputs: a map, rows and columns in numbers, the strongest links, exact rows ──────────────────────────────
// The page holds one map; a server can answer `pool` and `row` for any part: the views ask the source alone.

class Stored {
  constructor(head) {
    const { header, layer: { long, held } } = head, n = held.indexOf(head.head), [r, c] = long.tiles;
    const part = (name, size) => header.array(long[name]).subarray(n * size, (n + 1) * size);
    Object.assign(this, { head, rows: long.rows, tiles: long.tiles, map: part("pool", r * c),
      exact: part("exact", long.rows.length * head.j) });
    Object.assign(this, { entropy: part("entropy", head.i), peak: part("peak", head.i), peakAt: part("peak_at", head.i),
      received: part("received", head.j) });
  }
  // Sums of weights in rows × cols tiles of a part of the matrix; null for a part that is not held.
  async pool(rows, cols, i, j) {
    const whole = i[0] === 0 && i[1] === this.head.i && j[0] === 0 && j[1] === this.head.j;
    return whole && rows === this.tiles[0] && cols === this.tiles[1] ? this.map : null;
  }
  // The exact weights of a row; null for a row that is not held.
  async row(i) {
    const n = this.rows.indexOf(i);
    return n < 0 ? null : this.exact.subarray(n * this.head.j, (n + 1) * this.head.j);
  }
}

function long(page, box) {
  const own = (page.long ??= { row: null });
  const bar = el("div", { class: "controls" }), told = el("p", { class: "readout", "aria-live": "polite" });
  const map = el("div", { class: "longmap" }), strips = el("div", {}), rows = el("div", {}),
    links = el("div", { class: "links" });
  box.append(bar, told, el("div", { class: "halves" }, map, strips, rows, links));
  return () => {
    const { head, stack } = page, source = (page.source = new Stored(head));
    if (!source.rows.includes(own.row)) own.row = source.rows.includes(page.state.word) ? page.state.word
      : source.rows[0];
    bar.replaceChildren(...[stackChoice(page), headChoice(page)].filter(Boolean));
    told.replaceChildren(`${count(head.i)} words look at ${count(head.j)}`);
    tileMap(page, source, map, told);
    strips.replaceChildren(
      profile("entropy of every row", source.entropy, stack.rows),
      profile("largest weight of every row", source.peak, stack.rows),
      profile("attention received by every word", source.received, stack.cols));
    exactRows(page, source, rows, own);
    links.replaceChildren(...strongest(page, source));
  };
}

const edge = (n, tiles, length) => Math.floor((n * length) / tiles);
const named = (sequence, n) => (sequence.shown ? `${n} ${sequence.label(n).slice(0, 24)}` : count(n));

async function tileMap(page, source, box, told) {
  const { head, tiles: [r, c] } = source, { paint } = page, pool = await source.pool(r, c, [0, head.i], [0, head.j]);
  const share = (a, b) => pool[a * c + b] / Math.max(1, edge(a + 1, r, head.i) - edge(a, r, head.i));
  let [low, most] = [Infinity, 0];
  for (let a = 0; a < r; a++) for (let b = 0; b < c; b++) [low, most] = [Math.min(low, share(a, b)),
    Math.max(most, share(a, b))];
  const canvas = heat(r, c, (a, b) => paint.tint(shade(share(a, b) - low, most - low)));
  const span_ = (n, tiles, length) => el("b",
    { text: `${count(edge(n, tiles, length))}–${count(edge(n + 1, tiles, length) - 1)}` });
  canvas.addEventListener("mousemove", (event) => {
    const [a, b] = tileUnder(canvas, event, r, c);
    told.replaceChildren("words ", span_(a, r, head.i), " give words ", span_(b, c, head.j), " a share of ",
      el("b", { "data-read": "tile", text: weightText(share(a, b)) }));
  });
  const caption = `${r} × ${c} tiles; down: the words that look, across: the words looked at. Colour: the share of a tile’s rows.`;
  box.replaceChildren(el("figure", { role: "img", "aria-label": `Map of the matrix in ${r} by ${c} tiles` }, canvas,
    el("figcaption", { text: caption })),
    legend(page, most, low));
}

// Which of rows × cols cells of a canvas the pointer is over.
function tileUnder(canvas, event, rows, cols) {
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
  const told = `mean ${weightText(average)}, largest ${weightText(numbers[best])}`;
  return el("figure", { class: "profile" }, el("figcaption", {}, title, el("span", { class: "who" }, ` ${told} at `,
    word(sequence.label(best)))),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${told}` },
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
  box.replaceChildren(el("h2", { text: "Exact rows" }),
    el("div", { class: "chips", role: "group", "aria-label": "Rows this page holds" }, source.rows.map(chip)),
    profile(`where ${named(rows, own.row)} looks`, row, cols), el("ol", { class: "best" }, best.map(line)));
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

function strongest(page, { peak, peakAt }) {
  const { rows, cols, same } = page.stack, weight = same ? peak.map((w, i) => (peakAt[i] === i ? 0 : w)) : peak;
  const best = topOf(weight, 20).filter((i) => weight[i] > 0);
  const caption = same ? "The largest weights between two words, one a row"
    : "The largest weights of the matrix, one a row";
  const body = best.map((i) => [word(named(rows, i)), word(named(cols, peakAt[i])), peak[i]]);
  return [el("h2", { text: "Strongest links" }), el("div", { class: "scroll" }, table(caption, ["from", "to", "weight"],
    body))];
}

// ── Training: every head over the steps ───────────────────────────────────────────────────────────────────────────

const STRIPS = {
  entropy_share: ["entropy, as a share of the most it could be",
    "Faint is sharp. A row that fades and stays so is a head that collapsed."],
  max_score: ["largest score", "A row that grows strong to the right is a head whose scores explode."],
};

function training(page, box) {
  page.looked ??= {};
  for (const one of page.header.strips) box.append(trainingStrip(page, one));
}

function trainingStrip(page, { what, heads, values }) {
  const { steps } = page.header, { paint } = page, n = steps.length, numbers = page.header.array(values);
  // One pass: a long run has more numbers than a call takes arguments.
  let [low, high] = [0, what === "entropy_share" ? 1 : 0];
  for (const x of numbers) if (Number.isFinite(x)) [low, high] = [Math.min(low, x), Math.max(high, x)];
  const part = (x) => (Number.isFinite(x) ? (x - low) / (high - low || 1) : x > 0 ? 1 : 0);
  const canvas = heat(heads.length, n, (h, c) => paint.tint(part(numbers[h * n + c])));
  canvas.style.setProperty("height", `${clamp(heads.length * 14, 60, 420)}px`);
  const told = el("p", { class: "readout", "aria-live": "polite" }), curve = el("div", {});
  const short_ = (name) => (name.length > 40 ? `…${name.slice(-39)}` : name);
  const look = (h, c) => {
    page.looked[what] = h;
    menu.querySelector("select").value = h;
    told.replaceChildren(el("bdi", { text: heads[h][0] }), ` head ${heads[h][1]}, step ${count(steps[c])} `,
      el("b", { "data-read": what, text: fixed(numbers[h * n + c], 3) }));
    curve.replaceChildren(lineOf(steps, numbers.subarray(h * n, (h + 1) * n), low, high));
  };
  const menu = choice("head", `train-${what}`, heads.map(([layer, head], h) => [h, `${short_(layer)} · ${head}`]), 0,
    (h) => look(Number(h), n - 1));
  canvas.addEventListener("mousemove", (event) => look(...tileUnder(canvas, event, heads.length, n)));
  const last = heads.map((_, h) => numbers[h * n + n - 1] * (what === "entropy_share" ? -1 : 1));
  look(page.looked[what] ?? largest(last), n - 1);
  const [title, hint] = STRIPS[what];
  return el("figure", { class: "train" }, el("h2", { text: title }), el("p", { class: "hint", text: hint }), canvas,
    el("p", { class: "ends" }, el("span", { text: `step ${count(steps[0])}` }),
      el("span", { text: `step ${count(steps[n - 1])}` })),
    el("div", { class: "controls" }, menu), told, curve,
    behind(title, () => [["step", ...heads.map(([layer, head]) => `${layer} · ${head}`)],
      steps.map((step, c) => [count(step), ...heads.map((_, h) => numbers[h * n + c])])]));
}

function lineOf(steps, numbers, low, high) {
  const [width, height] = [640, 90], first = steps[0], last = steps.at(-1);
  const x = (step) => (last > first ? ((step - first) / (last - first)) * width : width / 2);
  const y = (value) => height - ((value - low) / (high - low || 1)) * height;
  const points = steps.filter((_, c) => Number.isFinite(numbers[c])).map((step) =>
    `${x(step)},${y(numbers[steps.indexOf(step)])}`);
  return svg("svg", { class: "wide", viewBox: `-4 -6 ${width + 8} ${height + 12}`, role: "img",
    "aria-label": `from ${fixed(numbers[0], 3)} to ${fixed(numbers.at(-1), 3)}` },
    svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
    svg("polyline", { class: "curve", points: points.join(" "), style: { stroke: "var(--accent)" } }));
}

// ── The views, in the order of their tabs ─────────────────────────────────────────────────────────────────────────

const short = (stack) => !stack.long && stack.heads.length > 0;
const withVectors = (stack) => short(stack) && stack.heads.some((head) => head.layer.q !== undefined);

const VIEWS = {
  spotlight: {
    name: "Spotlight", build: spotlight, stack: (s) => short(s) && s.same,
    look: "Follow the lines from the lit word: the thicker, the more of it is made of that other word. "
      + "Point at another word, or click to keep it lit.",
  },
  cross: {
    name: "Two sentences", build: spotlight, stack: (s) => short(s) && !s.same,
    look: "The lit word above looks into the sentence below: which of its words does it draw on?",
  },
  long: {
    name: "Long input", build: long, stack: (s) => s.long && s.heads.length > 0,
    look: "A strong column is a word everybody looks at, a strong diagonal is the neighbourhood; "
      + "single strong tiles are ties worth a closer look.",
  },
  walk: {
    name: "Walk", build: walk, stack: short,
    look: "Read downwards: how a score becomes a weight, and weights become the output, number by number.",
  },
  play: {
    name: "Play", build: play, stack: withVectors,
    look: "Turn the scale up until one word takes everything, and down until all are alike; then change the rules.",
  },
  square: {
    name: "Square", build: square, stack: short,
    look: "Each row is one word looking, each column one word looked at. "
      + "A strong column is a word everybody looks at, a diagonal is a habit of place.",
  },
  overview: {
    name: "All heads", build: overview, when: (page) => page.book?.total > 1,
    look: "Every head in one picture: find the odd one out, and click to open it.",
  },
  training: {
    name: "Training", build: training, when: (page) => page.header.kind === "training",
    look: "Time runs to the right, one row a head: look for rows that change colour for good.",
  },
};

export async function show(root, base64) {
  try {
    return new Page(root, unpack(await inflate(base64)));
  } catch (error) {
    root.textContent = `This page could not be shown: ${error.message}`;
    throw error;
  }
}

const data = globalThis.document?.getElementById("regard-data");
if (data) globalThis.regard = show(document.getElementById("regard"), data.textContent);
