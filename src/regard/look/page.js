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
  cosine: { name: "cosine", formula: "q·k / |q||k|", of: (q, k) => dot(q, k) / (Math.sqrt(dot(q, q) * dot(k, k)) || 1) },
  gaussian: { name: "Gaussian", formula: "−|q − k|² / 2", of: (q, k) => { let s = 0; for (let n = 0; n < q.length; n++) s -= (q[n] - k[n]) ** 2; return s / 2; } },
  additive: { name: "additive", formula: "Σ tanh(q + k)", of: (q, k) => { let s = 0; for (let n = 0; n < q.length; n++) s += Math.tanh(q[n] + k[n]); return s; } },
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
const svg = (tag, props, ...children) => make(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
// A word in its own direction, whatever stands around it.
const word = (text) => el("bdi", { class: "token", text: text.length > 60 ? text.slice(0, 59) + "…" : text, title: text.length > 24 ? text : undefined });

function choice(label, key, options, value, onchange) {
  const menu = el("select", { "data-key": key, onchange: (e) => onchange(e.target.value) },
    options.map(([id, text]) => el("option", { value: id, text })));
  menu.value = value;
  return el("label", { class: "field" }, el("span", { text: label }), menu);
}

function tick(label, key, on, onchange) {
  return el("label", { class: "tick" }, el("input", { type: "checkbox", "data-key": key, checked: on, onchange: (e) => onchange(e.target.checked) }), el("span", {}, label));
}

// The table behind a picture; written when it is opened.
function behind(caption, write) {
  const box = el("div", { class: "scroll" });
  const fold = el("details", { class: "behind", ontoggle: () => { if (fold.open) box.replaceChildren(table(caption, ...write())); } },
    el("summary", { text: "The same as a table" }), box);
  return fold;
}

function table(caption, head, rows) {
  const cell = (x) => (x instanceof Node ? x : document.createTextNode(typeof x === "number" ? weightText(x) : x));
  return el("table", {}, el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, head.map((x) => el("th", { scope: "col" }, cell(x))))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((x, n) => (n ? el("td", {}, cell(x)) : el("th", { scope: "row" }, cell(x))))))));
}

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
  return { tint, signed, css: ([r, g, b]) => `rgb(${r} ${g} ${b})`, ink: ([r, g, b]) => (r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#101418" : "#fbfcfd") };
}

// Small weights must be seen beside large ones: colour goes with a root of the weight.
const shade = (w, most) => (most > 0 ? (w / most) ** 0.6 : 0);

// A heat map of rows × cols numbers, one pixel each; the style sheet makes the pixels large.
function heat(rows, cols, colour) {
  const canvas = el("canvas", { class: "heat", width: cols, height: rows, "aria-hidden": "true" });
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(Math.max(1, cols), Math.max(1, rows));
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) image.data.set([...colour(r, c), 255], 4 * (r * cols + c));
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
  const stacks = header.stacks.map((s, n) => ({ ...s, n, rows: sequences[s.rows], cols: sequences[s.cols], heads: [] }));
  const heads = [];
  header.layers.forEach((layer, place) => layer.held.forEach((head, n) => {
    const one = new Head(header, layer, place, head, n, stacks[layer.stack], heads.length);
    stacks[layer.stack].heads.push(one);
    heads.push(one);
  }));
  const total = sum(header.all.map(([, , heads]) => heads));
  return { header, sequences, stacks, heads, total };
}

// The direction of a text is that of its first strong letter.
function rightToLeft(tokens, special) {
  const skip = new Set(special);
  for (let n = 0; n < Math.min(tokens.length, 400); n++) {
    const strong = skip.has(n) ? null : tokens[n].match(/\p{L}/u);
    if (strong) return /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(strong[0]);
  }
  return false;
}

class Head {
  constructor(header, layer, place, head, n, stack, id) {
    Object.assign(this, { header, layer, place, head, n, stack, id, i: stack.rows.length, j: stack.cols.length, sheets: new Map() });
    this.name = layer.name ? `layer ${layer.index}, head ${head}` : layer.heads > 1 ? `head ${head}` : "these weights";
    this.brief = layer.name ? `${layer.index}·${head}` : `${head}`;
  }
  // The nth of a layer's arrays, which are (held, a, b) or shared by all.
  part(name) {
    const ref = this.layer[name];
    if (ref === undefined) return null;
    const [many, a, b] = this.header.shape(ref);
    const { held, walked, per_value, per_key } = this.layer, heads = name === "w" ? held : walked, n = heads.indexOf(this.head);
    if (n < 0) return null;
    const at = many === 1 ? 0 : many === heads.length ? n : Math.floor(this.head / (name === "v" ? per_value : per_key));
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
    if (!this.sheets.has(key)) this.sheets.set(key, this.read(reading(this.stack.rows, options), reading(this.stack.cols, options)));
    return this.sheets.get(key);
  }
  read(rows, cols) {
    const w = rows.groups.map(([a, b]) => {
      const row = new Float64Array(cols.groups.length);
      for (let i = a; i < b; i++) cols.groups.forEach(([c, d], n) => { for (let j = c; j < d; j++) row[n] += this.at(i, j) / (b - a); });
      const kept = sum(row), hidden = sum(cols.hidden.map((j) => sum(range(b - a).map((i) => this.at(a + i, j))) / (b - a)));
      return cols.hidden.length && kept > 0 ? row.map((x) => (x * (kept + hidden)) / kept) : row;
    });
    return new Sheet(rows, cols, w, this.stack.same);
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
      if (x <= 0) return;
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
  return { groups, at, labels: groups.map((g) => g[2]), hidden: range(length).filter(gone), special: groups.map(([a]) => special.has(a)), rtl: sequence.rtl };
}

// The heads for a word, the most telling first; two to begin with that look at different words.
function ranked({ stack, state }) {
  const heads = stack.heads.filter((head) => state.layer === null || head.place === state.layer);
  return stack.long ? heads : [...heads].sort((a, b) => bestOf(b, state).beyond - bestOf(a, state).beyond || a.id - b.id);
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
      view: null, stack: start?.stack ?? 0, word: start?.word ?? 0, hover: null, hide: start?.hide ?? false, merge: start?.merge ?? false, theme: "auto",
      chosen: start?.asked.length ? start.asked.map(([place, h]) => this.book.heads.findIndex((x) => x.place === place && x.head === h)) : null,
      layer: start?.asked.length ? null : start?.layer ?? null, cell: null,
    };
    this.views = Object.entries(VIEWS).filter(([, view]) => view.when(this));
    this.state.view = this.views.find(([, view]) => !this.book || (view.stack?.(this.stack) ?? true))[0];
    this.frame();
    this.open(this.state.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => { const width = root.clientWidth; if (width !== this.width) { this.width = width; this.refresh?.(true); } }).observe(root);
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
    if (head.stack.n !== this.state.stack) Object.assign(this.state, { stack: head.stack.n, word: telling(head.stack) });
    this.open(view);
  }
  frame() {
    const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (e) => this.tabKey(e) },
      this.views.map(([id, view]) => el("button", { role: "tab", id: `tab-${id}`, "data-key": `tab-${id}`, "aria-controls": "view", text: view.name, onclick: () => this.open(id) })));
    this.main = el("main", { id: "view", role: "tabpanel", tabindex: "-1" });
    this.root.className = "regard";
    this.root.replaceChildren(
      el("header", { class: "top" }, el("p", { class: "mark", text: "regard" }), el("h1", {}, el("bdi", { text: this.header.title })),
        el("button", { class: "quiet theme", "data-key": "theme", "aria-label": "Change between light and dark", title: "light / dark", onclick: () => this.turn() }, "◐")),
      ...(this.views.length > 1 ? [tabs] : []), this.main, this.foot());
  }
  foot() {
    const { notes, refused } = this.header;
    return el("footer", {}, notes.map((note) => el("p", { text: note })),
      refused.length ? el("details", {}, el("summary", { text: `${refused.length} ${refused.length > 1 ? "modules were" : "module was"} not heard` }),
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
      Object.assign(this.state, { stack: n, word: telling(this.book.stacks[n]), chosen: null, hover: null, layer: null });
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
    this.main.replaceChildren(el("p", { class: "look", text: typeof view.look === "function" ? view.look(this) : view.look }), box);
    this.refresh = view.build(this, box) ?? null;
    this.refresh?.();
  }
}

// The row of a stack that some head ties most clearly.
function telling(stack) {
  if (stack.long) return 0;
  const rows = range(stack.rows.length).filter((i) => !stack.rows.special.has(i));
  const strength = rows.map((i) => Math.max(...stack.heads.map((head) => head.sheet({ hide: false, merge: false }).best(i).beyond)));
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
    page.state.hide && special ? el("span", { class: "warn", text: "renormalised: the hidden tokens’ share is spread over the rest" }) : null,
  ];
}

function stackChoice(page) {
  const fits = page.book.stacks.filter((s) => VIEWS[page.state.view].stack?.(s) ?? true);
  if (fits.length < 2) return null;
  const name = (s) => {
    const names = s.heads.map((head) => head.layer.name);
    const first = (names[0] ?? "").split(".")[0] || "layers";
    return `${first}: ${s.same ? "among" : "from"} ${count(s.rows.length)} ${s.same ? "words" : `words to ${count(s.cols.length)}`}`;
  };
  return choice("sentence", "stack", fits.map((s) => [s.n, name(s)]), page.state.stack, (n) => page.setStack(Number(n)));
}

function headChoice(page) {
  const heads = page.stack.heads;
  if (heads.length < 2) return null;
  return choice("head", "head", heads.map((head) => [head.id, head.name]), page.head.id, (id) => page.set({ chosen: [Number(id)] }));
}

function wordChoice(page) {
  const { rows } = page.stack;
  return choice("word", "word", range(rows.length).map((n) => [n, repeated(rows, n)]), page.state.word, (n) => page.set({ word: Number(n), hover: null }));
}

// A word that occurs twice is told apart by a number.
function repeated(rows, n) {
  const name = rows.label(n), places = rows.shown ? range(rows.length).filter((m) => rows.shown[m] === name) : [n];
  const short = name.length > 30 ? name.slice(0, 29) + "…" : name;
  return places.length > 1 ? `${short} (${places.indexOf(n) + 1} of ${places.length})` : short;
}

// ── Spotlight: one sentence, or two, and the lines from one word ──────────────────────────────────────────────────

function spotlight(page, box) {
  const { rows, cols } = page.head.sheet(page.state), same = page.stack.same;
  const hero = el("div", { class: "hero", "aria-live": "polite" });
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const upper = sentence(page, rows, true);
  const lower = same ? null : sentence(page, cols, false);
  const stage = el("div", { class: `stage ${same ? "one" : "two"}` }, lines, same ? null : el("p", { class: "side", text: "these words look" }), upper, lower, same ? null : el("p", { class: "side", text: "at these" }));
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Heads" });
  const how = el("p", { class: "hint", text: "Layer·head, the word it is tied to, and the weight; ordered by what exceeds the head’s habit, the weight it gives that word or that distance anyway." });
  const list = el("div", { class: "bars" });
  const told = el("h2", {});
  box.append(hero, stage, el("div", { class: "controls" }, readingControls(page)), told, how, chips, list,
    behind("Weights of the lit word", () => spotlightTable(page)));
  return () => {
    const i = rows.at[page.row] < 0 ? 0 : rows.at[page.row];
    const sheets = page.heads.map((head) => head.sheet(page.state));
    headline(page, hero, sheets, i);
    light(page, same ? [upper] : [upper, lower], sheets, i);
    draw(lines, stage, upper, same ? upper : lower, sheets, i, same);
    const kept = word(rows.labels[Math.max(0, rows.at[page.state.word])] ?? "");
    told.replaceChildren(...(page.stack.heads.length > 1 ? ["Heads that say most about ", kept] : ["Where ", word(rows.labels[i] ?? ""), " looks"]));
    chips.replaceChildren(...headChips(page, ranked(page)));
    chips.hidden = how.hidden = page.stack.heads.length < 2;
    list.replaceChildren(bars(page, sheets, i));
  };
}

function sentence(page, read, asks) {
  const words = el("div", { class: `sentence${read.groups.length > 40 ? " many" : ""}`, role: asks ? "listbox" : "list", "aria-label": asks ? "Words; the arrow keys move the light" : "Words that are looked at", dir: read.rtl ? "rtl" : "ltr" });
  read.groups.forEach(([start], n) => {
    const props = { class: `word${read.special[n] ? " special" : ""}`, "data-n": n };
    if (asks) Object.assign(props, {
      role: "option", "data-key": `word-${start}`,
      onmouseenter: () => page.set({ hover: start }), onmouseleave: () => page.set({ hover: null }),
      onclick: () => page.set({ word: start, hover: null }), onkeydown: (e) => wordKey(e, page, read),
    }); else props.role = "listitem";
    words.append(el("span", props, el("span", { class: "num up" }), word(read.labels[n]), el("span", { class: "num down" })));
  });
  return words;
}

function wordKey(event, page, read) {
  const forward = read.rtl ? "ArrowLeft" : "ArrowRight", back = read.rtl ? "ArrowRight" : "ArrowLeft";
  const at = read.at[page.state.word], last = read.groups.length - 1;
  const to = { [forward]: at + 1, [back]: at - 1, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const [start] = read.groups[clamp(to, 0, last)];
  page.set({ word: start, hover: null });
  page.root.querySelector(`[data-key="word-${start}"]`)?.focus();
}

function headline(page, hero, sheets, i) {
  hero.replaceChildren(...sheets.slice(0, 4).map((sheet, n) => {
    const { rows, cols, w } = sheet, j = sheet.best(i).key;
    return el("p", { style: { "--colour": page.colour(n) } }, el("i", { class: "dot" }), el("span", { class: "tie" }, word(rows.labels[i]), el("span", { class: "arrow", text: " → " }), word(cols.labels[j])),
      el("b", { class: "weight", text: fixed(w[i][j], 2) }), page.book.total > 1 ? el("span", { class: "who", text: page.heads[n].name }) : null);
  }));
  if (!sheets.length) hero.append(el("p", { class: "who", text: "No head is on. Choose one below." }));
}

// Shade every word by its weights, a band a head, and write the larger numbers: the first head above, the second below.
function light(page, lines, sheets, i) {
  const keys = lines.at(-1);
  for (const line of lines) for (const node of line.children) {
    const n = Number(node.getAttribute("data-n")), asks = line === lines[0];
    const lit = asks && n === i;
    node.classList.toggle("lit", lit);
    if (asks) { node.setAttribute("aria-selected", String(lit)); node.setAttribute("tabindex", lit ? "0" : "-1"); }
    if (line !== keys) continue;
    const weights = sheets.map(({ w }) => w[i]?.[n] ?? 0);
    const bands = weights.map((w, h) => `color-mix(in srgb, ${page.colour(h)} ${w < 0.02 ? 0 : Math.round(70 * w ** 0.7)}%, transparent) ${(100 * h) / weights.length}% ${(100 * (h + 1)) / weights.length}%`);
    node.querySelector(".token").style.setProperty("background", bands.length ? `linear-gradient(${bands.join(", ")})` : "none");
    [".up", ".down"].forEach((side, h) => {
      const number = node.querySelector(side);
      number.textContent = (weights[h] ?? 0) >= 0.045 ? fixed(weights[h], 2) : "";
      number.style.setProperty("color", page.colour(h));
    });
  }
}

// Lines from the lit word; the heads take turns above and below the sentence.
function draw(lines, stage, from, to, sheets, i, same) {
  const frame = stage.getBoundingClientRect(), begin = from.children[i]?.getBoundingClientRect();
  lines.replaceChildren();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  if (!begin) return;
  sheets.forEach(({ w }, h) => w[i].forEach((weight, j) => {
    if (weight < 0.02 || (same && j === i)) return;
    const end = to.children[j].getBoundingClientRect();
    const d = same ? arc(begin, end, frame, h % 2 === 0) : link(begin, end, frame, h);
    lines.append(svg("path", { d, "stroke-width": 0.75 + 8 * weight, opacity: 0.2 + 0.7 * weight, style: { stroke: `var(--h${h % 4})` } }));
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
    const { rows, cols, w } = head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]), j = bestOf(head, page.state).key, n = on.indexOf(head.id);
    return el("button", {
      class: "chip", "data-key": `chip-${head.id}`, "aria-pressed": String(n >= 0), title: `${head.name}${head.layer.name ? ` (${head.layer.name})` : ""}`,
      style: n >= 0 ? { "--colour": page.colour(n) } : {}, onclick: () => toggle(page, head.id),
    }, el("span", { class: "brief", text: head.brief }), word(cols.labels[j]), el("b", { text: fixed(w[i][j], 2) }));
  });
  if (heads.length > CHIPS) chips.push(el("button", { class: "chip quiet", "data-key": "chip-all", text: open ? "fewer" : `all ${heads.length}`, onclick: () => page.set({ all: !open }) }));
  if (page.state.chosen) chips.push(el("button", { class: "chip quiet", "data-key": "chip-auto", text: "best two again", onclick: () => page.set({ chosen: null, layer: null }) }));
  return chips;
}

// At most four heads, so that colours stay apart.
function toggle(page, id) {
  const on = page.heads.map((head) => head.id);
  page.set({ chosen: on.includes(id) ? on.filter((x) => x !== id) : [...on, id].slice(-4) });
}

function bars(page, sheets, i) {
  if (!sheets.length) return el("span");
  const { cols } = sheets[0];
  const order = range(cols.labels.length).sort((a, b) => Math.max(...sheets.map(({ w }) => w[i][b])) - Math.max(...sheets.map(({ w }) => w[i][a]))).slice(0, 6);
  return el("ol", { class: "best", "aria-label": "Words with the largest weights" }, order.map((j) => el("li", {}, word(cols.labels[j]), el("span", { class: "lanes" },
    sheets.map(({ w }, h) => el("span", { class: "lane", style: { "--colour": page.colour(h), "--w": `${100 * w[i][j]}%` } }, el("i"), el("b", { text: brief(w[i][j]) })))))));
}

function spotlightTable(page) {
  const sheets = page.heads.map((head) => head.sheet(page.state));
  const { rows, cols } = sheets[0] ?? page.head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]);
  return [["word", ...page.heads.map((head) => head.name)], cols.labels.map((label, j) => [word(label), ...sheets.map(({ w }) => w[i][j])])];
}

// ── Walk: the six steps for one word ──────────────────────────────────────────────────────────────────────────────

function walk(page, box) {
  const own = (page.walk ??= { source: page.header.embedded && page.header.embedded.stack === page.state.stack ? "words" : "head", q: false, k: false, v: false, cell: null });
  const embedded = page.header.embedded?.stack === page.state.stack ? page.header.embedded : null;
  if (!embedded) own.source = "head";
  const bar = el("div", { class: "controls" }), grid = el("div", { class: "scroll" }), cells = el("div", { class: "cells", "aria-live": "polite" }), sentence = el("p", { class: "told" });
  box.append(bar, sentence, grid, cells);
  const again = (change) => { Object.assign(own, change); page.refresh(); };
  return () => {
    const i = page.state.word, steps = own.source === "head" ? stepsOfHead(page.head, i) : stepsOfWords(page, embedded, own, i);
    const pick = (id, text) => el("button", { class: "chip", "data-key": `walk-${id}`, "aria-pressed": String(own.source === id), text, onclick: () => again({ source: id, cell: null }) });
    bar.replaceChildren(...[stackChoice(page), wordChoice(page), embedded ? el("span", { class: "group", role: "group", "aria-label": "What is walked through" }, pick("words", "word vectors"), pick("head", "a recorded head")) : null,
      own.source === "head" ? headChoice(page) : null,
      ...(own.source === "words" ? ["q", "k", "v"].map((x) => tick(["W", el("sub", { text: x })], `walk-W${x}`, own[x], (on) => again({ [x]: on, cell: null }))) : [])].filter(Boolean));
    sentence.textContent = steps.told;
    grid.replaceChildren(stepTable(page, steps, i, (j) => again({ cell: own.cell === j ? null : j }), own.cell));
    cells.replaceChildren(...dotProduct(page, steps, i, own.cell));
  };
}

// The steps of basic self-attention on word vectors, W_q, W_k and W_v switched on one at a time.
function stepsOfWords(page, embedded, own, i) {
  const { header } = page, t = page.stack.rows.length, few = header.shape(embedded.x)[1], size = embedded.size;
  const vectors = (on, name) => { const flat = header.array(embedded[on ? name : "x"]); return range(t).map((n) => flat.subarray(n * few, (n + 1) * few)); };
  const at = ((own.q ? 1 : 0) + (own.k ? 2 : 0)) * t * t + i * t;
  const raw = Array.from(header.array(embedded.dots).subarray(at, at + t));
  const scale = own.q || own.k ? 1 / Math.sqrt(size) : 1;
  const s = raw.map((x) => x * scale), w = softmax(s), v = vectors(own.v, "v");
  const name = (on, x) => (on ? `${x} = x·W${x}` : `${x} = x`);
  return {
    told: own.q || own.k || own.v
      ? `The model’s own word vectors, before positions, through its first layer’s projections: ${name(own.q, "q")}, ${name(own.k, "k")}, ${name(own.v, "v")}.`
      : "Basic self-attention on the model’s own word vectors, before positions: no parameters, q = k = v = x. A word is most like itself; switch the projections on and see that change.",
    raw, scale, scaleText: scale === 1 ? "by nothing" : `÷ √${size}`, s, masked: s, hidden: false, w, q: vectors(own.q, "q")[i], k: vectors(own.k, "k"), v, y: mix(w, v), size, values: size, what: "q·k",
  };
}

function stepsOfHead(head, i) {
  const { layer } = head, w = Array.from(head.row(i)), j = range(head.j);
  const q = head.vectors("q")?.[i], k = head.vectors("k"), v = head.vectors("v");
  const raw = q ? j.map((n) => dot(q, k[n])) : null, given = head.part("s");
  const s = given ? j.map((n) => given[i * head.j + n]) : raw && raw.map((x) => x * layer.scale);
  const masked = s && s.map((x, n) => (head.visible(i, n) ? x : -Infinity));
  const plain = layer.scale !== undefined && !layer.score_name;
  return {
    told: (s ? "" : layer.score === "Given" ? "These weights came ready-made: of the six steps only the last three are known. " : "Of this head the page holds the weights alone. ")
      + (v ? "" : "Without values the walk ends at the weights. ") + (s && v ? `${layer.name ? `The recorded ${head.name}` : "One row of these weights"}, number by number.` : ""),
    raw, scale: layer.scale, scaleText: plain ? scaling(layer) : layer.score_name,
    s, masked, hidden: masked && masked.includes(-Infinity), mask: layer.mask_name, w, q, k, v, y: v && mix(w, v), size: layer.d, values: v && v[0].length, what: plain || raw ? "q·k" : "similarity", sink: layer.sink,
  };
}

function scaling({ scale, d }) {
  if (scale === 1) return "by nothing";
  return Math.abs(scale * Math.sqrt(d) - 1) < 1e-6 ? `÷ √${d}` : `× ${fixed(scale, 4)}`;
}

function stepTable(page, steps, i, onpick, picked) {
  const { cols } = page.stack, t = cols.length, paint = page.paint;
  const line = (n, name, shape, cells, cls) => el("tr", { class: cls }, el("th", { scope: "row" }, el("div", {}, el("span", { class: "step", text: n }), el("span", { class: "name" }, name), el("span", { class: "shape", text: shape }))), cells);
  const numbers = (x, digits = 2) => x.map((v) => el("td", { text: fixed(v, digits) }));
  const most = steps.v ? Math.max(...steps.v.map((row, j) => steps.w[j] * Math.max(...Array.from(row, Math.abs)))) : 0;
  const rows = [];
  const can = (j) => el("td", {}, el("button", { class: "cell", "data-key": `dot-${j}`, "aria-pressed": String(picked === j), title: "the dot product, cell by cell", text: fixed(steps.raw[j], 2), onclick: () => onpick(j) }));
  if (steps.raw) rows.push(line("1", steps.what, `1×${steps.size} · ${steps.size}×${t}`, range(t).map(can)));
  if (steps.s) rows.push(line("2", steps.raw ? `scaled ${steps.scaleText}` : `score ${steps.scaleText}`, `1×${t}`, numbers(steps.s)));
  if (steps.s) rows.push(line("3", steps.hidden ? `masked by ${steps.mask}` : "mask: none", `1×${t}`, numbers(steps.masked), steps.hidden ? "" : "pale"));
  rows.push(line("4", steps.sink ? `softmax, with a sink that takes ${fixed(1 - sum(steps.w), 3)}` : "softmax", `1×${t}, sum ${fixed(sum(steps.w), 2)}`, steps.w.map((w, j) => {
    const colour = paint.tint(shade(w, 1));
    return el("td", { class: "w", style: { background: paint.css(colour), color: paint.ink(colour) }, "data-j": j, text: fixed(w, 3) });
  })));
  if (steps.v) {
    const shownSize = steps.v[0].length < steps.values ? `first ${steps.v[0].length} of ${steps.values}` : `${steps.values}`;
    rows.push(line("5", "weight × value", `${t}×${steps.values}`, steps.v.map((v, j) => el("td", {}, strip(Array.from(v.slice(0, 32), (x) => x * steps.w[j]), most, paint, `${fixed(steps.w[j], 3)} times the value of ${cols.label(j)}`)))));
    rows.push(line("6", "sum: the output y", `1×${steps.values}`, el("td", { colspan: t, class: "y" }, strip(steps.y.slice(0, 32), Math.max(...steps.y.map(Math.abs)), paint, "the output"),
      el("span", { class: "vector", text: `y = [${steps.y.slice(0, 6).map((x) => fixed(x, 2)).join(", ")}${steps.values > 6 ? ", …" : ""}]  (${shownSize} coordinates)` }))));
  }
  return el("table", { class: "steps" }, el("caption", { class: "hidden", text: "The six steps" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, word(page.stack.rows.label(i)), " looks at"), range(t).map((j) => el("th", { scope: "col", class: page.stack.same && i === j ? "self" : "" }, word(cols.label(j)))))), el("tbody", {}, rows));
}

// The coordinates of a query and a key and their products, so many a line.
const COORDINATES = 16;
function dotProduct(page, steps, i, j) {
  if (j === null || !steps.q) return steps.raw ? [el("p", { class: "hint", text: "Choose a number of the first row to see its dot product cell by cell." })] : [];
  const a = Array.from(steps.q), b = Array.from(steps.k[j]), products = a.map((x, n) => x * b[n]), paint = page.paint, rest = steps.raw[j] - sum(products);
  const most = (x) => Math.max(...x.map(Math.abs)) || 1;
  const line = (name, x, from) => el("tr", {}, el("th", { scope: "row", text: name }), x.slice(from, from + COORDINATES).map((v) => {
    const colour = paint.signed(v / most(x));
    return el("td", { style: { background: paint.css(colour), color: paint.ink(colour) }, text: fixed(v, 2) });
  }));
  const lines = range(Math.ceil(a.length / COORDINATES)).map((n) => el("tbody", {}, line("q", a, n * COORDINATES), line("k", b, n * COORDINATES), line("q × k", products, n * COORDINATES)));
  return [el("h3", {}, "q of ", word(page.stack.rows.label(i)), " · k of ", word(page.stack.cols.label(j)), ` = ${fixed(steps.raw[j], 3)}`),
    el("div", { class: "scroll" }, el("table", { class: "products" }, lines)),
    el("p", { class: "hint", text: a.length < steps.size ? `The first ${a.length} of ${steps.size} coordinates; the other products sum to ${fixed(rest, 3)}.` : `All ${steps.size} products sum to ${fixed(steps.raw[j], 3)}.` })];
}

// ── Play: change the rules and see what the weights do ────────────────────────────────────────────────────────────

function play(page, box) {
  const same = page.stack.same, t = page.stack.rows.length;
  const own = (page.play ??= { similarity: "scaled", power: 0, causal: false, window: false, width: 2, recorded: true });
  own.order = own.order?.length === t ? own.order : range(t);
  const again = (change) => { Object.assign(own, change); update(); };
  const power = el("input", { type: "range", min: -5, max: 5, step: 0.1, value: own.power, "data-key": "power", "aria-label": "scale", oninput: (e) => again({ power: Number(e.target.value) }) });
  const scaleText = el("output", {}), widthBox = el("input", { type: "number", min: 0, max: t, value: own.width, "data-key": "width", "aria-label": "words to either side", oninput: (e) => again({ width: Math.max(0, Number(e.target.value) || 0) }) });
  const picks = el("span", { class: "picks" });
  const similar = choice("similarity", "similarity", Object.entries(SIMILARITIES).map(([id, s]) => [id, `${s.name}: ${s.formula}`]), own.similarity, (similarity) => again({ similarity }));
  const shuffle = () => again({ order: shuffled(t) });
  const masks = same ? [tick("causal mask", "causal", own.causal, (causal) => again({ causal })), el("span", { class: "pair" }, tick("window of", "window", own.window, (window) => again({ window })), widthBox)] : [];
  const kept = page.head.layer.visible !== undefined ? tick("the recorded mask", "recorded", own.recorded, (recorded) => again({ recorded })) : null;
  const order = same ? [el("button", { class: "chip", "data-key": "shuffle", text: "shuffle the words", onclick: shuffle }), el("button", { class: "chip quiet", "data-key": "unshuffle", text: "put them back", onclick: () => again({ order: range(t) }) })] : [];
  const result = el("div", { class: "plays" });
  box.append(el("div", { class: "controls" }, picks, similar), el("div", { class: "controls" }, el("label", { class: "field wide" }, el("span", { text: "scale" }), power, scaleText), masks, kept, order), result);

  function update() {
    const vectors = { q: page.head.vectors("q"), k: page.head.vectors("k"), v: page.head.vectors("v") };
    scaleText.textContent = `× ${fixed(2 ** own.power, 2)}`;
    if (!vectors.q) {
      result.replaceChildren(el("p", { class: "hint", text: "Of this head the page holds the weights alone; choose another one." }));
      return;
    }
    const visible = (i, j) => (!own.causal || j <= i) && (!own.window || Math.abs(i - j) <= own.width) && (!own.recorded || page.head.visible(i, j));
    const at = (factor, p) => attention(p.map((n) => vectors.q[n]), same ? p.map((n) => vectors.k[n]) : vectors.k, vectors.v && (same ? p.map((n) => vectors.v[n]) : vectors.v), { similarity: own.similarity, factor, visible });
    const now = at(2 ** own.power, own.order), place = own.order.indexOf(page.state.word);
    page.played = now;
    result.replaceChildren(saturation(now.w[place], (power) => attentionRow(vectors, own, visible, place, 2 ** power, same), own.power),
      playBars(page, now.w[place], own.order, place), playMap(page, now.w), same && vectors.v ? outputs(page, now.y, at(2 ** own.power, range(t)).y, own) : el("span"),
      behind("Weights as computed in this page", () => playTable(page, now.w, own.order)));
  }
  return () => {
    picks.replaceChildren(...[stackChoice(page), wordChoice(page), headChoice(page)].filter(Boolean));
    update();
  };
}

function attentionRow(vectors, own, visible, place, factor, same) {
  const q = vectors.q[own.order[place]], like = SIMILARITIES[own.similarity].of;
  return softmax(vectors.k.map((_, j) => (visible(place, j) ? factor * like(q, vectors.k[same ? own.order[j] : j]) : -Infinity)));
}

// Any order but the one the words stand in.
function shuffled(t) {
  const order = range(t);
  for (let n = t - 1; n > 0; n--) { const m = Math.floor(Math.random() * (n + 1)); [order[n], order[m]] = [order[m], order[n]]; }
  if (t > 1 && order.every((x, n) => x === n)) order.reverse();
  return order;
}

// Peak and entropy of the row at every scale, and where the slider stands.
function saturation(w, rowAt, power) {
  const most = Math.log(w.length) || 1, width = 300, height = 110;
  const points = range(41).map((n) => { const p = -5 + n / 4, row = rowAt(p); return [((p + 5) / 10) * width, Math.max(...row), entropy(row) / most]; });
  const line = (n) => points.map((p) => `${p[0]},${height - p[n] * height}`).join(" ");
  const x = ((power + 5) / 10) * width, peak = Math.max(...w), h = entropy(w);
  const said = peak > 0.95 ? "saturated: nearly all on one word" : h > 0.95 * most ? "nearly uniform: every word alike" : "in between";
  return el("figure", { class: "saturation" },
    el("div", { class: "pairs" }, el("span", { style: { "--colour": "var(--accent)" } }, el("i", { class: "dot" }), "peak ", el("b", { "data-read": "peak", text: fixed(peak, 3) })),
      el("span", { style: { "--colour": "var(--h0)" } }, el("i", { class: "dot" }), "entropy ", el("b", { "data-read": "entropy", text: fixed(h, 3) }), ` of ${fixed(most, 2)} nats`)),
    svg("svg", { viewBox: `-6 -8 ${width + 12} ${height + 16}`, role: "img", "aria-label": `peak ${fixed(peak, 3)}, entropy ${fixed(h, 3)}` },
      svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }), svg("line", { class: "mark", x1: x, x2: x, y1: -4, y2: height }),
      svg("polyline", { points: line(1), class: "curve", style: { stroke: "var(--accent)" } }), svg("polyline", { points: line(2), class: "curve dashed", style: { stroke: "var(--h0)" } }),
      svg("circle", { cx: x, cy: height - peak * height, r: 4, style: { fill: "var(--accent)" } }), svg("circle", { cx: x, cy: height - (h / most) * height, r: 4, style: { fill: "var(--h0)" } })),
    el("figcaption", { text: `small scale ← → large scale; now ${said}` }));
}

function playBars(page, w, order, place) {
  const { same, rows, cols } = page.stack, most = Math.max(...w) || 1;
  const shown = w.length > 30 ? range(w.length).sort((a, b) => w[b] - w[a]).slice(0, 20) : range(w.length);
  return el("figure", { class: "bars" }, el("figcaption", {}, word(rows.label(order[place])), " looks at"), el("ol", { class: "best tight" }, shown.map((j) => el("li", { class: same && j === place ? "lit" : "" },
    word(cols.label(same ? order[j] : j)), el("span", { class: "lanes" }, el("span", { class: "lane", style: { "--colour": "var(--accent)", "--w": `${(100 * w[j]) / most}%` } }, el("i"), el("b", { "data-j": same ? order[j] : j, text: brief(w[j]) })))))));
}

function playMap(page, w) {
  const paint = page.paint, most = Math.max(...w.map((row) => Math.max(...row)));
  return el("figure", { class: "map" }, el("figcaption", { text: "all words at once" }), heat(w.length, w[0].length, (r, c) => paint.tint(shade(w[r][c], most))));
}

// Shuffle the words and the outputs are shuffled the same way, unless a mask tells places apart.
function outputs(page, y, straight, own) {
  const paint = page.paint, few = 24, most = Math.max(...y.map((row) => Math.max(...row.slice(0, few).map(Math.abs))));
  const gap = Math.max(...y.map((row, n) => Math.max(...row.map((x, e) => Math.abs(x - straight[own.order[n]][e])))));
  const size = Math.max(...straight.map((row) => Math.max(...row.map(Math.abs)))), moved = own.order.some((x, n) => x !== n), exact = gap <= 1e-5 * size;
  const said = !moved ? "Shuffle the words: does each keep its output?"
    : exact ? "Shuffled words, outputs shuffled the same way: every word keeps its output. Attention sees a set."
      : `Now places matter: with this mask outputs change by up to ${fixed(gap, 2)}.`;
  return el("figure", { class: "outputs" }, el("figcaption", { text: "outputs y" }), el("ol", {}, y.slice(0, 60).map((row, n) => el("li", {}, word(page.stack.rows.label(own.order[n])), strip(row.slice(0, few), most, paint, "output")))),
    el("p", { class: "hint", "data-read": "equivariant", "data-gap": String(gap), text: said }));
}

function playTable(page, w, order) {
  const { same, rows, cols } = page.stack, key = (j) => cols.label(same ? order[j] : j);
  return [["", ...w[0].slice(0, 60).map((_, j) => word(key(j)))], w.slice(0, 60).map((row, n) => [word(rows.label(order[n])), ...Array.from(row.slice(0, 60))])];
}

// ── Square: the whole matrix ──────────────────────────────────────────────────────────────────────────────────────

function square(page, box) {
  const bar = el("div", { class: "controls" }), stage = el("div", { class: "matrix" }), told = el("p", { class: "readout", "aria-live": "polite" });
  box.append(bar, told, stage, behind("Weights", () => { const { rows, cols, w } = page.head.sheet(page.state); return [["", ...cols.labels.map(word), "sum"], w.map((row, i) => [word(rows.labels[i]), ...row, sum(row)])]; }));
  let drawn = null;
  return (resized) => {
    const sheet = page.head.sheet(page.state);
    if (resized === true || !drawn || drawn.sheet !== sheet) {
      bar.replaceChildren(...[headChoice(page), ...readingControls(page)].filter(Boolean));
      drawn = matrix(page, stage, sheet);
    }
    const [i, j] = page.state.cell ?? [Math.max(0, sheet.rows.at[page.state.word]), null];
    drawn.mark(i, j);
    const row = sheet.w[i] ?? [], key = j ?? largest(row);
    told.replaceChildren(word(sheet.rows.labels[i] ?? ""), el("span", { class: "arrow", text: " → " }), word(sheet.cols.labels[key] ?? ""), el("b", { "data-read": "cell", text: fixed(row[key], 4) }), el("span", { class: "who", text: `row sum ${fixed(sum(row), 3)}` }));
  };
}

function matrix(page, stage, sheet) {
  const { rows, cols, w, most } = sheet, paint = page.paint, [m, n] = [rows.labels.length, cols.labels.length];
  const letters = (labels) => clamp(Math.max(...labels.slice(0, 60).map((x) => x.length)), 2, 12) * 7.6 + 12;
  const [left, top, right] = [letters(rows.labels), letters(cols.labels), 78];
  const cell = clamp((stage.clientWidth - left - right) / n, 1, 40), [width, height] = [cell * n, cell * m];
  const canvas = heat(m, n, (i, j) => paint.tint(shade(w[i][j], most)));
  for (const [name, value] of [["left", left], ["top", top], ["width", width], ["height", height]]) canvas.style.setProperty(name, `${value}px`);
  const clip = (text) => (text.length > 12 ? text.slice(0, 11) + "…" : text);
  const step = Math.max(1, Math.ceil(11 / cell)), every = (k) => k % step === 0;
  const rowNames = rows.labels.map((text, i) => every(i) && svg("text", { class: "name", x: left - 8, y: top + (i + 0.5) * cell, "text-anchor": "end", "dominant-baseline": "central", text: clip(text) }));
  const colNames = cols.labels.map((text, j) => every(j) && svg("text", { class: "name", transform: `translate(${left + (j + 0.5) * cell} ${top - 8}) rotate(-90)`, "dominant-baseline": "central", text: clip(text) }));
  const sums = w.map((row, i) => every(i) && svg("g", {}, svg("rect", { class: "sum", x: left + width + 8, y: top + (i + 0.2) * cell, height: Math.max(1, 0.6 * cell), width: 26 * Math.min(1, sum(row)) }), cell > 9 ? svg("text", { class: "tiny", x: left + width + 38, y: top + (i + 0.5) * cell, "dominant-baseline": "central", text: fixed(sum(row), 2) }) : null));
  const [across, down] = [svg("rect", { class: "marker" }), svg("rect", { class: "marker" })];
  const over = svg("svg", { width: left + width + right, height: top + height + 6, tabindex: 0, "data-key": "matrix", role: "img", "aria-label": "The attention matrix. Arrow keys move from cell to cell." },
    rowNames.filter(Boolean), colNames.filter(Boolean), svg("text", { class: "tiny", x: left + width + 8, y: top - 8, text: "row sums" }), sums.filter(Boolean), across, down);
  const where = (e) => { const box = over.getBoundingClientRect(), i = Math.floor((e.clientY - box.top - top) / cell), j = Math.floor((e.clientX - box.left - left) / cell); return i >= 0 && i < m && j >= 0 && j < n ? [i, j] : null; };
  const go = (at) => { if (String(at) !== String(page.state.cell)) page.set({ cell: at }); };
  over.addEventListener("mousemove", (e) => go(where(e)));
  over.addEventListener("mouseleave", () => go(null));
  over.addEventListener("click", (e) => { const at = where(e); if (at) page.set({ word: rows.groups[at[0]][0], hover: null }); });
  over.addEventListener("keydown", (e) => {
    const move = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[e.key];
    if (!move) return;
    e.preventDefault();
    const [i, j] = page.state.cell ?? [Math.max(0, rows.at[page.state.word]), 0];
    go([clamp(i + move[0], 0, m - 1), clamp(j + move[1], 0, n - 1)]);
  });
  stage.replaceChildren(canvas, over, legend(page, most));
  const box = (node, x, y, w_, h_) => { for (const [key, value] of Object.entries({ x, y, width: w_, height: h_ })) node.setAttribute(key, value); };
  const mark = (i, j) => {
    box(across, left, top + i * cell, width, cell);
    box(down, left + (j ?? 0) * cell, top, j === null ? 0 : cell, height);
    rowNames.forEach((node, r) => node && node.classList.toggle("on", r === i));
    colNames.forEach((node, c) => node && node.classList.toggle("on", c === j));
  };
  return { sheet, mark };
}

function legend(page, most, low = 0) {
  const paint = page.paint;
  return el("p", { class: "legend", "aria-hidden": "true" }, low ? weightText(low) : "0", heat(1, 64, (_, c) => paint.tint(shade(c / 63, 1))), low ? weightText(most) : fixed(most, 2));
}

// ── Overview: all layers and heads by one number, and by two ──────────────────────────────────────────────────────

const METRICS = {
  entropy: "How spread out a head looks, in nats, the sink left out: 0 is one word, large is everywhere.",
  reach: "How far away a head looks, in words, the sink left out.",
  sink: "The share of its weight that a head puts on the word all heads give most to: attention parked, not used.",
  previous: "The mean weight on the word before.",
  induction: "The mean weight on what followed the same word earlier: a head that continues what it saw.",
};

function overview(page, box) {
  const { metrics, all } = page.header, have = Object.keys(METRICS).filter((by) => metrics[by].some(Boolean));
  const own = (page.overview ??= { by: have[0], x: have[0], y: have[1] ?? have[0], at: null });
  const again = (change) => { Object.assign(own, change); update(); };
  const menu = choice("number", "metric", have.map((by) => [by, by]), own.by, (by) => again({ by }));
  const axis = (name) => choice(name === "x" ? "across" : "up", `axis-${name}`, have.map((by) => [by, by]), own[name], (by) => again({ [name]: by }));
  const told = el("p", { class: "hint" }), grid = el("div", { class: "scroll" }), plot = el("div", { class: "plot" }), peek = el("div", { class: "peek" });
  box.append(el("div", { class: "controls" }, menu), told, el("div", { class: "columns" }, grid, peek), have.length > 1 ? el("div", { class: "controls" }, axis("x"), axis("y")) : "", plot,
    behind("Every head", () => [["layer", "head", ...have], all.flatMap(([index, name, heads], l) => range(heads).map((h) => [`${index} ${name}`, String(h), ...have.map((by) => metrics[by][l]?.[h] ?? "–")]))]));
  const value = (by, l, h) => metrics[by][l]?.[h] ?? null;
  const held = (l, h) => page.book.heads.find((head) => head.place === all[l][3] && head.head === h);
  const name = (l, h) => `layer ${all[l][0]}, head ${h}`;

  function look(l, h) {
    const head = held(l, h);
    own.at = [l, h];
    peek.replaceChildren(el("p", {}, el("b", { text: all[l][1] ? name(l, h) : `head ${h}` })), el("dl", {}, have.map((by) => [el("dt", { text: by }), el("dd", { text: value(by, l, h) === null ? "–" : fixed(value(by, l, h), 2) })])),
      head && !head.stack.long ? heat(head.i, head.j, (i, j) => page.paint.tint(shade(head.at(i, j), 1))) : "",
      head ? el("button", { class: "chip", "data-key": "open-head", text: "open this head", onclick: () => openHead(page, head) }) : el("p", { class: "hint", text: "This page does not hold its weights." }));
  }
  function update() {
    told.textContent = METRICS[own.by];
    grid.replaceChildren(metricGrid(page, own, all, value, held, look));
    plot.replaceChildren(have.length > 1 ? scatter(page, own, all, value, held, look) : "");
    if (own.at) look(...own.at); else look(...extreme(all, (l, h) => value(own.by, l, h), own.by === "entropy" ? -1 : 1));
  }
  update();
}

const openHead = (page, head) => page.choose(head, head.stack.long ? "long" : head.stack.same ? "spotlight" : "cross");

// The head with the largest number, or the smallest: sharpest first for entropy, as in `Recording.heads`.
function extreme(all, value, sign) {
  let best = [0, 0];
  all.forEach(([, , heads], l) => { for (let h = 0; h < heads; h++) if ((value(l, h) ?? -sign * 1e30) * sign > (value(...best) ?? -sign * 1e30) * sign) best = [l, h]; });
  return best;
}

function span(all, value) {
  const numbers = all.flatMap(([, , heads], l) => range(heads).map((h) => value(l, h))).filter((x) => x !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return { low, high, part: (x) => (high > low ? (x - low) / (high - low) : 0.5) };
}

function metricGrid(page, own, all, value, held, look) {
  const paint = page.paint, { part } = span(all, (l, h) => value(own.by, l, h)), widest = Math.max(...all.map(([, , heads]) => heads));
  const key = (e, l, h) => {
    const move = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[e.key];
    if (!move) return;
    e.preventDefault();
    page.root.querySelector(`[data-key="head-${l + move[0]}-${h + move[1]}"]`)?.focus();
  };
  const cell = (l, h) => {
    const x = value(own.by, l, h), colour = paint.tint(x === null ? 0 : 0.04 + 0.96 * part(x)), head = held(l, h);
    return el("td", {}, el("button", { class: "headcell", "data-key": `head-${l}-${h}`, tabindex: own.at ? (own.at[0] === l && own.at[1] === h ? 0 : -1) : l + h === 0 ? 0 : -1, style: { background: paint.css(colour), color: paint.ink(colour) },
      "aria-label": `layer ${all[l][0]}, head ${h}: ${x === null ? "unknown" : fixed(x, 2)}`, text: x === null ? "–" : fixed(x, x >= 10 ? 0 : x >= 1 ? 1 : 2),
      onmouseenter: () => look(l, h), onfocus: () => look(l, h), onclick: () => head && openHead(page, head), onkeydown: (e) => key(e, l, h) }));
  };
  return el("table", { class: "grid" }, el("caption", { class: "hidden", text: `${own.by} of every head` }), el("thead", {}, el("tr", {}, el("th", { scope: "col", text: all[0][1] ? "layer" : "" }), range(widest).map((h) => el("th", { scope: "col", text: String(h) })))),
    el("tbody", {}, all.map(([index, layerName, heads], l) => el("tr", {}, el("th", { scope: "row", title: layerName, text: String(index) }), range(heads).map((h) => cell(l, h))))));
}

function scatter(page, own, all, value, held, look) {
  const [width, height] = [520, 300], [sx, sy] = ["x", "y"].map((a) => span(all, (l, h) => value(own[a], l, h))), paint = page.paint;
  const points = all.flatMap(([index, , heads], l) => range(heads).map((h) => {
    const [x, y] = [value(own.x, l, h), value(own.y, l, h)];
    if (x === null || y === null) return null;
    return svg("circle", { class: "point", cx: sx.part(x) * width, cy: height - sy.part(y) * height, r: 6, style: { fill: paint.css(paint.tint(0.3 + (0.7 * l) / Math.max(1, all.length - 1))) }, onmouseenter: () => look(l, h), onclick: () => held(l, h) && openHead(page, held(l, h)) },
      svg("title", { text: `layer ${index}, head ${h}: ${own.x} ${fixed(x, 2)}, ${own.y} ${fixed(y, 2)}` }));
  })).filter(Boolean);
  const text = (props, t) => svg("text", { class: "tiny", ...props, text: t });
  return el("figure", {}, svg("svg", { class: "scatter", viewBox: `-46 -16 ${width + 66} ${height + 56}`, role: "img", "aria-label": `${own.y} against ${own.x}, one point a head` },
    svg("line", { class: "axis", x1: -10, x2: width + 10, y1: height + 10, y2: height + 10 }), svg("line", { class: "axis", x1: -10, x2: -10, y1: -10, y2: height + 10 }),
    text({ x: 0, y: height + 26 }, near(sx.low)), text({ x: width, y: height + 26, "text-anchor": "end" }, near(sx.high)), text({ x: width / 2, y: height + 34, "text-anchor": "middle" }, own.x),
    text({ x: -14, y: height, "text-anchor": "end" }, near(sy.low)), text({ x: -14, y: 4, "text-anchor": "end" }, near(sy.high)), text({ transform: `translate(-30 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, own.y), points),
    el("figcaption", { text: "One point a head; the later the layer, the stronger the colour." }));
}

// ── Long inputs: a map, rows and columns in numbers, the strongest links, exact rows ──────────────────────────────
// The page holds one map; a server can answer `pool` and `row` for any part: the views ask the source alone.

class Stored {
  constructor(head) {
    const { header, layer, n } = head, long = layer.long, slice = (name, size) => header.array(long[name]).subarray(n * size, (n + 1) * size);
    const [r, c] = long.tiles;
    Object.assign(this, { head, rows: long.rows, tiles: long.tiles, map: slice("pool", r * c), entropy: slice("entropy", head.i), peak: slice("peak", head.i), peakAt: slice("peak_at", head.i), received: slice("received", head.j) });
    this.exact = slice("exact", long.rows.length * head.j);
  }
  // Sums of weights in rows × cols tiles of a part of the matrix; null for a part that is not held.
  async pool(rows, cols, i, j) {
    const whole = i[0] === 0 && i[1] === this.head.i && j[0] === 0 && j[1] === this.head.j;
    return whole && rows === this.tiles[0] && cols === this.tiles[1] ? this.map : null;
  }
  async row(i) {
    const n = this.rows.indexOf(i);
    return n < 0 ? null : this.exact.subarray(n * this.head.j, (n + 1) * this.head.j);
  }
}

function long(page, box) {
  const own = (page.long ??= { row: null }), bar = el("div", { class: "controls" }), told = el("p", { class: "readout", "aria-live": "polite" });
  const map = el("div", { class: "longmap" }), strips = el("div", {}), links = el("div", { class: "links" }), rows = el("div", {});
  box.append(bar, told, el("div", { class: "halves" }, map, strips, rows, links));
  let source = null;
  const again = (row) => { own.row = row; exactRows(page, source, rows, own, again); };
  return () => {
    const head = page.head;
    page.source = source = new Stored(head);
    if (!source.rows.includes(own.row)) own.row = source.rows.includes(page.state.word) ? page.state.word : source.rows[0];
    bar.replaceChildren(...[stackChoice(page), headChoice(page)].filter(Boolean));
    told.replaceChildren(`${count(head.i)} words look at ${count(head.j)}`);
    tileMap(page, source, map, told);
    strips.replaceChildren(profile(page, "entropy of every row", source.entropy, (n) => page.stack.rows.label(n)), profile(page, "largest weight of every row", source.peak, (n) => page.stack.rows.label(n)), profile(page, "attention received by every word", source.received, (n) => page.stack.cols.label(n)));
    exactRows(page, source, rows, own, again);
    links.replaceChildren(...strongest(page, source));
  };
}

const edge = (n, tiles, length) => Math.floor((n * length) / tiles);
const named = (sequence, n) => (sequence.shown ? `${n} ${sequence.label(n).slice(0, 24)}` : count(n));

async function tileMap(page, source, box, told) {
  const { head, tiles: [r, c] } = source, pool = await source.pool(r, c, [0, head.i], [0, head.j]), paint = page.paint;
  const share = (a, b) => pool[a * c + b] / Math.max(1, edge(a + 1, r, head.i) - edge(a, r, head.i));
  let [low, most] = [Infinity, 0];
  for (let a = 0; a < r; a++) for (let b = 0; b < c; b++) { const x = share(a, b); most = Math.max(most, x); low = Math.min(low, x); }
  const canvas = heat(r, c, (a, b) => paint.tint(shade(share(a, b) - low, most - low)));
  const say = (a, b) => told.replaceChildren("words ", el("b", { text: `${count(edge(a, r, head.i))}–${count(edge(a + 1, r, head.i) - 1)}` }), " give words ", el("b", { text: `${count(edge(b, c, head.j))}–${count(edge(b + 1, c, head.j) - 1)}` }), " a share of ", el("b", { "data-read": "tile", text: weightText(share(a, b)) }));
  canvas.addEventListener("mousemove", (e) => { const rect = canvas.getBoundingClientRect(); say(clamp(Math.floor(((e.clientY - rect.top) / rect.height) * r), 0, r - 1), clamp(Math.floor(((e.clientX - rect.left) / rect.width) * c), 0, c - 1)); });
  box.replaceChildren(el("figure", { role: "img", "aria-label": `Map of the matrix in ${r} by ${c} tiles` }, canvas, el("figcaption", { text: `${r} × ${c} tiles; down: the words that look, across: the words looked at. Colour: the share of a tile’s rows.` })), legend(page, most, low));
}

// A number for every word as a strip: the mean and the range of what falls on a pixel.
function profile(page, title, numbers, label) {
  const width = 640, height = 54, n = numbers.length, bins = Math.min(n, width), high = [], mean = [];
  for (let b = 0; b < bins; b++) {
    let top = -Infinity, total = 0;
    const [from, to] = [edge(b, bins, n), edge(b + 1, bins, n)];
    for (let m = from; m < to; m++) { total += numbers[m]; if (numbers[m] > top) top = numbers[m]; }
    high.push(top); mean.push(total / (to - from));
  }
  const most = Math.max(...high) || 1, best = largest(numbers), x = (b) => (b * width) / bins;
  const area = (y) => `M0 ${height}` + y.map((v, b) => `L${x(b)} ${height - (v / most) * height}H${x(b + 1)}`).join("") + `L${width} ${height}Z`;
  const average = sum(numbers) / n;
  return el("figure", { class: "profile" }, el("figcaption", {}, title, el("span", { class: "who" }, `mean ${weightText(average)}, largest ${weightText(numbers[best])} at `, word(label(best)))),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: mean ${fixed(average, 3)}, largest ${fixed(numbers[best], 3)}` }, svg("path", { class: "range", d: area(high) }), svg("path", { class: "mean", d: area(mean) })));
}

async function exactRows(page, source, box, own, again) {
  const { rows, cols } = page.stack, row = await source.row(own.row);
  const best = row ? topOf(row, 12) : [];
  box.replaceChildren(el("h2", { text: "Exact rows" }), el("div", { class: "chips", role: "group", "aria-label": "Rows this page holds" }, source.rows.map((i) => el("button", { class: "chip", "data-key": `row-${i}`, "aria-pressed": String(i === own.row), style: i === own.row ? { "--colour": "var(--accent)" } : {}, onclick: () => again(i) }, named(rows, i)))),
    row ? profile(page, `where ${named(rows, own.row)} looks`, row, (n) => cols.label(n)) : "",
    el("ol", { class: "best" }, best.map((j) => el("li", {}, word(named(cols, j)), el("span", { class: "lanes" }, el("span", { class: "lane", style: { "--colour": "var(--accent)", "--w": `${(100 * row[j]) / row[best[0]]}%` } }, el("i"), el("b", { "data-row": own.row, "data-j": j, text: weightText(row[j]) })))))));
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
  const { rows, cols } = page.stack, other = page.stack.same ? peak.map((w, i) => (peakAt[i] === i ? 0 : w)) : peak;
  const best = topOf(other, 20).filter((i) => other[i] > 0);
  return [el("h2", { text: "Strongest links" }), el("div", { class: "scroll" }, table(page.stack.same ? "The largest weights between two words, one a row" : "The largest weights of the matrix, one a row", ["from", "to", "weight"], best.map((i) => [word(named(rows, i)), word(named(cols, peakAt[i])), peak[i]])))];
}

// ── Training: every head over the steps ───────────────────────────────────────────────────────────────────────────

const STRIPS = {
  entropy: ["entropy, as a share of the most it could be", "Faint is sharp. A row that fades and stays so is a head that collapsed."],
  max_score: ["largest score", "A row that grows strong to the right is a head whose scores explode."],
};

function training(page, box) {
  const { steps, strips } = page.header, own = (page.training ??= { at: strips.map(() => null) });
  strips.forEach((one, s) => {
    const table_ = page.header.array(one.values), n = steps.length, heads = one.heads.length, paint = page.paint;
    const finite = table_.filter((x) => Number.isFinite(x)), [low, high] = [Math.min(0, ...finite), Math.max(one.what === "entropy" ? 1 : 0, ...finite)];
    const part = (h, c) => { const x = table_[h * n + c]; return Number.isFinite(x) ? (x - low) / (high - low || 1) : x > 0 ? 1 : 0; };
    const canvas = heat(heads, n, (h, c) => paint.tint(part(h, c)));
    canvas.style.setProperty("height", `${clamp(heads * 14, 60, 420)}px`);
    const told = el("p", { class: "readout", "aria-live": "polite" }), curve = el("div", {});
    const look = (h, c) => {
      own.at[s] = h;
      told.replaceChildren(el("bdi", { text: one.heads[h][0] }), ` head ${one.heads[h][1]}, step ${count(steps[c])} `, el("b", { "data-read": one.what, text: fixed(table_[h * n + c], 3) }));
      curve.replaceChildren(lineOf(steps, table_.subarray(h * n, (h + 1) * n), low, high));
    };
    const menu = choice("head", `train-${one.what}`, one.heads.map(([layer, head], h) => [h, `${layer.length > 40 ? "…" + layer.slice(-39) : layer} · ${head}`]), own.at[s] ?? 0, (h) => look(Number(h), n - 1));
    canvas.addEventListener("mousemove", (e) => { const r = canvas.getBoundingClientRect(), h = clamp(Math.floor(((e.clientY - r.top) / r.height) * heads), 0, heads - 1); menu.querySelector("select").value = h; look(h, clamp(Math.floor(((e.clientX - r.left) / r.width) * n), 0, n - 1)); });
    box.append(el("figure", { class: "train" }, el("h2", { text: STRIPS[one.what][0] }), el("p", { class: "hint", text: STRIPS[one.what][1] }), canvas, el("p", { class: "ends" }, el("span", { text: `step ${count(steps[0])}` }), el("span", { text: `step ${count(steps[n - 1])}` })), el("div", { class: "controls" }, menu), told, curve,
      behind(STRIPS[one.what][0], () => [["step", ...one.heads.map(([layer, head]) => `${layer} · ${head}`)], steps.map((step, c) => [count(step), ...one.heads.map((_, h) => table_[h * n + c])])])));
    const sign = one.what === "entropy" ? -1 : 1;
    look(own.at[s] ?? largest(range(heads).map((h) => sign * table_[h * n + n - 1])), n - 1);
    menu.querySelector("select").value = own.at[s];
  });
}

function lineOf(steps, numbers, low, high) {
  const width = 640, height = 90, first = steps[0], last = steps.at(-1);
  const points = steps.map((step, c) => `${last > first ? ((step - first) / (last - first)) * width : width / 2},${height - ((numbers[c] - low) / (high - low || 1)) * height}`);
  return svg("svg", { class: "wide", viewBox: `-4 -6 ${width + 8} ${height + 12}`, role: "img", "aria-label": `from ${fixed(numbers[0], 3)} to ${fixed(numbers.at(-1), 3)}` },
    svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }), svg("polyline", { class: "curve", points: points.filter((p) => !p.includes("NaN")).join(" "), style: { stroke: "var(--accent)" } }));
}

// ── The views, in the order of their tabs ─────────────────────────────────────────────────────────────────────────

const some = (page, fits) => page.book?.stacks.some(fits) ?? false;
const short = (stack) => !stack.long && stack.heads.length > 0;
const withVectors = (stack) => short(stack) && stack.heads.some((head) => head.layer.q !== undefined);

const VIEWS = {
  spotlight: { name: "Spotlight", look: "Follow the lines from the lit word: the thicker, the more of it is made of that other word. Point at another word, or click to keep it lit.", stack: (s) => short(s) && s.same, when: (p) => some(p, (s) => short(s) && s.same), build: spotlight },
  cross: { name: "Two sentences", look: "The lit word above looks into the sentence below: which of its words does it draw on?", stack: (s) => short(s) && !s.same, when: (p) => some(p, (s) => short(s) && !s.same), build: spotlight },
  long: { name: "Long input", look: "A strong column is a word everybody looks at, a strong diagonal is the neighbourhood; single strong tiles are ties worth a closer look.", stack: (s) => s.long && s.heads.length > 0, when: (p) => some(p, (s) => s.long && s.heads.length > 0), build: long },
  walk: { name: "Walk", look: "Read downwards: how a score becomes a weight, and weights become the output, number by number.", stack: short, when: (p) => some(p, short), build: walk },
  play: { name: "Play", look: "Turn the scale up until one word takes everything, and down until all are alike; then change the rules.", stack: withVectors, when: (p) => some(p, withVectors), build: play },
  square: { name: "Square", look: "Each row is one word looking, each column one word looked at. A strong column is a word everybody looks at, a diagonal is a habit of place.", stack: short, when: (p) => some(p, short), build: square },
  overview: { name: "All heads", look: "Every head in one picture: find the odd one out, and click to open it.", when: (p) => (p.book?.total ?? 0) > 1, build: overview },
  training: { name: "Training", look: "Time runs to the right, one row a head: look for rows that change colour for good.", when: (p) => p.header.kind === "training", build: training },
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
