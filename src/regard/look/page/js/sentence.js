// The words of a sentence on the stage: which one is lit, and what every head gives each of them.

import { clamp, fixed } from "./numbers.js";
import { el, word } from "./elements.js";

export const LETTERS = "ABCD";

// The words of a sentence; in one that asks, a word can be lit. Patches of an image stand as in the image.
export function sentence(page, read, asks) {
  const words = read.groups.map(([start, , label], n) => el("span", {
    class: classes(read, n), "data-n": n, role: asks ? "option" : "listitem",
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
    "aria-label": asks ? "Words; the arrow keys move the light" : "Words that are looked at",
  }, words);
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
  const wash = keys.classList.contains("patches") ? 100 : page.paint.wash, lettered = sheets.length > 2;
  queries.parentNode.classList.toggle("lettered", lettered);
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
    node.classList.toggle("unseen", sheets.length > 0 && sheets.every((sheet) => sheet.masked(i, n)));
    const ground = weights.length ? `linear-gradient(${weights.map(band).join(", ")})` : "none";
    node.querySelector(".token").style.setProperty("background", ground);
    [".up", ".down"].forEach((side, h) => {
      const number = (m) => el("span", { style: { color: page.colour(m) } }, lettered && el("sup",
        { text: LETTERS[m] }),
        fixed(weights[m], 2));
      node.querySelector(side).replaceChildren(...[h, h + 2].filter((m) => weights[m] >= 0.045).map(number));
    });
  });
}
