// Compare: two recordings on the words of both, a pair of heads at a time, and what changed.

import { brief, clamp, count, edge, fixed, largest, range } from "./numbers.js";
import { behind, el, heat, lane, lanes, pooledHeat, word } from "./elements.js";
import { THUMBNAIL } from "./atlas.js";
import { numbered, patchColumns, unitsOf } from "./book.js";
import { apart, copyWords } from "./sentence.js";
import { ARROWS, legend, swatches } from "./square.js";

const HEADS = 36; // pairs of heads that are drawn before all of them are asked for
const signed = (x) => Math.sign(x) * Math.abs(x) ** 0.6;

// What an axis holds: words, or the patches of an image.
export function withUnits(axis) {
  return "unit" in axis ? axis : Object.assign(axis, unitsOf(patchColumns({ tokens: axis.labels, special: axis.special })));
}

// A pair of heads: both patterns on the words of both texts. Long texts are tiles, with the largest change of each.
class Pair {
  constructor(page, spec, n) {
    Object.assign(this, spec);
    this.tiled = spec.tiled; this.n = n; this.group = page.header.groups[spec.group];
    Object.values(this.group).forEach(withUnits);
    const flat = page.header.array(spec.w), [, rows, cols] = page.header.shape(spec.w), size = rows * cols;
    this.rows = rows; this.cols = cols;
    this.sides = [flat.subarray(0, size), flat.subarray(size, 2 * size)];
    this.changes = spec.tiled ? flat.subarray(2 * size) : null;
  }
  // What a picture shows of a weight: −1 where the mask forbids it.
  shown(side, i, j) { return this.sides[side][i * this.cols + j]; }
  at(side, i, j) { return Math.max(0, this.shown(side, i, j)); }
  // Whether a text lacks the word of the row or of the column: then the other one has it alone.
  lacks(side, i, j) { return !this.tiled && ["rows", "cols"].some((axis, n) => this.group[axis].side[n ? j : i] === 2 - side); }
  masked(i, j) { return [0, 1].every((side) => this.shown(side, i, j) < 0 || this.lacks(side, i, j)); }
  lonely(i) { return !this.tiled && this.group.rows.side[i] > 0; }
  // What the second gives more; to a word that a text lacks it gives nothing. NaN in a row that only one text has.
  change(i, j) {
    if (this.changes) return this.changes[i * this.cols + j];
    if (this.lonely(i)) return NaN;
    const [a, b] = [0, 1].map((side) => (this.lacks(side, i, j) ? 0 : this.at(side, i, j)));
    return b - a;
  }
  // A weight in words, where it is no number.
  text(side, i, j, write) {
    return this.lacks(side, i, j) ? lacking(this) : this.shown(side, i, j) < 0 ? "masked" : write(this.at(side, i, j));
  }
  // The word at a row or column, or the first word of a tile: as it is written, and with its number where it occurs
  // several times.
  label(axis, n) { return this.group[axis].labels[this.place(axis, n)]; }
  numbered(axis, n) {
    const part = this.group[axis];
    return (part.names ??= numbered(part.labels))[this.place(axis, n)];
  }
  place(axis, n) { return edge(n, this[axis], this.group[axis].labels.length); }
}

export function compare(page, box) {
  const { header } = page;
  page.pairs ??= header.heads.map((spec, n) => new Pair(page, spec, n));
  const own = (page.compare ??= { all: false, cell: null });
  const bar = el("p", {}), hero = el("div", { class: "hero", "aria-live": "polite" }, bar), 
    words = el("div", { class: "stage one" });
  const { unit } = page.pairs[0].group.rows;
  const lists = el("div", { class: "bars" }), maps = el("div", { class: "triple" });
  const cells = el("div", { class: "flow", role: "group", "aria-label": "Pairs of heads, those that differ most first" });
  box.append(hero, words, lists, el("h2", { text: `Every ${unit}: both patterns, and what changed` }), maps,
    el("h2", { text: "Pairs of heads, those that differ most first" }),
    el("p", { class: "hint", text: "The change, and below it layer·head and the divergence of its rows in nats, 0 to 0.69." }), cells,
    behind(`Weights of the lit ${unit}`, () => compareTable(page)));
  let drawn = null;
  return () => {
    const pair = page.pairs[page.state.pair], i = clamp(page.row, 0, pair.rows - 1);
    if (drawn?.pair !== pair || drawn.paint !== page.paint || drawn.width !== page.width) {
      drawn = { pair, paint: page.paint, width: page.width, mark: threeMaps(page, pair, maps, own) };
      const { labels, units } = pair.group.rows;
      words.replaceChildren(compareWords(page, pair), pair.tiled ? el("p", { class: "hint", text: `Of ${count(labels.length)} ${units}, each that is written here `
        + `stands for up to ${Math.ceil(labels.length / pair.rows)} from it on, with the largest weight or change among them.` }) : "");
    }
    headlineOf(page, pair, i, own, bar);
    lightWords(page, pair, i, words);
    lists.replaceChildren(compareBars(page, pair, i));
    drawn.mark(i, own.cell);
    page.keepingFocus(() => cells.replaceChildren(...pairCells(page, own)));
  };
}

// What the lit word gives to the word that changed most, or to the one pointed at, in either recording.
function headlineOf(page, pair, i, own, bar) {
  const { names } = page.header, size = (j) => { const x = Math.abs(pair.change(i, j)); return Number.isNaN(x) ? -1 : x; };
  const [row, j] = own.cell ?? [i, largest(range(pair.cols).map(size))], by = pair.change(row, j);
  const part = (side) => el("span", { class: "side-of" }, el("i", { class: "dot", style: { "--colour": page.colour(side) } }), " ", el("bdi", { text: names[side] }), " ",
    el("b", { text: `${pair.lacks(side, row, j) ? "has " : ""}${pair.text(side, row, j, (w) => fixed(w, 2))}` }));
  bar.replaceChildren(el("i"), el("span", { class: "tie" }, word(pair.numbered("rows", row)), el("span", { class: "arrow", text: " → " }),
    word(pair.numbered("cols", j)), " ", el("b", { class: "weight", "data-read": "change",
      text: Number.isNaN(by) ? "–" : `${by > 0 ? "+" : ""}${fixed(by, 2)}` })),
    el("span", { class: "who" }, part(0), "  ", part(1), `  ${pair.name}; `,
      pair.js === null ? "NaN" : `divergence ${fixed(pair.js, 3)} nats, total variation ${fixed(pair.total_variation, 3)}`));
}

// The words of both texts in one order; those of one text alone are marked.
function compareWords(page, pair) {
  const { labels, special, inside, side, units } = pair.group.rows, patches = pair.tiled ? 0 : pair.group.rows.patches, all = range(Math.min(pair.rows, 300));
  const key = (event, n) => {
    const step = { ArrowRight: 1, ArrowDown: patches || 1, ArrowLeft: -1, ArrowUp: -(patches || 1), Home: -pair.rows, End: pair.rows }[event.key];
    if (!step) return;
    event.preventDefault();
    const to = clamp(n + step, 0, pair.rows - 1);
    page.set({ word: to, hover: null });
    page.root.querySelector(`[data-key="word-${to}"]`)?.focus();
  };
  return el("div", { class: `sentence${patches ? " patches" : all.length > 40 ? " many" : ""}`, role: "listbox", style: { "--patches": patches }, oncopy: copyWords,
    "aria-label": `${units} of both; the arrow keys move the light` }, all.map((n) => el("span", {
    class: ["word", ...(pair.tiled ? [] : [special.includes(n) && "special", inside.includes(n) && "inside", patches && !special.includes(n) && "patch",
      side[n] && "lonely"].filter(Boolean))].join(" "), role: "option",
    "data-key": `word-${n}`, "aria-label": patches && !special.includes(n) ? `patch ${labels[n]}` : undefined, title: side[n] && !pair.tiled ? `only in ${page.header.names[side[n] - 1]}` : undefined,
    onkeydown: (event) => key(event, n), onclick: () => page.set({ word: n, hover: null }),
    onpointerenter: (event) => { if (event.pointerType !== "touch") page.set({ hover: n }); },
    onpointerleave: () => page.set({ hover: null }),
  }, el("span", { class: "num up" }), word(pair.tiled ? pair.label("rows", n) : labels[n]), el("span", { class: "num down" },
    !pair.tiled && side[n] ? el("span", { class: "only", text: `only ${"ab"[side[n] - 1]}` }) : ""))));
}

// Every word in the colour of the one that gives it more, and by how much. Rows and columns are the same words in
// attention within a text; else the words that look stand alone.
function lightWords(page, pair, i, box) {
  const same = pair.rows === pair.cols && String(pair.group.rows.labels) === String(pair.group.cols.labels);
  const wash = box.firstChild.classList.contains("patches") ? 100 : page.paint.wash;
  [...box.firstChild.children].forEach((node, n) => {
    const by = same ? pair.change(i, n) : NaN, share = Math.round(wash * Math.abs(signed(by)) || 0);
    node.classList.toggle("lit", n === i);
    node.classList.toggle("shaded", share > 15);
    node.classList.toggle("unseen", same && pair.masked(i, n));
    node.setAttribute("aria-selected", String(n === i));
    node.setAttribute("tabindex", n === i ? "0" : "-1");
    const colour = page.colour(by < 0 ? 0 : 1);
    node.querySelector(".token").style.setProperty("background", `color-mix(in srgb, ${colour} ${share}%, transparent)`);
    const mark = node.querySelector(".up");
    mark.setAttribute("data-by", String(Math.abs(by)));
    mark.replaceChildren(...(Math.abs(by) >= 0.045 ? [el("span", { style: { color: colour }, text: `${by > 0 ? "+" : ""}${fixed(by, 2)}` })] : []));
  });
  apart(box.firstChild);
}

function compareBars(page, pair, i) {
  const { names } = page.header, size = (j) => Math.abs(pair.change(i, j)) || 0;
  const order = range(pair.cols).filter((j) => !pair.masked(i, j)).sort((a, b) => size(b) - size(a)).slice(0, 8);
  const bars = (j) => [0, 1].map((side) => lane(page.colour(side), pair.lacks(side, i, j) ? 0 : pair.at(side, i, j) || 0, pair.text(side, i, j, brief)));
  return el("div", {}, el("p", { class: "keys" }, names.map((name, side) => el("span", {}, el("i", { class: "dot", text: "ab"[side],
    style: { "--colour": page.colour(side) } }), " ", el("bdi", { text: name })))),
  el("ol", { class: "best tall", "aria-label": `${pair.group.cols.units} whose weights changed most` },
    order.map((j) => el("li", {}, word(pair.numbered("cols", j)), lanes(bars(j))))));
}

// Both patterns and the change, with one marked row; pointing at a cell reads it in all three.
function threeMaps(page, pair, box, own) {
  const { paint } = page, { names } = page.header, marks = [];
  const pixels = Math.floor(box.clientWidth / (page.narrow ? 2 : 3)) - 20; // of a pattern
  const map = (title, colour) => {
    const mark = el("span", { class: "rowmark", "aria-hidden": "true" }), cell = el("span", { class: "cellmark", "aria-hidden": "true" });
    const canvas = pooledHeat(pair.rows, pair.cols, pixels, paint, colour);
    const stage = el("div", { class: "three", tabindex: "0", role: "img", "data-key": `map-${marks.length}`,
      "aria-label": `${title}. Arrow keys move from cell to cell.`,
      onpointermove: (event) => point(event), onpointerleave: () => go(null), onclick: () => { if (own.cell) page.set({ word: own.cell[0],
        hover: null }); }, onkeydown: (event) => keyed(event) }, canvas, mark, cell);
    marks.push([mark, cell]);
    return el("figure", {}, el("figcaption", {}, el("bdi", { text: title })), stage);
  };
  const go = (where) => { if (String(where) !== String(own.cell)) { own.cell = where; page.refresh(); } };
  const point = (event) => {
    const place = event.currentTarget.getBoundingClientRect();
    const [i, j] = [Math.floor(((event.clientY - place.top) / place.height) * pair.rows),
      Math.floor(((event.clientX - place.left) / place.width) * pair.cols)];
    go(i >= 0 && i < pair.rows && j >= 0 && j < pair.cols ? [i, j] : null);
  };
  const keyed = (event) => {
    const move = ARROWS[event.key];
    if (event.key === "Enter" && own.cell) page.set({ word: own.cell[0], hover: null });
    if (!move) return;
    event.preventDefault();
    const [i, j] = own.cell ?? [clamp(page.row, 0, pair.rows - 1), -1];
    go([clamp(i + move[0], 0, pair.rows - 1), clamp(j + move[1], 0, pair.cols - 1)]);
  };
  const missing = missingColour(paint), weight = (side) => (i, j) => (pair.lacks(side, i, j) ? missing : paint.cell(pair.shown(side, i, j)));
  box.replaceChildren(map(names[0], weight(0)), map(names[1], weight(1)),
    map(`${names[1]} minus ${names[0]}`, (i, j) => changeColour(paint, pair, i, j)),
    el("div", { class: "keys" }, legend(page, 1), el("p", { class: "legend signed", "aria-hidden": "true" }, el("i", { text: "gives more:" }), el("bdi", { text: names[0] }), "−1",
      heat(1, 65, (_, c) => paint.signed(signed((c - 32) / 32))), "1", el("bdi", { text: names[1] })),
    missingWords(pair) ? el("span", {}, el("i", { class: "dot", style: { "--colour": paint.css(missing) } }), ` one ${pair.group.cols.patches ? "image" : "text"} has ${lacking(pair)}`) : "",
    el("span", { class: "legend" }, swatches(pair.sides.some((side) => side.includes(-1)), pair.js === null)),
    pair.tiled ? el("span", { text: "a cell is the largest weight, or change, in it" }) : ""));
  return (i, at) => marks.forEach(([mark, cell]) => {
    mark.style.setProperty("top", `${(100 * i) / pair.rows}%`);
    mark.style.setProperty("height", `${100 / pair.rows}%`);
    cell.hidden = !at;
    if (at) for (const [name, x, all] of [["top", at[0], pair.rows], ["left", at[1], pair.cols]]) {
      cell.style.setProperty(name, `${(100 * x) / all}%`);
      cell.style.setProperty(name === "top" ? "height" : "width", `${100 / all}%`);
    }
  });
}

// Words that one text lacks, and what the masks of both forbid, have no change.
const missingColour = (paint) => paint.blend(paint.tint(0), paint.tint(2), 0.12);
function changeColour(paint, pair, i, j) {
  return pair.lonely(i) ? missingColour(paint) : pair.masked(i, j) ? null : paint.signed(signed(pair.change(i, j)));
}
const lacking = (pair) => `no such ${pair.group.cols.unit}`;
const missingWords = (pair) => !pair.tiled && ["rows", "cols"].some((axis) => pair.group[axis].side.some(Boolean));

// The change of every pair of heads as a thumbnail.
function pairCells(page, own) {
  const { pairs, paint } = page, shown = own.all ? pairs : pairs.slice(0, HEADS), chosen = page.state.pair;
  if (own.paint !== paint) Object.assign(own, { paint, pictures: new Map() });
  const picture = (pair) => {
    if (!own.pictures.has(pair.n)) own.pictures.set(pair.n, pooledHeat(pair.rows, pair.cols, THUMBNAIL, paint, (i, j) => changeColour(paint, pair, i, j)));
    return own.pictures.get(pair.n);
  };
  const choose = (n) => {
    const group = pairs[n].group === pairs[chosen].group;
    own.cell = null;
    page.set({ pair: n, hover: null, ...(!group && { word: pairs[n].cell[0] }) });
  };
  const key = (event, n) => {
    const move = ARROWS[event.key], across = Math.max(1, Math.floor((event.currentTarget.parentNode.clientWidth + 6) / 86));
    if (!move) return;
    event.preventDefault();
    page.root.querySelector(`[data-key="pair-${clamp(n + move[1] + move[0] * across, 0, shown.length - 1)}"]`)?.focus();
  };
  return [...shown.map((pair, n) => el("button", { class: `headcell${n === chosen ? " on" : ""}`, "data-key": `pair-${n}`,
    tabindex: n === Math.min(chosen, shown.length - 1) ? 0 : -1, "aria-pressed": String(n === chosen), title: pair.name,
    "aria-label": `${pair.name}: divergence ${pair.js === null ? "NaN" : fixed(pair.js, 3)}`,
    style: { "--colour": "var(--ink)", "--strength": clamp((pair.js ?? 0) / Math.LN2, 0, 1) }, onclick: () => choose(n),
    onkeydown: (event) => key(event, n),
  }, picture(pair), el("span", { text: `${pair.brief} ${pair.js === null ? "NaN" : fixed(pair.js, 2)}` }))),
  ...(pairs.length > shown.length ? [el("button", { class: "chip quiet", "data-key": "pairs-all", text: `all ${pairs.length}`,
    onclick: () => { own.all = true; page.keepingFocus(() => page.refresh()); page.writeAddress(); } })] : [])];
}

function compareTable(page) {
  const pair = page.pairs[page.state.pair], i = clamp(page.state.word, 0, pair.rows - 1), { names } = page.header;
  const number = (side, j) => pair.text(side, i, j, (w) => w);
  return [[pair.group.cols.unit, ...names, "change"], range(pair.cols).map((j) => [word(pair.numbered("cols", j)), number(0, j), number(1, j), pair.masked(i, j) || Number.isNaN(pair.change(i, j)) ? "–" : fixed(pair.change(i, j), 3)])];
}
