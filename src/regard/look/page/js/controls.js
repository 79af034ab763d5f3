// Controls that several views share: what is read, which words, which head.

import { count, range, sum } from "./numbers.js";
import { choice, el, tick, word } from "./elements.js";
import { VIEWS } from "./views.js";

export const readingControls = (page) => [stackChoice(page), ...readingTicks(page)];

// What is left out, and what is read as one.
export function readingTicks(page) {
  const { rows, cols } = page.stack;
  const special = rows.special.size + cols.special.size > 0, merged = rows.words || cols.words;
  return [
    special ? tick("hide special tokens", "hide", page.state.hide, (hide) => page.set({ hide })) : null,
    merged ? tick("merge pieces to words", "merge", page.state.merge, (merge) => page.set({ merge })) : null,
    page.state.hide && special
      ? el("span", { class: "warn", text: "renormalised: the hidden tokens’ share is spread over the rest" }) : null,
  ];
}

// Colours have one scale, 0 to 1; to see small differences it can end at the largest weight instead.
export const fitChoice = (page) => tick("fit the colours to the largest weight", "fit", page.state.fit,
  (fit) => page.set({ fit }));

// A window shows a part of every row; how much of the chosen one lies outside, in the first head that is shown, is said.
export function windowNote({ stack: { window: [i0, i1, j0, j1], rows, base, same, heads }, state, head }) {
  const span = (a, b) => `${count(a)}–${count(b - 1)}`, share = Math.round(100 * (1 - sum(head.row(state.word))));
  const outside = Number.isNaN(share) ? "the weights of " : `${share} % of the weight of `, verb = Number.isNaN(share) ? "are not numbers" : "is outside";
  return [`${rows.unit === "patch" ? "Patches" : "Words"} ${span(i0, i1)}${same ? "" : ` looking at ${span(j0, j1)}`} of ${count(base.rows.length)}; `
    + outside, word(rows.name(state.word)), `${heads.length > 1 ? ` in ${head.name}` : ""} ${verb}.`];
}

export function stackChoice(page) {
  const fits = page.book.stacks.filter((s) => VIEWS[page.state.view].stack?.(s) ?? true);
  if (fits.length < 2) return null;
  const name = (s) => {
    if (s.window) return `a window of ${count(s.rows.length)} ${s.rows.units}`;
    const names = s.heads.map((head) => head.layer.name);
    const first = (names[0] ?? "").split(".")[0] || "layers";
    const [rows, cols] = [s.rows, s.cols].map(({ length, units }) => `${count(length)} ${units}`);
    return `${first}: ${s.same ? `among ${rows}` : `from ${rows} to ${s.rows.unit === s.cols.unit ? count(s.cols.length) : cols}`}`;
  };
  return choice("sentence", "stack", fits.map((s) => [s.n, name(s)]), page.state.stack,
    (n) => page.setStack(Number(n)));
}

export function headChoice(page) {
  const heads = page.stack.heads;
  if (heads.length < 2) return null;
  return choice("head", "head", heads.map((head) => [head.id, head.name]), page.head.id,
    (id) => page.set({ chosen: [Number(id)] }));
}

export function wordChoice(page) {
  const { rows } = page.stack;
  return choice(rows.unit, "word", range(rows.length).map((n) => [n, repeated(rows, n)]), page.state.word,
    (n) => page.set({ word: Number(n), hover: null }));
}

// A word that occurs several times gets a number.
function repeated(rows, n) {
  const name = rows.label(n), places = rows.tokens ? range(rows.length).filter((m) => rows.tokens[m] === name) : [n];
  const short = name.length > 30 ? name.slice(0, 29) + "…" : name;
  return places.length > 1 ? `${short} (${places.indexOf(n) + 1} of ${places.length})` : short;
}
