// The atlas: a thumbnail of every head, by layer or sorted, as a pattern or as the row of the lit word.

import { edge, fixed, range } from "./numbers.js";
import { el, heat } from "./elements.js";
import { ARROWS } from "./square.js";
import { LETTERS } from "./sentence.js";
import { rootOf } from "./window.js";

// Every head there is, also those whose weights the page does not hold, with its numbers.
export function everyHead(page) {
  const { metrics, all, thumbs } = page.header;
  return all.flatMap(([index, layer, heads, place], row) => range(heads).map((head) => ({
    row, index, layer, head, thumb: thumbs[row], number: head,
    name: layer || all.length > 1 ? `layer ${index}, head ${head}` : `head ${head}`,
    held: page.book.heads.find((one) => one.place === place && one.head === head),
    value: (by) => metrics[by][row]?.[head] ?? null,
  })));
}

// The pattern of a head in at most so many cells a side. A cell is the largest weight in it: none is lost; hatched is one
// whose weights the mask forbids.
export const THUMBNAIL = 48;
export function pattern(page, one) {
  const { paint } = page, { held } = one;
  if (held && !held.stack.long) return thumbnail(held.i, held.j, (i, j) => held.shown(i, j), paint);
  if (held) return thumbnail(...held.stored.tiles, (i, j) => held.stored.shown(i, j), paint);
  if (one.thumb === null || one.thumb === undefined) return null;
  // Stored as the root of the weight, in 253 steps; 254 is not a number, and 255 forbidden.
  const [, r, c] = page.header.shape(one.thumb), numbers = page.header.array(one.thumb), from = one.head * r * c;
  const weight = (x) => (x > 253 ? (x > 254 ? -1 : NaN) : (x / 253) ** 2);
  return thumbnail(r, c, (i, j) => weight(numbers[from + i * c + j]), paint);
}

function thumbnail(m, n, at, paint) {
  const [rows, cols] = [Math.min(m, THUMBNAIL), Math.min(n, THUMBNAIL)];
  return heat(rows, cols, (r, c) => {
    let best = -1;
    for (let i = edge(r, rows, m); i < edge(r + 1, rows, m); i++) {
      for (let j = edge(c, cols, n); j < edge(c + 1, cols, n); j++) best = Math.max(best, at(i, j));
    }
    return paint.cell(best);
  });
}

// The row of the lit word as a strip of bars, a full one 1.
export function rowStrip(page, one) {
  const { held } = one, { paint } = page, tall = 24;
  if (!held || held.stack !== page.stack || held.stack.long) return null;
  const { patches, special, length } = held.stack.cols, row = Float32Array.from({ length: held.j }, (_, j) => held.shown(page.state.word, j));
  if (patches) {
    const own = row.filter((_, j) => !special.has(j)), most = Math.max(...own), tall_ = (length - special.size) / patches;
    return heat(tall_, patches, (r, c) => paint.cell(own[r * patches + c], most));
  }
  const n = Math.min(row.length, 2 * THUMBNAIL);
  const most = range(n).map((c) => Math.max(...row.subarray(edge(c, n, row.length), edge(c + 1, n, row.length))));
  const [ground, bar] = [paint.tint(0), paint.tint(0.75)];
  const colour = (w, left) => (w < 0 ? null : Number.isNaN(w) ? paint.broken : left <= Math.round(tall * Math.sqrt(w)) ? bar : ground);
  return heat(tall, n, (r, c) => colour(most[c], tall - r));
}

// The picture of a cell, drawn once for a theme and, of rows, for a word.
function cellPicture(page, own, one) {
  const row = own.mode === "row" && !page.stack.long, key = `${one.row} ${one.head} ${row ? page.state.word : ""}`;
  if (own.paint !== page.paint || own.pictures.size > 5000) Object.assign(own, { paint: page.paint,
    pictures: new Map() });
  if (!own.pictures.has(key)) own.pictures.set(key, row ? rowStrip(page, one) : pattern(page, one));
  return own.pictures.get(key);
}

// What a head is sorted by, and whether the largest comes first.
export function ranking(page, own) {
  const { state } = page;
  if (own.sort === "given") return (one) => (one.held?.stack === page.stack && !one.held.stack.long
    && own.target !== null
    ? one.held.at(state.word, own.target) : null);
  if (own.sort === "tie") return (one) => (one.held?.stack === page.stack ? bestBeyond(one.held, state) : null);
  return (one) => one.value(own.by);
}

function bestBeyond(head, state) {
  const beyond = head.stack.long ? head.stored.best(state.word).beyond : head.sheet({ hide: false,
    merge: false }).best(state.word).beyond;
  return Number.isFinite(beyond) ? beyond : null;
}

export function sorted(heads, own, rank) {
  const least = own.sort === "metric" && own.by === "entropy"; // the sharpest head tells most
  const value = (one) => { const x = rank(one); return x === null ? Infinity : least ? x : -x; };
  return [...heads].sort((a, b) => value(a) - value(b) || a.row - b.row || a.head - b.head);
}

// All cells: a table of layers, or sorted one after the other.
export function grid(page, own, heads, act) {
  const rank = ranking(page, own), order = own.sort === "layer" ? heads : sorted(heads, own, rank);
  const numbers = heads.map(rank).filter((x) => x !== null), [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const part = (x) => (x === null ? 0 : high > low ? (x - low) / (high - low) : 0.5);
  const key = (event, one) => {
    const move = ARROWS[event.key];
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); act.open(one); return; }
    if (!move) return;
    event.preventDefault();
    const at = order.indexOf(one) + move[1] + move[0] * own.across;
    const next = own.sort === "layer" ? `head-${one.row + move[0]}-${one.head + move[1]}`
      : order[at] && `head-${order[at].row}-${order[at].head}`;
    page.root.querySelector(`[data-key="${next}"]`)?.focus();
  };
  const tray = page.heads.map((head) => rootOf(head).id), reached = order.includes(own.at) ? own.at : order[0];
  const cell = (one) => {
    const x = rank(one), entropy = own.sort !== "given" && own.sort !== "tie" && own.by === "entropy";
    const strength = entropy ? 1 - part(x) : part(x), n = one.held ? tray.indexOf(one.held.id) : -1;
    return el("button", {
      class: `headcell${n >= 0 ? " on" : ""}`, "data-key": `head-${one.row}-${one.head}`, tabindex: one === reached ? 0
        : -1,
      style: { "--strength": x === null ? 0 : strength, ...(n >= 0 && { "--colour": page.colour(n) }) },
      "aria-pressed": one.held ? String(n >= 0 && page.state.chosen !== null) : undefined,
      "aria-label": `${one.name}: ${x === null ? "unknown" : fixed(x, 2)}${n >= 0 ? `; shown as ${LETTERS[n]}` : ""}`,
      onmouseenter: () => act.look(one), onfocus: () => act.look(one), onkeydown: (e) => key(e, one),
      onclick: (e) => (e.shiftKey ? act.compare(one) : act.add(one)),
    }, cellPicture(page, own, one) ?? el("i", { class: "heat" }),
      el("span", {}, n >= 0 && el("b", { text: `${LETTERS[n]} ` }),
        own.sort === "layer" ? "" : `${one.layer ? `${one.index}·` : ""}${one.head} `,
        el("span", { text: x === null ? "–" : fixed(x, Math.abs(x) >= 10 ? 0 : Math.abs(x) >= 1 ? 1 : 2) })));
  };
  return own.sort === "layer" ? byLayer(page, own, heads, cell) : el("div", { class: "flow" }, order.map(cell));
}

function byLayer(page, own, heads, cell) {
  const { all } = page.header, widest = Math.max(...all.map(([, , count]) => count)), rows = all.map(() => []);
  for (const one of heads) rows[one.row].push(one);
  return el("table", { class: widest > 24 ? "grid dense" : "grid", style: { "--heads": widest } },
    el("caption", { class: "hidden", text: `${own.by.replaceAll("_", " ")} of every head` }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: all[0][1] ? "layer" : "" }),
      range(widest).map((h) => el("th", { scope: "col", text: String(h) })))),
    el("tbody", {}, all.map(([index, name], row) => el("tr", {},
      el("th", { scope: "row", title: name, text: all[0][1] ? String(index) : "" }), rows[row].map((one) => el("td", {}, cell(one)))))));
}
