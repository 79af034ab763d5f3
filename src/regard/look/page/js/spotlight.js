// Spotlight: one sentence, or two, and lines from the lit word.

import { brief, fixed, largest, range } from "./numbers.js";
import { outside } from "./window.js";
import { behind, el, lane, lanes, svg, word } from "./elements.js";
import { bestOf, ranked } from "./book.js";
import { LETTERS, light, sentence } from "./sentence.js";
import { drawLines } from "./lines.js";
import { fitChoice, readingControls } from "./controls.js";

const HOW = (word) => `Layer·head, the ${word} it is tied to, the weight, and by how much it exceeds the head’s habit: `
  + `the weight that the head gives that ${word}, or that distance, anyway. The most comes first.`;

export function spotlight(page, box) {
  const { rows, cols } = page.head.sheet(page.state), { same } = page.stack, many = page.stack.heads.length > 1;
  const hero = el("div", { class: "hero", "aria-live": "polite" });
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const queries = sentence(page, rows, true), keys = same ? queries : sentence(page, cols, false);
  const side = (text) => el("p", { class: "side", text });
  const stage = el("div", { class: `stage ${same ? "one" : "two"}` }, lines,
    same ? queries : [side(`these ${rows.units} look`), queries, keys, side(`at these${cols.patches ? " patches" : ""}`)]);
  stage.classList.toggle("pictured", Boolean(rows.patches || cols.patches));
  const message = el("h2", {}), list = el("div", { class: "bars" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Heads" });
  const scale = el("p", { class: "hint", "data-read": "fit" });
  box.append(hero, stage, el("div", { class: "controls" }, readingControls(page), cols.patches ? fitChoice(page) : null), scale, message,
    ...(many ? [el("p", { class: "hint", text: HOW(cols.unit) }), chips] : []), list,
    behind(`Weights of the lit ${rows.unit}`, () => spotlightTable(page)));
  return () => {
    const place = (i) => Math.max(0, rows.at[i]), i = place(page.row);
    const sheets = page.heads.map((head) => head.sheet(page.state));
    headline(page, hero, sheets, i);
    light(page, queries, keys, sheets, i);
    drawLines(lines, stage, queries, keys, sheets, i);
    scale.textContent = cols.patches && page.state.fit && sheets.length ? `fitted: the strongest colour is ${fixed(Math.max(...sheets.flatMap((sheet) =>
      [...sheet.w[i]].filter((_, n) => !cols.special[n]))), 3)}, the largest weight of a patch in this row` : "";
    const [before, after] = many ? ["Heads that say most about ", ""] : ["Where ", " looks"];
    message.replaceChildren(before, word(rows.names[i] ?? ""), after);
    chips.replaceChildren(...headChips(page, ranked(page)));
    list.replaceChildren(bars(page, sheets, i));
  };
}

// What the lit word is tied to in every head that is on; and where most of its weight goes, if that is elsewhere.
// Every entry has two lines of fixed height, whatever is written: what stands below must not move under the pointer.
function headline(page, hero, sheets, i) {
  const { hover, target } = page.state;
  hero.replaceChildren(...sheets.map((sheet, n) => {
    const { rows, cols, w } = sheet, most = largest(w[i]);
    const aimed = hover === null && target !== null ? cols.at[target] : -1;
    const key = aimed >= 0 ? aimed : sheet.named(i);
    const who = page.book.total > 1 ? [page.heads[n].name] : [];
    const far = outside(page.heads[n], rows.groups[i][0]), strongest = far ?? (key === null || most === key ? null : { name: cols.names[most], weight: w[i][most] });
    const rest = strongest ? [who.length ? "; " : "", "most goes to ", word(strongest.name), ` ${fixed(strongest.weight, 2)}`] : [];
    // The row of a decoder chooses the word after it: that is the word which its weights explain.
    const next = page.stack.writes ? rows.names[i + 1] : undefined;
    if (next !== undefined) who.unshift("writing ", word(next), who.length ? "; " : "");
    // A headline of 0.00 beside a large weight outside of the window would say the wrong thing.
    const tie = key === null || (far?.weight >= 0.1 && w[i][key] < 0.005) ? [word(rows.names[i]), el("span", { class: "nothing", text: far ? " looks elsewhere" : " looks at nothing" })]
      : [word(rows.names[i]), el("span", { class: "arrow", text: " → " }), word(cols.names[key]), " ",
        el("b", { class: "weight", text: fixed(w[i][key], 2) })];
    return el("p", { style: { "--colour": page.colour(n) } }, el("i", { class: "dot", text: sheets.length > 2
      ? LETTERS[n] : "" }),
      el("span", { class: "tie" }, tie), " ", el("span", { class: "who" }, who, rest));
  }));
  if (!sheets.length) hero.append(el("p", {}, el("span", { class: "who", text: "No head is on. Choose one below." })));
}

const CHIPS = 8;
function headChips(page, heads) {
  const on = page.heads.map((head) => head.id);
  const open = page.state.all, some = open ? heads : heads.slice(0, CHIPS);
  const extra = open ? [] : page.heads.filter((head) => !some.includes(head));
  const chips = [...some, ...extra].map((head) => {
    const { rows, cols, w } = head.sheet(page.state), i = Math.max(0, rows.at[page.row]),
      { beyond } = bestOf(head, page.state, page.row), j = head.sheet(page.state).named(i), n = on.indexOf(head.id);
    return el("button", {
      class: "chip", "data-key": `chip-${head.id}`, "aria-pressed": String(n >= 0),
        title: `${head.name}${head.layer.name ? ` (${head.layer.name})` : ""}`,
      style: n >= 0 ? { "--colour": page.colour(n) } : {}, onclick: () => toggle(page, head.id),
    }, on.length > 2 && n >= 0 && el("span", { class: "letter", text: LETTERS[n] }),
      el("span", { class: "brief", text: head.brief }), word(j === null ? "–" : cols.names[j]),
      el("b", { text: fixed(j === null ? 0 : w[i][j], 2) }),
      beyond > 0 && el("span", { class: "brief", title: "beyond habit", text: `+${fixed(beyond, 2)}` }));
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
  const seen = range(cols.labels.length).filter((j) => most(j) !== 0 && !sheets.every((sheet) => sheet.masked(i, j)));
  const order = seen.sort((a, b) => most(b) - most(a)).slice(0, 6);
  const line = (j) => el("li", {}, word(cols.names[j]),
    lanes(sheets.map(({ w }, h) => lane(page.colour(h), w[i][j], brief(w[i][j])))));
  return el("ol", { class: "best", "aria-label": "The largest weights" }, order.map(line));
}

function spotlightTable(page) {
  const sheets = page.heads.map((head) => head.sheet(page.state));
  const { rows, cols } = sheets[0] ?? page.head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]);
  return [[cols.unit, ...page.heads.map((head) => head.name)],
    cols.names.map((name, j) => [word(name),
      ...sheets.map((sheet) => (sheet.masked(i, j) ? "masked" : sheet.w[i][j]))])];
}
