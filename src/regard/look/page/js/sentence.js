// The words of a sentence on the stage: which one is lit, and what every head gives each of them.

import { clamp, fixed } from "./numbers.js";
import { el, heat, word } from "./elements.js";

export const LETTERS = "ABCD";

// The words of a sentence; in one that asks, a word can be lit. Patches of an image stand as in the image.
export function sentence(page, read, asks) {
  const words = read.groups.map(([start, , label], n) => el("span", {
    class: classes(read, n), "data-n": n, style: read.picture ? cellOfGrid(read, n) : {}, role: asks ? "option" : "listitem",
    "aria-label": read.patches && !read.special[n] ? `patch ${label}` : undefined,
    title: read.unknown[n] ? "unknown to this model: this is the text the token stands for" : undefined,
    ...(asks && {
      "data-key": `word-${start}`, onkeydown: (event) => wordKey(event, page, read),
      onpointerenter: (event) => { if (event.pointerType !== "touch") page.set({ hover: start }); },
      onpointerleave: () => page.set({ hover: null }),
      onclick: () => page.set({ word: start, hover: null }),
    }),
  }, el("span", { class: "num up" }), word(label), el("span", { class: "num down" })));
  return el("div", {
    class: `sentence${read.patches ? " patches" : words.length > 40 ? " many" : ""}`, role: asks ? "listbox" : "list",
    dir: read.rtl ? "rtl" : "ltr", style: { "--patches": read.patches },
    "aria-label": `${read.units}${asks ? "; the arrow keys move the light" : " that are looked at"}`,
    oncopy: copyWords,
  }, words, read.patches && read.picture ? imageBelow(read) : null);
}

// Several selected words are copied as a text: without their numbers, and in one line.
export function copyWords(event) {
  const selected = getSelection(), words = [...event.currentTarget.querySelectorAll(".word .token")].filter((one) => selected?.containsNode(one, true));
  if (words.length < 2) return;
  event.clipboardData.setData("text/plain", words.map((one) => one.textContent).join(" "));
  event.preventDefault();
}

// The image itself, below the patches of its grid; what is no patch stands above, a line each.
const linesBefore = ({ special }) => special.filter(Boolean).length;
function cellOfGrid(read, n) {
  const before = linesBefore(read), m = n - before;
  return read.special[n] ? { "grid-row": n + 1 } : { "grid-row": before + 1 + Math.floor(m / read.patches), "grid-column": 1 + (m % read.patches) };
}
function imageBelow(read) {
  const { pixels, shape: [, tall, wide] } = read.picture, before = linesBefore(read), rows = (read.groups.length - before) / read.patches;
  const size = tall * wide, canvas = heat(tall, wide, (r, c) => [0, 1, 2].map((n) => pixels[n * size + r * wide + c]));
  canvas.classList.add("image");
  canvas.style.setProperty("grid-area", `${before + 1} / 1 / span ${rows} / -1`);
  return canvas;
}

function classes(read, n) {
  const which = { special: read.special[n], unknown: read.unknown[n], inside: read.inside[n],
    patch: read.patches && !read.special[n] };
  return ["word", ...Object.keys(which).filter((name) => which[name])].join(" ");
}

function wordKey(event, page, read) {
  const forward = read.rtl ? "ArrowLeft" : "ArrowRight", back = read.rtl ? "ArrowRight" : "ArrowLeft";
  const at = read.at[page.state.word], last = read.groups.length - 1, line = read.patches || 1;
  const to = { [forward]: at + 1, [back]: at - 1, ArrowDown: at + line, ArrowUp: at - line, Home: 0, End: last,
    Enter: at, " ": at }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const [start] = read.groups[clamp(to, 0, last)];
  page.set({ word: start, hover: null });
  page.root.querySelector(`[data-key="word-${start}"]`)?.focus();
}

// Shade every word by its weights, a band a head, and write the larger numbers: those of the first and the third head
// above, of the others below. With more than two heads a number has the letter of its head.
export function light(page, queries, keys, sheets, i) {
  const patches = keys.classList.contains("patches"), wash = patches ? 100 : page.paint.wash, lettered = sheets.length > 2;
  // Patches share a row among hundreds: fitted, their colours end at its largest weight of a patch.
  const most = patches && page.state.fit ? Math.max(...sheets.flatMap(({ w, cols }) => [...w[i]].filter((_, n) => !cols.special[n])), 1e-9) : 1;
  queries.parentNode.classList.toggle("lettered", lettered);
  [...queries.children].filter((node) => node.matches(".word")).forEach((node, n) => {
    node.classList.toggle("lit", n === i);
    node.setAttribute("aria-selected", String(n === i));
    node.setAttribute("tabindex", n === i ? "0" : "-1");
  });
  [...keys.children].filter((node) => node.matches(".word")).forEach((node, n) => {
    const weights = sheets.map(({ w }) => w[i]?.[n] ?? 0), part = 100 / weights.length;
    const share = (w) => (!(w / most >= 0.02) ? 0 : Math.round(Math.min(1, w / most) ** 0.7 * wash * (patches && keys.querySelector(".image") ? 0.8 : 1)));
    const band = (w, h) => `color-mix(in srgb, ${page.colour(h)} ${share(w)}%, transparent) ${part * h}% ${part * (h + 1)}%`;
    node.classList.toggle("shaded", weights.some((w) => share(w) > 15)); // paler text can be read up to there
    node.classList.toggle("unseen", sheets.length > 0 && sheets.every((sheet) => sheet.masked(i, n)));
    // Lines between two sentences pass behind their words.
    const behind = queries === keys || patches ? "" : ", var(--paper)";
    const ground = weights.length ? `linear-gradient(${weights.map(band).join(", ")})${behind}` : "none";
    node.querySelector(".token").style.setProperty("background", ground);
    [".up", ".down"].forEach((side, h) => {
      const number = (m) => el("span", { style: { color: page.colour(m) } }, lettered && el("sup",
        { text: LETTERS[m] }),
        fixed(weights[m], 2));
      const own = [h, h + 2].filter((m) => weights[m] >= 0.045), mark = node.querySelector(side);
      mark.replaceChildren(...own.map(number));
      mark.setAttribute("data-by", String(Math.max(0, ...own.map((m) => weights[m]))));
    });
  });
  if (!patches) apart(keys);
}

// Numbers of neighbouring pieces of a word would lie on each other: the smaller one gives way. Hiding it moves nothing.
export function apart(words) {
  const marks = [...words.querySelectorAll("[data-by]")].filter((one) => one.textContent).map((one) => ({ one, by: Number(one.getAttribute("data-by")), box: one.getBoundingClientRect() }));
  const visible = [], meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  for (const { one, box } of marks.sort((a, b) => b.by - a.by)) {
    const clash = visible.some((other) => meet(box, other));
    one.style.visibility = clash ? "hidden" : "";
    if (!clash) visible.push(box);
  }
}
