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
  scaled: { name: "scaled dot", formula: "q\u00b7k / \u221ad", of: (q, k) => dot(q, k) / Math.sqrt(q.length) },
  dot: { name: "dot", formula: "q\u00b7k", of: dot },
  cosine: { name: "cosine", formula: "q\u00b7k / |q||k|", of: (q, k) => dot(q, k) / (Math.sqrt(dot(q, q) * dot(k, k)) || 1) },
  gaussian: { name: "Gaussian", formula: "\u2212|q \u2212 k|\u00b2 / 2", of: (q, k) => { let s = 0; for (let n = 0; n < q.length; n++) s -= (q[n] - k[n]) ** 2; return s / 2; } },
  additive: { name: "additive", formula: "\u03a3 tanh(q + k)", of: (q, k) => { let s = 0; for (let n = 0; n < q.length; n++) s += Math.tanh(q[n] + k[n]); return s; } },
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
  if (x === -Infinity) return "\u2212\u221e";
  if (!Number.isFinite(x)) return "\u2013";
  const text = Math.abs(x) >= 1e5 ? Math.abs(x).toExponential(2) : Math.abs(x).toFixed(digits);
  return (x < 0 && Number(text) !== 0 ? "\u2212" : "") + text;
}

const weightText = (w) => (w > 0 && w < 5e-4 ? w.toExponential(1) : fixed(w, 3));
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
const word = (text) => el("bdi", { class: "token", text: text.length > 60 ? text.slice(0, 59) + "\u2026" : text, title: text.length > 24 ? text : undefined });

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
  const total = sum(header.layers.map((layer) => layer.heads)) + sum(header.without.map((x) => x[2]));
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
    this.brief = layer.name ? `${layer.index}\u00b7${head}` : `${head}`;
  }
  // The nth of a layer's arrays, which are (held, a, b) or shared by all.
  part(name) {
    const ref = this.layer[name];
    if (ref === undefined) return null;
    const [many, a, b] = this.header.shape(ref);
    const per = name === "v" ? this.layer.per_value : 1;
    const at = many === 1 ? 0 : per > 1 ? Math.floor(this.head / per) : this.n;
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
  beyond(i) { const { layer, header, n } = this; return header.array(layer.beyond)[n * this.i + i]; }
  best(i) { const { layer, header, n } = this; return header.array(layer.best)[n * this.i + i]; }

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
    return { rows, cols, w, most: Math.max(...w.map((row) => row[largest(row)])), changed: cols.hidden.length > 0 };
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
function ranked(stack, i, layer) {
  const heads = stack.heads.filter((head) => layer === null || head.place === layer);
  return stack.long ? heads : [...heads].sort((a, b) => b.beyond(i) - a.beyond(i) || a.id - b.id);
}
function firstTwo(heads, i) {
  if (heads.length < 2 || heads[0].stack.long) return heads.slice(0, 1);
  const first = heads[0], other = heads.find((head) => head.best(i) !== first.best(i));
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
      view: null, stack: start?.stack ?? 0, word: start?.word ?? 0, hover: null, hide: false, merge: false, theme: "auto",
      chosen: start?.asked.length ? start.asked.map(([place, h]) => this.book.heads.findIndex((x) => x.place === place && x.head === h)) : null,
      layer: start?.asked.length ? null : start?.layer ?? null, cell: null,
    };
    this.views = Object.entries(VIEWS).filter(([, view]) => view.when(this));
    this.state.view = this.views[0][0];
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
    const { chosen, word: i, layer } = this.state;
    return chosen ? chosen.map((id) => this.book.heads[id]) : firstTwo(ranked(this.stack, i, layer), i);
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
        el("button", { class: "quiet theme", "data-key": "theme", "aria-label": "Change between light and dark", title: "light / dark", onclick: () => this.turn() }, "\u25d0")),
      this.views.length > 1 ? tabs : null, this.main, this.foot());
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
  const strength = rows.map((i) => Math.max(...stack.heads.map((head) => head.beyond(i))));
  return rows[largest(strength)] ?? 0;
}

// Controls that several views share.

function readingControls(page) {
  const { rows, cols } = page.stack;
  const special = rows.special.size + cols.special.size > 0, merged = rows.words || cols.words;
  return [
    page.book.stacks.filter((s) => VIEWS[page.state.view].stack?.(s) ?? true).length > 1 ? stackChoice(page) : null,
    special ? tick("hide special tokens", "hide", page.state.hide, (hide) => page.set({ hide })) : null,
    merged ? tick("merge pieces to words", "merge", page.state.merge, (merge) => page.set({ merge })) : null,
    page.state.hide && special ? el("span", { class: "warn", text: "renormalised: the hidden tokens\u2019 share is spread over the rest" }) : null,
  ];
}

function stackChoice(page) {
  const fits = page.book.stacks.filter((s) => VIEWS[page.state.view].stack?.(s) ?? true);
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
  const short = name.length > 30 ? name.slice(0, 29) + "\u2026" : name;
  return places.length > 1 ? `${short} (${places.indexOf(n) + 1} of ${places.length})` : short;
}

// ── Spotlight: one sentence, or two, and the lines from one word ──────────────────────────────────────────────────

function spotlight(page, box) {
  const { rows, cols } = page.head.sheet(page.state), same = page.stack.same;
  const hero = el("div", { class: "hero", "aria-live": "polite" });
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const upper = sentence(page, rows, true);
  const lower = same ? null : sentence(page, cols, false);
  const stage = el("div", { class: `stage ${same ? "one" : "two"}` }, lines, same ? null : el("p", { class: "side", text: "looks" }), upper, same ? null : el("p", { class: "side", text: "is looked at" }), lower);
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Heads" });
  const list = el("div", { class: "bars" });
  const told = el("h2", {});
  box.append(hero, stage, el("div", { class: "controls" }, readingControls(page)), told, chips, list,
    behind("Weights of the lit word", () => spotlightTable(page)));
  return () => {
    const i = rows.at[page.row] < 0 ? 0 : rows.at[page.row];
    const sheets = page.heads.map((head) => head.sheet(page.state));
    headline(page, hero, sheets, i);
    light(page, same ? [upper] : [upper, lower], sheets, i);
    draw(lines, stage, upper, same ? upper : lower, sheets, i, same);
    const shownHeads = ranked(page.stack, page.state.word, page.state.layer);
    told.replaceChildren(page.stack.heads.length > 1 ? "Heads that say most about " : "Where it looks: ", word(rows.labels[i] ?? ""));
    chips.replaceChildren(...headChips(page, shownHeads));
    chips.hidden = page.stack.heads.length < 2;
    list.replaceChildren(bars(page, sheets, i));
  };
}

function sentence(page, read, asks) {
  const words = el("div", { class: "sentence", role: asks ? "listbox" : "list", "aria-label": asks ? "Words; the arrow keys move the light" : "Words that are looked at", dir: read.rtl ? "rtl" : "ltr" });
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
  hero.replaceChildren(...sheets.slice(0, 4).map(({ rows, cols, w }, n) => {
    const j = largest(w[i]);
    return el("p", { style: { "--colour": page.colour(n) } }, el("i", { class: "dot" }), el("span", { class: "tie" }, word(rows.labels[i]), el("span", { class: "arrow", text: "\u2192" }), word(cols.labels[j])),
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
    const bands = weights.map((w, h) => `color-mix(in srgb, ${page.colour(h)} ${Math.round(70 * w ** 0.7)}%, transparent) ${(100 * h) / weights.length}% ${(100 * (h + 1)) / weights.length}%`);
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
    const { rows, cols, w } = head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]), j = largest(w[i]), n = on.indexOf(head.id);
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
    sheets.map(({ w }, h) => el("span", { class: "lane", style: { "--colour": page.colour(h), "--w": `${100 * w[i][j]}%` } }, el("i"), el("b", { text: weightText(w[i][j]) })))))));
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
    bar.replaceChildren(...[wordChoice(page), embedded ? el("span", { class: "group", role: "group", "aria-label": "What is walked through" }, pick("words", "word vectors"), pick("head", "a recorded head")) : null,
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
  const name = (on, x) => (on ? `${x} = x\u00b7W${x}` : `${x} = x`);
  return {
    told: own.q || own.k || own.v
      ? `The model\u2019s own word vectors, before positions, through its first layer\u2019s projections: ${name(own.q, "q")}, ${name(own.k, "k")}, ${name(own.v, "v")}.`
      : "Basic self-attention on the model\u2019s own word vectors, before positions: no parameters, q = k = v = x. A word is most like itself; switch the projections on and see that change.",
    raw, scale, scaleText: scale === 1 ? "not scaled" : `\u00f7 \u221a${size}`, s, masked: s, hidden: false, w, q: vectors(own.q, "q")[i], k: vectors(own.k, "k"), v, y: mix(w, v), size, values: size, what: "q\u00b7k",
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
    told: (s ? "" : "These weights came ready-made: of the six steps only the last three are known. ")
      + (v ? "" : "Without values the walk ends at the weights. ") + (s && v ? `The recorded ${head.name}, number by number.` : ""),
    raw, scale: layer.scale, scaleText: plain ? (layer.scale === 1 ? "not scaled" : `\u00d7 ${fixed(layer.scale, 4)} (1/\u221a${layer.d} = ${fixed(1 / Math.sqrt(layer.d), 4)})`) : layer.score_name,
    s, masked, hidden: masked && masked.includes(-Infinity), mask: layer.mask_name, w, q, k, v, y: v && mix(w, v), size: layer.d, values: v && v[0].length, what: plain || raw ? "q\u00b7k" : "similarity", sink: layer.sink,
  };
}

function stepTable(page, steps, i, onpick, picked) {
  const { cols } = page.stack, t = cols.length, paint = page.paint;
  const line = (n, name, shape, cells, cls) => el("tr", { class: cls }, el("th", { scope: "row" }, el("span", { class: "step", text: n }), el("span", { class: "name" }, name), el("span", { class: "shape", text: shape })), cells);
  const numbers = (x, digits = 2) => x.map((v) => el("td", { text: fixed(v, digits) }));
  const most = steps.v ? Math.max(...steps.v.map((row, j) => steps.w[j] * Math.max(...Array.from(row, Math.abs)))) : 0;
  const rows = [];
  const can = (j) => el("td", {}, el("button", { class: "cell", "data-key": `dot-${j}`, "aria-pressed": String(picked === j), title: "the dot product, cell by cell", text: fixed(steps.raw[j], 2), onclick: () => onpick(j) }));
  if (steps.raw) rows.push(line("1", steps.what, `1\u00d7${steps.size} \u00b7 ${steps.size}\u00d7${t}`, range(t).map(can)));
  if (steps.s) rows.push(line("2", steps.raw ? `scaled: ${steps.scaleText}` : `score: ${steps.scaleText}`, `1\u00d7${t}`, numbers(steps.s)));
  if (steps.s) rows.push(line("3", steps.hidden ? `masked: ${steps.mask}` : "masked: nothing is", `1\u00d7${t}`, numbers(steps.masked), steps.hidden ? "" : "pale"));
  rows.push(line("4", steps.sink ? `softmax, with a sink that takes ${fixed(1 - sum(steps.w), 3)}` : "softmax", `1\u00d7${t}, sum ${fixed(sum(steps.w), 2)}`, steps.w.map((w, j) => {
    const colour = paint.tint(shade(w, 1));
    return el("td", { class: "w", style: { background: paint.css(colour), color: paint.ink(colour) }, "data-j": j, text: fixed(w, 3) });
  })));
  if (steps.v) {
    const shownSize = steps.v[0].length < steps.values ? `first ${steps.v[0].length} of ${steps.values}` : `${steps.values}`;
    rows.push(line("5", "weight \u00d7 value", `${t}\u00d7${steps.values}`, steps.v.map((v, j) => el("td", {}, strip(Array.from(v.slice(0, 32), (x) => x * steps.w[j]), most, paint, `${fixed(steps.w[j], 3)} times the value of ${cols.label(j)}`)))));
    rows.push(line("6", "sum: the output y", `1\u00d7${steps.values}`, el("td", { colspan: t, class: "y" }, strip(steps.y.slice(0, 32), Math.max(...steps.y.map(Math.abs)), paint, "the output"),
      el("span", { class: "vector", text: `y = [${steps.y.slice(0, 6).map((x) => fixed(x, 2)).join(", ")}${steps.values > 6 ? ", \u2026" : ""}]  (${shownSize} coordinates)` }))));
  }
  return el("table", { class: "steps" }, el("caption", { class: "hidden", text: "The six steps" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, word(page.stack.rows.label(i)), " looks at"), range(t).map((j) => el("th", { scope: "col", class: page.stack.same && i === j ? "self" : "" }, word(cols.label(j)))))), el("tbody", {}, rows));
}

function dotProduct(page, steps, i, j) {
  if (j === null || !steps.q) return steps.raw ? [el("p", { class: "hint", text: "Choose a number of the first row to see its dot product cell by cell." })] : [];
  const a = Array.from(steps.q), b = Array.from(steps.k[j]), products = a.map((x, n) => x * b[n]), paint = page.paint, rest = steps.raw[j] - sum(products);
  const most = (x) => Math.max(...x.map(Math.abs)) || 1;
  const line = (name, x, extra) => el("tr", {}, el("th", { scope: "row" }, name), x.map((v) => { const c = paint.signed(v / most(x)); return el("td", { style: { background: paint.css(c), color: paint.ink(c) }, text: fixed(v, 2) }); }), el("td", { class: "total" }, extra ?? ""));
  const more = a.length < steps.size;
  return [el("h3", {}, "q of ", word(page.stack.rows.label(i)), " \u00b7 k of ", word(page.stack.cols.label(j)), ` = ${fixed(steps.raw[j], 3)}`),
    el("div", { class: "scroll" }, el("table", { class: "products" }, el("tbody", {}, line("q", a), line("k", b), line("q \u00d7 k", products, more ? `+ ${fixed(rest, 2)}` : `\u03a3 ${fixed(steps.raw[j], 2)}`)))),
    more ? el("p", { class: "hint", text: `The first ${a.length} of ${steps.size} coordinates; the other products sum to ${fixed(rest, 3)}.` }) : el("span")];
}
