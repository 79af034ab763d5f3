// Walk: the six steps of attention for one word.

import { brief, clamp, dot, fixed, largest, mix, range, softmax, sum } from "./numbers.js";
import { behind, el, strip, tick, word } from "./elements.js";
import { headChoice, stackChoice, wordChoice } from "./controls.js";
import { walkOf } from "./address.js";

export function walk(page, box) {
  const embedded = page.header.embedded?.stack === page.state.stack ? page.header.embedded : null;
  const own = (page.walk ??= walkOf(page.stack));
  if (!embedded) own.source = "head";
  if (own.cell >= page.stack.cols.length) own.cell = null; // of a longer sentence
  const bar = el("div", { class: "controls" });
  const message = el("p", { class: "message" });
  const grid = el("div", { class: "scroll" });
  const cells = el("div", { class: "cells", "aria-live": "polite" });
  let steps = null;
  box.append(bar, message, grid, cells, behind("The steps", () => walkTable(page, steps)));
  const again = (change) => { Object.assign(own, change); page.keepingFocus(() => page.refresh()); page.writeAddress(); };
  return () => {
    const i = page.state.word;
    steps = own.source === "head" ? stepsOfHead(page.head, i) : stepsOfWords(page, embedded, own, i);
    bar.replaceChildren(...walkControls(page, own, embedded, again));
    message.textContent = steps.message;
    grid.replaceChildren(stepTable(page, steps, i, own.cell, (j) => again({ cell: own.cell === j ? null : j })));
    const shown = `${own.source} ${page.head.id} ${i}`;
    if (shown !== own.shown) reveal(grid, largest(steps.w));
    own.shown = shown;
    cells.replaceChildren(...dotProduct(page, steps, i, own.cell));
  };
}

// A line for every word that is looked at; what the page does not hold is left out.
function walkTable(page, { what, scaleText, raw, s, masked, hidden, w }) {
  const { cols } = page.stack, columns = [[what, raw], [`scaled ${scaleText}`, s], ["masked", hidden ? masked : null], ["weight", w]].filter(([, x]) => x);
  return [[cols.unit, ...columns.map(([name]) => name)], range(cols.length).map((j) => [word(cols.name(j)), ...columns.map(([, x]) => x[j])])];
}

// The table of a long sentence begins where most of the weight is, unless that is seen from its beginning.
function reveal(grid, j) {
  const cell = grid.querySelector(`.w[data-j="${j}"]`);
  if (!cell) return;
  grid.scrollLeft = 0;
  const { right } = cell.getBoundingClientRect(), end = grid.getBoundingClientRect().right;
  if (right > end) grid.scrollLeft = right - end + grid.clientWidth / 2;
}

function walkControls(page, own, embedded, again) {
  const source = (id, text) => el("button", {
    class: "chip", "data-key": `walk-${id}`, "aria-pressed": String(own.source === id), text,
    onclick: () => again({ source: id, cell: null }),
  });
  const project = (x) => tick(["W", el("sub", { text: x })], `walk-W${x}`, own[x],
    (on) => again({ [x]: on, cell: null }));
  const both = [source("head", "a recorded head"), source("words", "word vectors")];
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
    message: describeWords(own), what: "q·k", scaleText: scale === 1 ? "by nothing" : `÷ √${size}`, size, values: size,
    q: vectors("q")[i], k: vectors("k"), v, raw, s, masked: s, hidden: false, w, y: mix(w, v),
  };
}

function describeWords(own) {
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
  const q = head.vectors("q")?.[i], k = head.vectors("k"), v = head.vectors("v"), scores = head.part("s");
  const raw = q ? keys.map((j) => dot(q, k[j])) : null;
  const s = scores ? keys.map((j) => scores[i * head.j + j]) : raw?.map((x) => x * layer.scale);
  const masked = s?.map((x, j) => (head.visible(i, j) ? x : -Infinity));
  return {
    message: describeHead(head, s, v), what: "q·k", scaleText: layer.score_name ?? scaling(layer),
    size: layer.d, values: v?.[0].length, mask: layer.mask_name, sink: layer.sink,
    q, k, v, raw, s, masked, hidden: masked?.includes(-Infinity), w, y: v && mix(w, v),
  };
}

function describeHead({ layer, name }, scores, values) {
  const sentences = [];
  if (!scores && layer.score === "Precomputed") sentences.push("These weights came ready-made: only the last three of six steps are known.");
  else if (!scores) sentences.push("Of this head the page holds the weights alone.");
  if (!values) sentences.push("Without values the walk ends at the weights.");
  if (scores && values) sentences.push(`${layer.name ? `The recorded ${name}` : "One row of these weights"}, number by number.`);
  return sentences.join(" ");
}

function scaling({ scale, d }) {
  if (scale === 1 || scale === undefined) return "by nothing";
  return Math.abs(scale * Math.sqrt(d) - 1) < 1e-6 ? `÷ √${d}` : `× ${fixed(scale, 4)}`;
}

function stepTable(page, steps, i, picked, onpick) {
  const { rows, cols, same } = page.stack, t = cols.length;
  const words = range(t).map((j) => el("th", { scope: "col", class: same && i === j ? "self" : "" },
    word(cols.name(j))));
  const lines = [...stepsToWeights(page, steps, t, picked, onpick), ...(steps.v ? stepsToOutput(page, steps, t) : [])];
  return el("table", { class: "steps" }, el("caption", { class: "hidden", text: "The six steps" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, word(rows.name(i)), " looks at"), words)),
    el("tbody", {}, lines));
}

function stepLine(n, name, shape, cells, props) {
  const title = [el("span", { class: "step", text: n }), el("span", { text: name }),
    el("span", { class: "shape", text: shape })];
  return el("tr", props, el("th", { scope: "row" }, el("div", {}, title)), cells);
}

const peak = (x) => Math.max(...Array.from(x, Math.abs));

function stepsToWeights(page, steps, t, picked, onpick) {
  const { paint } = page, size = (x) => Math.max(...x.filter(Number.isFinite).map(Math.abs), 0) || 1;
  // A signed bar under every score: which is large is seen before it is read.
  const mark = (v, most) => el("i", { class: v < 0 ? "score minus" : "score", style: { "--w": `${Number.isFinite(v)
    ? (100 * Math.abs(v)) / most : 0}%` } });
  const numbers = (x) => { const most = size(x); return x.map((v) => el("td", { class: v === -Infinity ? "masked"
    : "" },
    fixed(v, 2), mark(v, most))); };
  const largestProduct = steps.raw ? size(steps.raw) : 1;
  // One stop for the tab key, and the arrow keys from there: a long sentence has hundreds of products.
  const reached = picked ?? largest(steps.w), travel = (event, j) => {
    const to = { ArrowLeft: j - 1, ArrowRight: j + 1, Home: 0, End: t - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.currentTarget.closest("tr").querySelector(`[data-key="dot-${clamp(to, 0, t - 1)}"]`)?.focus();
  };
  const product = (x, j) => el("td", {}, el("button", {
    class: "cell", "data-key": `dot-${j}`, "aria-pressed": String(picked === j), text: fixed(x, 2), tabindex: j === reached ? 0 : -1,
    title: "the dot product, cell by cell; the arrow keys go to the next one", onclick: () => onpick(j), onkeydown: (event) => travel(event, j),
  }), mark(x, largestProduct));
  const weight = (w, j) => {
    const colour = paint.cell(w);
    return el("td", { class: steps.masked?.[j] === -Infinity ? "w masked" : "w", "data-j": j, style: { background: paint.css(colour), color: paint.ink(colour) },
      text: brief(w) });
  };
  const total = sum(steps.w), lines = [];
  if (steps.raw) {
    const most = Math.max(...steps.k.map(peak)), key = (k, j) => el("td", {},
      strip(Array.from(k.slice(0, COORDINATES)), most, paint, `the key of ${page.stack.cols.name(j)}`));
    lines.push(stepLine("1", "q, k and v; here k", `q 1×${steps.size} · k ${t}×${steps.size}`, steps.k.map(key)));
    lines.push(stepLine("2", steps.what, `1×${steps.size} · ${steps.size}×${t}`, steps.raw.map(product)));
  }
  if (steps.s) {
    lines.push(stepLine("3", `${steps.raw ? "scaled" : "score"} ${steps.scaleText}`, `1×${t}`, numbers(steps.s)));
    const masked = steps.hidden ? `masked by ${steps.mask}` : steps.mask ? `${steps.mask} hides nothing here` : "mask: none";
    lines.push(stepLine("", masked, `1×${t}`, numbers(steps.masked), { class: steps.hidden ? "" : "pale" }));
  }
  const name = steps.sink ? `softmax, with a sink that takes ${fixed(1 - total, 3)}` : "softmax";
  lines.push(stepLine("4", name, `1×${t}, sum ${fixed(total, 2)}`, steps.w.map(weight)));
  return lines;
}

function stepsToOutput(page, steps, t) {
  const { paint } = page, few = 32;
  const most = Math.max(...steps.v.map((v, j) => steps.w[j] * peak(v)));
  const weighted = (v, j) => {
    const label = `${fixed(steps.w[j], 3)} times the value of ${page.stack.cols.name(j)}`;
    return el("td", {}, strip(Array.from(v.slice(0, few), (x) => x * steps.w[j]), most, paint, label));
  };
  const have = steps.v[0].length, shown = have < steps.values ? `first ${have} of ${steps.values}` : steps.values;
  const first = steps.y.slice(0, 6).map((x) => fixed(x, 2)).join(", ");
  const output = el("td", { colspan: t, class: "y" }, el("div", {}, strip(steps.y.slice(0, few), peak(steps.y), paint, "the output"),
    el("span", { class: "vector", text: `y\u00a0=\u00a0[${first}${steps.values > 6 ? ", …" : ""}]  (${shown} coordinates)` })));
  return [stepLine("5", "weight × value", `${t}×${steps.values}`, steps.v.map(weighted)),
    stepLine("6", "sum: the output y", `1×${steps.values}`, output)];
}

// The coordinates of a query and a key and their products, so many a line.
const COORDINATES = 16;
function dotProduct(page, steps, i, j) {
  if (!steps.q) return [];
  if (j === null) return [el("p",
    { class: "hint", text: "Choose a product q·k to see it cell by cell." })];
  const a = Array.from(steps.q), b = Array.from(steps.k[j]), products = a.map((x, n) => x * b[n]), total = steps.raw[j];
  const { paint } = page;
  const line = (name, x, from) => {
    const most = Math.max(...x.map(Math.abs)) || 1;
    const cells = x.slice(from, from + COORDINATES).map((v) => {
      const colour = paint.signed(v / most);
      return el("td", { style: { background: paint.css(colour), color: paint.ink(colour) }, text: fixed(v, 2) });
    });
    return el("tr", {}, el("th", { scope: "row", text: name }), cells);
  };
  const parts = range(Math.ceil(a.length / COORDINATES)).map((n) => n * COORDINATES);
  const message = a.length < steps.size
    ? `The first ${a.length} of ${steps.size} coordinates; the other products sum to ${fixed(total - sum(products), 3)}.`
    : `All ${steps.size} products sum to ${fixed(total, 3)}.`;
  return [
    el("h3", {}, "q of ", word(page.stack.rows.name(i)), " · k of ", word(page.stack.cols.name(j)),
      ` = ${fixed(total, 3)}`),
    el("div", { class: "scroll" }, el("table", { class: "products" },
      parts.map((from) => el("tbody", {}, line("q", a, from), line("k", b, from), line("q × k", products, from))))),
    el("p", { class: "hint", text: message }),
  ];
}
