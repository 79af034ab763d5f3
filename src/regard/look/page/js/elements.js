// Elements of the document: tables, bars, heat maps and colours. Text of the subject becomes textContent alone.

import { clamp, edge, range, weightText } from "./numbers.js";

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
export const el = (tag, props, ...children) => make(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => make(document.createElementNS("http://www.w3.org/2000/svg", tag), props,
  children);
// A word in its own direction, whatever stands around it.
export const word = (text) => el("bdi", { class: "token", text: text.length > 60 ? text.slice(0, 59) + "…" : text,
  title: text.length > 24 ? text : undefined });

export function choice(label, key, options, value, onchange) {
  const menu = el("select", { "data-key": key, onchange: (e) => onchange(e.target.value) },
    options.map(([id, text]) => el("option", { value: id, text })));
  menu.value = value;
  return el("label", { class: "field" }, el("span", { text: label }), menu);
}

export function tick(label, key, on, onchange) {
  return el("label", { class: "tick" }, el("input", { type: "checkbox", "data-key": key, checked: on,
    onchange: (e) => onchange(e.target.checked) }), el("span", {}, label));
}

// The table behind a picture; written when it is opened.
export function behind(caption, write) {
  const box = el("div", { class: "scroll" });
  const fold = el("details",
    { class: "behind", ontoggle: () => { if (fold.open) box.replaceChildren(table(caption, ...write())); } },
    el("summary", { text: "The same as a table" }), box);
  fold.write = write;
  return fold;
}

export function table(caption, head, rows) {
  const cell = (x) => (x instanceof Node ? x : document.createTextNode(typeof x === "number" ? weightText(x) : x));
  return el("table", {}, el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, head.map((x) => el("th", { scope: "col" }, cell(x))))),
    el("tbody", {}, rows.map((row) => el("tr", {},
      row.map((x, n) => (n ? el("td", {}, cell(x)) : el("th", { scope: "row" }, cell(x))))))));
}

// A sentence for a mouse, and the one for a finger.
export const hands = (mouse, touch) => [el("span", { class: "by-mouse", text: mouse }), el("span", { class: "by-touch", text: touch })];

// A bar of a share of the width with its number, and several under one another.
export const lane = (colour, share, text, props, before) => el("span",
  { class: "lane", style: { "--colour": colour, "--w": `${100 * (share || 0)}%`, "--was": `${100 * (before || 0)}%` } },
  el("i"), before !== undefined && el("span", { class: "ghost" }), el("b", { ...props, text }));
export const lanes = (all) => el("span", { class: "lanes" }, all);

// Colours of the theme, read from the style sheet: one hue for weights, two for signed numbers.
export function palette(root) {
  const read = (name) => getComputedStyle(root).getPropertyValue(name).trim().split(/\s+/).map(Number);
  const stops = range(5).map((n) => read(`--tint-${n}`));
  const [minus, plus] = [read("--minus"), read("--plus")];
  const blend = (a, b, t) => a.map((x, c) => Math.round(x + (b[c] - x) * t));
  const shades = range(1025).map((m) => {
    const at = m / 256, n = Math.min(3, Math.floor(at));
    return blend(stops[n], stops[n + 1], at - n);
  });
  const broken = read("--broken"); // of what is not a number
  const tint = (x) => (Number.isNaN(x) ? broken : shades[Math.round(clamp(x, 0, 1) * 1024)]);
  const signed = (x) => (Number.isNaN(x) ? broken : blend(stops[0], x < 0 ? minus : plus, Math.min(1, Math.abs(x))));
  // A weight up to the largest one; below 0, which stands for what the mask forbids, there is no colour.
  const cell = (w, most = 1) => (w < 0 ? null : tint(shade(w, most)));
  return { tint, signed, cell, blend, broken, wash: read("--wash")[0], css: ([r, g, b]) => `rgb(${r} ${g} ${b})`,
    ink: (rgb) => (luminance(rgb) > 0.179 ? "#000" : "#fff") };
}

// How light a colour is, by WCAG: at 0.179 black and white stand out from it alike, by 4.6 to 1.
function luminance(rgb) {
  const [r, g, b] = rgb.map((x) => (x <= 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Small weights must be seen beside large ones: colour goes with a root of the weight.
export const shade = (w, most) => (most > 0 ? (w / most) ** 0.6 : 0);

// A heat map of rows × cols numbers, one pixel each; the style sheet makes the pixels large, and hatches those without a
// colour.
export function heat(rows, cols, colour) {
  const canvas = el("canvas", { class: "heat", width: cols, height: rows, "aria-hidden": "true" });
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(Math.max(1, cols), Math.max(1, rows));
  for (let r = 0, at = 0; r < rows; r++) for (let c = 0; c < cols; c++, at += 4) {
    const rgb = colour(r, c);
    if (!rgb) { canvas.classList.add("hatched"); continue; }
    image.data[at] = rgb[0]; image.data[at + 1] = rgb[1]; image.data[at + 2] = rgb[2]; image.data[at + 3] = 255;
  }
  ctx.putImageData(image, 0, 0);
  return canvas;
}

// The same in at most so many cells a side, where a picture has fewer pixels than numbers: a cell has that of its colours
// which is farthest from the ground, or that of what is not a number, so that none is lost; it is hatched where all are.
export function pooledHeat(rows, cols, most, paint, colour) {
  const [m, n] = [Math.min(rows, most), Math.min(cols, most)], ground = paint.tint(0);
  const far = (rgb) => (rgb === paint.broken ? 999 : rgb ? Math.abs(rgb[0] - ground[0]) + Math.abs(rgb[1] - ground[1]) + Math.abs(rgb[2] - ground[2]) : -1);
  return heat(m, n, (r, c) => {
    let best = null;
    for (let i = edge(r, m, rows); i < edge(r + 1, m, rows); i++) for (let j = edge(c, n, cols); j < edge(c + 1, n, cols); j++) {
      const rgb = colour(i, j);
      if (far(rgb) > far(best)) best = rgb;
    }
    return best;
  });
}

// The pattern of an id: slanted lines, of "crosses" in both directions.
export const hatching = (id) => svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  svg("line", { class: "hatching", x1: 0, x2: 0, y1: 0, y2: 6 }), id === "crosses" && svg("line", { class: "hatching", x1: 0, x2: 6, y1: 0, y2: 0 }));

// A vector as a strip of signed cells.
export function strip(vector, most, paint, label) {
  const canvas = heat(1, vector.length, (_, c) => paint.signed(most ? vector[c] / most : 0));
  return el("span", { class: "strip", role: "img", "aria-label": label }, canvas);
}
