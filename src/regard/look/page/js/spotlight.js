// Spotlight: one sentence, or two, and lines from the lit word.

import { brief, clamp, fixed, largest, range } from "./numbers.js";
import { behind, el, lane, lanes, svg, word } from "./elements.js";
import { bestOf, ranked } from "./book.js";
import { readingControls } from "./page.js";

const HOW = "Layer·head, the word it is tied to, the weight, and by how much it exceeds the head’s habit: "
  + "the weight that the head gives that word, or that distance, anyway. The most comes first.";

export function spotlight(page, box) {
  const { rows, cols } = page.head.sheet(page.state), { same } = page.stack, many = page.stack.heads.length > 1;
  const hero = el("div", { class: "hero", "aria-live": "polite" });
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const queries = sentence(page, rows, true), keys = same ? queries : sentence(page, cols, false);
  const side = (text) => el("p", { class: "side", text });
  const stage = el("div", { class: `stage ${same ? "one" : "two"}` }, lines,
    same ? queries : [side("these words look"), queries, keys, side("at these")]);
  const message = el("h2", {}), list = el("div", { class: "bars" });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Heads" });
  box.append(hero, stage, el("div", { class: "controls" }, readingControls(page)), message,
    ...(many ? [el("p", { class: "hint", text: HOW }), chips] : []), list,
    behind("Weights of the lit word", () => spotlightTable(page)));
  return () => {
    const place = (i) => Math.max(0, rows.at[i]), i = place(page.row);
    const sheets = page.heads.map((head) => head.sheet(page.state));
    headline(page, hero, sheets, i);
    light(page, queries, keys, sheets, i);
    draw(lines, stage, queries, keys, sheets, i);
    const [before, after] = many ? ["Heads that say most about ", ""] : ["Where ", " looks"];
    message.replaceChildren(before, word(rows.names[place(page.state.word)] ?? ""), after);
    chips.replaceChildren(...headChips(page, ranked(page)));
    list.replaceChildren(bars(page, sheets, i));
  };
}

// The words of a sentence; in one that asks, a word can be lit.
function sentence(page, read, asks) {
  const props = (start, n) => ({
    class: `word${read.special[n] ? " special" : ""}`, "data-n": n, role: asks ? "option" : "listitem",
    ...(asks && {
      "data-key": `word-${start}`, onkeydown: (event) => wordKey(event, page, read),
      onpointerenter: (event) => { if (event.pointerType !== "touch") page.set({ hover: start }); },
      onpointerleave: () => page.set({ hover: null }),
      onclick: () => page.set({ word: start, hover: null }),
    }),
  });
  const words = read.groups.map(([start, , label], n) =>
    el("span", props(start, n), el("span", { class: "num up" }), word(label), el("span", { class: "num down" })));
  return el("div", {
    class: `sentence${words.length > 40 ? " many" : ""}`, role: asks ? "listbox" : "list", dir: read.rtl ? "rtl"
      : "ltr",
    "aria-label": asks ? "Words; the arrow keys move the light" : "Words that are looked at",
  }, words);
}

function wordKey(event, page, read) {
  const forward = read.rtl ? "ArrowLeft" : "ArrowRight", back = read.rtl ? "ArrowRight" : "ArrowLeft";
  const at = read.at[page.state.word], last = read.groups.length - 1;
  const to = { [forward]: at + 1, [back]: at - 1, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, Enter: at,
    " ": at }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const [start] = read.groups[clamp(to, 0, last)];
  page.set({ word: start, hover: null });
  page.root.querySelector(`[data-key="word-${start}"]`)?.focus();
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
    const rest = key === null || most === key ? [] : [who.length ? "; " : "", "most goes to ", word(cols.names[most]),
      ` ${fixed(w[i][most], 2)}`];
    const tie = key === null ? [word(rows.names[i]), el("span", { class: "nothing", text: " looks at nothing" })]
      : [word(rows.names[i]), el("span", { class: "arrow", text: " → " }), word(cols.names[key]), " ",
        el("b", { class: "weight", text: fixed(w[i][key], 2) })];
    return el("p", { style: { "--colour": page.colour(n) } }, el("i", { class: "dot" }),
      el("span", { class: "tie" }, tie), " ", el("span", { class: "who" }, who, rest));
  }));
  if (!sheets.length) hero.append(el("p", {}, el("span", { class: "who", text: "No head is on. Choose one below." })));
}

// Shade every word by its weights, a band a head, and write the larger numbers: the first head above, the second below.
function light(page, queries, keys, sheets, i) {
  const { wash } = page.paint;
  [...queries.children].forEach((node, n) => {
    node.classList.toggle("lit", n === i);
    node.setAttribute("aria-selected", String(n === i));
    node.setAttribute("tabindex", n === i ? "0" : "-1");
  });
  [...keys.children].forEach((node, n) => {
    const weights = sheets.map(({ w }) => w[i]?.[n] ?? 0), part = 100 / weights.length;
    const share = (w) => (w < 0.02 ? 0 : Math.round(wash * w ** 0.7));
    const band = (w, h) => `color-mix(in srgb, ${page.colour(h)} ${share(w)}%, transparent) ${part * h}% ${part * (h + 1)}%`;
    node.classList.toggle("shaded", weights.some((w) => share(w) > 15)); // paler text can be read up to there
    node.classList.toggle("unseen", weights.length > 0 && weights.every((w) => w === 0));
    const ground = weights.length ? `linear-gradient(${weights.map(band).join(", ")})` : "none";
    node.querySelector(".token").style.setProperty("background", ground);
    [".up", ".down"].forEach((side, h) => {
      const number = node.querySelector(side);
      number.textContent = weights[h] >= 0.045 ? fixed(weights[h], 2) : "";
      number.style.setProperty("color", page.colour(h));
    });
  });
}

// Lines from the lit word; the heads take turns above and below the sentence.
function draw(lines, stage, queries, keys, sheets, i) {
  const frame = stage.getBoundingClientRect(), begin = queries.children[i]?.getBoundingClientRect(),
    same = queries === keys;
  lines.replaceChildren();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  if (!begin) return;
  sheets.forEach(({ w }, h) => w[i].forEach((weight, j) => {
    if (weight < 0.02 || (same && j === i)) return;
    const end = keys.children[j].getBoundingClientRect();
    const d = same ? arc(begin, end, frame, h % 2 === 0) : link(begin, end, frame, h);
    const style = { stroke: `var(--h${h % 4})` };
    // A line to another line of text passes behind words, which must stay readable.
    const behind = same && Math.abs(begin.top - end.top) > begin.height / 2;
    // The third and the fourth head share a side with the first and the second: they are dashed.
    lines.append(svg("path", { d, "stroke-width": 0.75 + (behind ? 2 : 8) * weight,
      opacity: 0.2 + (behind ? 0.3 : 0.7) * weight, style, "stroke-dasharray": h > 1 ? "7 6" : undefined }));
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
    const { rows, cols, w } = head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]),
      { key: j, beyond } = bestOf(head, page.state), n = on.indexOf(head.id);
    return el("button", {
      class: "chip", "data-key": `chip-${head.id}`, "aria-pressed": String(n >= 0),
        title: `${head.name}${head.layer.name ? ` (${head.layer.name})` : ""}`,
      style: n >= 0 ? { "--colour": page.colour(n) } : {}, onclick: () => toggle(page, head.id),
    }, el("span", { class: "brief", text: head.brief }), word(j === null ? "–" : cols.names[j]),
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
  const order = range(cols.labels.length).sort((a, b) => most(b) - most(a)).slice(0, 6);
  const line = (j) => el("li", {}, word(cols.names[j]),
    lanes(sheets.map(({ w }, h) => lane(page.colour(h), w[i][j], brief(w[i][j])))));
  return el("ol", { class: "best", "aria-label": "Words with the largest weights" }, order.map(line));
}

function spotlightTable(page) {
  const sheets = page.heads.map((head) => head.sheet(page.state));
  const { rows, cols } = sheets[0] ?? page.head.sheet(page.state), i = Math.max(0, rows.at[page.state.word]);
  return [["word", ...page.heads.map((head) => head.name)],
    cols.labels.map((label, j) => [word(label), ...sheets.map(({ w }) => w[i][j])])];
}
