// Square: all weights of a head.

import { clamp, fixed, largest, sum, weightText } from "./numbers.js";
import { behind, el, hatching, heat, svg, word } from "./elements.js";
import { fitChoice, headChoice, readingTicks, stackChoice } from "./controls.js";
import { outside } from "./window.js";

export function square(page, box) {
  const bar = el("div", { class: "controls" }), stage = el("div", { class: "matrix" });
  const message = el("p", { class: "readout", "aria-live": "polite" });
  box.append(bar, message, stage, behind("Weights", () => {
    const { rows, cols, w } = page.head.sheet(page.state);
    return [["", ...cols.names.map(word), "sum"], w.map((row, i) => [word(rows.names[i]), ...row, sum(row)])];
  }));
  let drawn = null;
  return (resized) => {
    const sheet = page.head.sheet(page.state);
    if (resized === true || drawn?.sheet !== sheet || drawn.fit !== page.state.fit) {
      bar.replaceChildren(...[stackChoice(page), headChoice(page), ...readingTicks(page), fitChoice(page)].filter(Boolean));
      drawn = matrix(page, stage, sheet);
    }
    const [i, j] = page.state.cell ?? [Math.max(0, sheet.rows.at[page.state.word]), null];
    drawn.mark(i, j);
    const row = sheet.w[i] ?? [], key = j ?? largest(row);
    const number = row.length && (sheet.masked(i, key) || (j === null && !(row[key] !== 0)))
      ? el("span", { class: "who", "data-read": "cell", text: j === null ? outside(page.head, i) ? "looks elsewhere" : "looks at nothing" : "the mask forbids it" })
      : el("b", { "data-read": "cell", text: fixed(row[key], 4) });
    // Without a cell that is pointed at, the one where the row looks most, if it looks anywhere.
    const where = j === null && sheet.named(i) === null ? [] : [el("span", { class: "arrow", text: " → " }), word(sheet.cols.names[key] ?? "")];
    message.replaceChildren(word(sheet.rows.names[i] ?? ""), ...where, number, el("span", { class: "who", text: `row sum ${fixed(sum(row), 3)}` }));
  };
}

// Cells on a canvas; names, row sums and the marked row and column above it.
function matrix(page, stage, sheet) {
  const { rows, cols, w } = sheet, { paint } = page, { fit } = page.state,
    most = fit ? Math.max(...w.map((row) => row[largest(row)])) || 1 : 1, [m, n] = [rows.labels.length,
      cols.labels.length];
  const [left, top, right] = [widthOf(rows.names), widthOf(cols.names), 78];
  const tall = Math.max(360, innerHeight - top - 120);
  const cell = clamp(Math.min(stage.clientWidth - left - right, Math.max(tall, 24 * m)) / n, 1, 56);
  // Of few rows and many columns, the rows are as high as their names.
  const rise = m < n ? Math.max(cell, Math.min(20, tall / m)) : cell, [width, height] = [cell * n, rise * m];
  const canvas = heat(m, n, (i, j) => paint.cell(w[i][j], most));
  for (const [name, size] of Object.entries({ left, top, width, height })) canvas.style.setProperty(name, `${size}px`);
  const place = { left, top, cell, rise, width, height };
  const [rowNames, colNames] = [names(rows.names, place, rise, false), names(cols.names, place, cell, true)];
  const [across, down] = [svg("rect", { class: "marker" }), svg("rect", { class: "marker" })];
  const over = svg("svg", {
    width: left + width + right, height: top + height + 6, tabindex: 0, "data-key": "matrix", role: "img",
    "aria-label": "The attention matrix. Arrow keys move from cell to cell.",
  }, rowNames.filter(Boolean), colNames.filter(Boolean), rowSums(w, place),
    ...hatch(sheet, place), across, down);
  pointAt(page, over, sheet, place);
  stage.replaceChildren(canvas, over, legend(page, most, fit ? "fitted: " : ""));
  // Around small cells the frames stand outside: they must not cover what they mark.
  const frame = (node, { x, y, width: wide, height: high }) => {
    const air = wide && Math.min(wide, high) < 8 ? 1.25 : 0;
    for (const [key, value] of Object.entries({ x: x - air, y: y - air, width: wide && wide + 2 * air, height: high + 2 * air })) node.setAttribute(key, value);
  };
  const mark = (i, j) => {
    frame(across, { x: left, y: top + i * rise, width, height: rise });
    frame(down, { x: left + (j ?? 0) * cell, y: top, width: j === null ? 0 : cell, height });
    rowNames.forEach((node, r) => node && node.classList.toggle("on", r === i));
    colNames.forEach((node, c) => node && node.classList.toggle("on", c === j));
  };
  return { sheet, mark, fit };
}

// Cells that the mask forbids are hatched, and weights that are not numbers crossed: neither is a weight of 0.
function hatch(sheet, place) {
  const broken = (i, j) => Number.isNaN(sheet.w[i][j]), masked = (i, j) => sheet.masked(i, j);
  return [...(sheet.head.layer.mask_name ? filled(sheet, place, "hatch", masked) : []),
    ...(sheet.w.some((row) => row.some(Number.isNaN)) ? filled(sheet, place, "crosses", broken) : [])];
}

// Some of the cells under a pattern of lines, or of crosses; one path for all of them.
function filled({ rows, cols }, { left, top, cell, rise }, id, holds) {
  const runs = [];
  rows.groups.forEach((_, i) => {
    for (let j = 0, from = -1; j <= cols.groups.length; j++) {
      const here = j < cols.groups.length && holds(i, j);
      if (here && from < 0) from = j;
      if (!here && from >= 0) {
        runs.push(`M${left + from * cell} ${top + i * rise}h${(j - from) * cell}v${rise}h${(from - j) * cell}z`);
        from = -1;
      }
    }
  });
  return runs.length ? [hatching(id), svg("path", { class: "masked", fill: `url(#${id})`, d: runs.join("") })] : [];
}
const LINE = 15; // of names, in pixels
const axisName = (text) => (text.length > 12 ? text.slice(0, 11) + "…" : text);

// How wide the longest name is, in pixels, with some air; bold, as the marked one is.
function widthOf(labels) {
  const ctx = el("canvas", {}).getContext("2d");
  ctx.font = "700 0.8rem system-ui, sans-serif";
  return Math.ceil(Math.max(16, ...labels.map((text) => ctx.measureText(axisName(text)).width))) + 14;
}

// Names beside the rows or above the columns; where cells are small, every so many.
function names(labels, { left, top }, size, upright) {
  const step = Math.max(1, Math.ceil(LINE / size));
  return labels.map((text, n) => {
    if (n % step) return null;
    const middle = (n + 0.5) * size;
    const where = upright ? { transform: `translate(${left + middle} ${top - 8}) rotate(-90)` } : { x: left - 8,
      y: top + middle, "text-anchor": "end" };
    return svg("text", { class: "name", "dominant-baseline": "central", ...where, text: axisName(text) });
  });
}

function rowSums(w, { left, top, rise, width }) {
  const x = left + width + 8, step = Math.max(1, Math.ceil(11 / rise));
  const bar = (total, i) => svg("rect", { class: "sum", x, y: top + (i + 0.2) * rise, height: Math.max(1, 0.6 * rise),
    width: 26 * Math.min(1, total || 0) });
  const number = (total, i) => svg("text", { class: "tiny", x: x + 30, y: top + (i + 0.5) * rise,
    "dominant-baseline": "central", text: fixed(total, 2) });
  return [svg("text", { class: "tiny", x, y: top - 8, text: "row sums" }),
    w.map((row, i) => (i % step ? null : svg("g", {}, bar(sum(row), i), rise > 9 && number(sum(row), i))))];
}

export const ARROWS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };

// Pointer and arrow keys choose a cell; a click lights its row.
function pointAt(page, over, { rows, cols }, { left, top, cell, rise }) {
  const [m, n] = [rows.labels.length, cols.labels.length];
  const at = (event) => {
    const box = over.getBoundingClientRect();
    const [i, j] = [Math.floor((event.clientY - box.top - top) / rise),
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

export function legend(page, most, sign = "") {
  const { paint } = page;
  return el("p", { class: "legend", "aria-hidden": "true" }, "0", heat(1, 64, (_, c) => paint.cell(c / 63)),
    `${sign}${sign || most !== 1 ? weightText(most) : "1"}`,
    swatches(page.book?.stacks[page.state.stack].heads.some(({ layer }) => layer.masked), page.header.nan > 0));
}
// What stands for no weight: hatched what the mask forbids, in a colour of its own what is not a number.
export const swatches = (masked, broken) => [masked && el("span", {}, el("i", { class: "swatch" }), "masked"),
  broken && el("span", {}, el("i", { class: "swatch", style: { background: "rgb(var(--broken))" } }), "not a number")];
