// The state of the page as the fragment of its address: a link, a reload and the history lead to the same picture.
// It holds places and numbers alone, no text of the subject.

import { range, SIMILARITIES } from "./numbers.js";

const headPlace = (head) => `${head.place}.${head.head}`;

export function addressOf(page) {
  const { state: { view, stack, word, chosen, hide, merge, fit, pair, all }, book, long: map } = page;
  const at = book?.stacks[stack], round = (...x) => x.map(Math.round).join(".");
  const fields = {
    v: view, s: stack && !at.window ? stack : null, win: at?.window ? [at.base.n, ...at.window].join(".") : null,
    w: book || page.pairs ? word : null, p: page.pairs ? pair : null, h: chosen?.map((id) => headPlace(book.heads[id])).join(",") || null,
    hide: hide ? 1 : null, merge: merge ? 1 : null, fit: fit ? 1 : at?.cols?.patches ? 0 : null,
    z: view === "long" && map?.view ? round(map.view.i0, map.view.i1, map.view.j0, map.view.j1) : null,
    c: view === "story" && page.story ? Math.round(100 * page.story.at) : null,
    m: view === "long" && ["mean", "beyond"].includes(map?.mode) ? map.mode : null,
    marks: view === "long" && map?.marks === false ? 0 : null, all: all || page.compare?.all ? 1 : null,
    ...(OWN[view] && page[view] ? OWN[view](page[view]) : null),
  };
  return `#${Object.entries(fields).filter(([, x]) => x !== null).map(([key, x]) => `${key}=${x}`).join("&")}`;
}

// What was chosen within one view; what is as it was at first is left out.
const OWN = {
  play: ({ similarity, power, causal, window, width, recorded, forbidden, order }) => ({
    sim: similarity === "recorded" ? null : similarity, x: Math.round(10 * power) || null, causal: causal ? 1 : null,
    near: window ? width : null, mask: recorded ? null : 0, out: forbidden.join(".") || null,
    order: order.some((n, at) => n !== at) ? order.join(".") : null,
  }),
  walk: ({ source, q, k, v, cell }) => ({ from: source === "words" ? source : null, dot: cell,
    on: source === "words" && (q || k || v) ? [q && "q", k && "k", v && "v"].filter(Boolean).join("") : null }),
  overview: ({ by, sort, mode, x, y, target, pair }) => ({ o: [by, sort, mode, x, y].join("."),
    to: sort === "given" ? target : null,
    vs: pair ? pair.map((one) => `${one.row}.${one.head}`).join(".") : null }),
};

const naturals = (text) => (/^\d+(\.\d+)*$/.test(text ?? "") ? text.split(".").map(Number) : []);

// Set the state by an address; whatever in it does not fit this page is left out.
export function readAddress(page, hash) {
  const fields = new URLSearchParams(hash.slice(1)), { state, book } = page;
  if (fields.has("v") && page.views.some(([id]) => id === fields.get("v"))) state.view = fields.get("v");
  if (page.header.kind === "comparison" && fields.has("w")) {
    const { heads, groups } = page.header, pair = indexOrFirst(fields.get("p"), heads.length);
    Object.assign(state, { pair, hover: null, word: indexOrFirst(fields.get("w"), groups[heads[pair].group].rows.labels.length) });
    page.compare = { all: fields.has("all"), cell: null };
  }
  if (!book || !fields.has("w")) return;
  const stack = windowOf(page, fields) ?? book.stacks[indexOrFirst(fields.get("s"), book.stacks.length)];
  const heads = (fields.get("h") ?? "").split(",").map((text) => stack.heads.find((head) => headPlace(head) === text)).filter(Boolean);
  const word = indexOrFirst(fields.get("w"), stack.rows.length);
  if (word !== state.word) state.target = null;
  Object.assign(state, { stack: stack.n, word, hover: null, cell: null, chosen: heads.length
    ? heads.map((head) => head.id) : null,
    all: fields.has("all"), hide: fields.has("hide"), merge: fields.has("merge"), fit: fields.has("fit") ? fields.get("fit") !== "0" : Boolean(stack.cols.patches) });
  if (stack.long) readMap(page, stack, fields);
  const at = Number(fields.get("c") ?? NaN) / 100;
  if (at > 0) page.story = { ...page.story, at, playing: null };
  if (state.view === "play") page.play = labOf(stack, fields);
  if (state.view === "walk") page.walk = walkOf(stack, fields);
  if (fields.has("o")) page.wantedAtlas = atlasOf(stack, fields);
}

// The Lab by an address, or as it is at first.
export function labOf({ same, rows, cols }, fields = new URLSearchParams()) {
  const sim = fields.get("sim") ?? "", power = Number(fields.get("x") ?? 0) / 10, near = naturals(fields.get("near"))[0];
  const order = naturals(fields.get("order")), all = range(rows.length);
  return {
    similarity: Object.hasOwn(SIMILARITIES, sim) ? sim : "recorded", power: Math.abs(power) <= 5 ? power : 0,
    causal: same && fields.has("causal"), window: same && near !== undefined, width: near ?? 2,
    recorded: fields.get("mask") !== "0",
    forbidden: [...new Set(naturals(fields.get("out")))].filter((j) => j < cols.length),
    order: same && order.length === all.length && all.every((n) => order.includes(n)) ? order : all,
  };
}

// Walk by an address, or as it is at first.
export function walkOf({ cols }, fields = new URLSearchParams()) {
  const words = fields.get("from") === "words", [cell] = naturals(fields.get("dot"));
  const on = (name) => words && (fields.get("on") ?? "").includes(name);
  return { source: words ? "words" : "head", q: on("q"), k: on("k"), v: on("v"), cell: cell < cols.length ? cell : null };
}

// What an address says of the atlas; names of numbers that the page does not have are left out there.
function atlasOf({ long, heads, cols }, fields) {
  const [by, sort, mode, x, y] = fields.get("o").split("."), [target] = naturals(fields.get("to"));
  const [row, head, row2, head2] = naturals(fields.get("vs")), fits = !long && heads.length && target < cols.length;
  return { by, x, y, mode: mode === "row" ? "row" : "pattern", target: fits ? target : null,
    sort: ["metric", "tie", fits && "given"].includes(sort) ? sort : "layer",
    pair: head2 === undefined ? null : [{ row, head }, { row: row2, head: head2 }] };
}

const indexOrFirst = (text, length) => { const n = Number(text ?? 0); return Number.isInteger(n) && n >= 0 && n < length
  ? n : 0; };

// A window of a long input exists once its queries and keys are there, or once a server has sent it; until then it is
// remembered.
function windowOf(page, fields) {
  const [n, i0, i1, j0, j1] = naturals(fields.get("win")), base = page.book.stacks[n];
  if (!base?.long || !(i0 < i1 && i1 <= base.rows.length && j0 < j1 && j1 <= base.cols.length && i1 - i0 <= 300
    && j1 - j0 <= 300)) return null;
  const there = page.book.stacks.find((stack) => stack.window && String(stack.window) === String([i0, i1, j0, j1]));
  if (there || base.heads.some((head) => head.stored.exact)) return there ?? page.addWindow(base, [i0, i1, j0, j1]);
  page.fetchWindow(base, [i0, i1, j0, j1]);
  return null;
}

function readMap(page, { rows, cols }, fields) {
  const [i0, i1, j0, j1] = naturals(fields.get("z")), fits = i0 < i1 && i1 <= rows.length && j0 < j1
    && j1 <= cols.length;
  page.wantedMap = { view: fits ? { i0, i1, j0, j1 } : null, mode: ["mean",
    "beyond"].includes(fields.get("m")) ? fields.get("m") : "max", marks: fields.get("marks") !== "0" };
}
