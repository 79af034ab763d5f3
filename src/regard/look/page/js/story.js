// Story: from vectors that are alike to attention over long texts, on the words and numbers of the page.
// A position between 0 and the number of chapters says everything: the scene is a function of it.

import { clamp, range } from "./numbers.js";
import { behind, el, hatching, svg, word } from "./elements.js";
import { snapshot } from "./snapshot.js";
import { CHAPTERS, SCENE_HEIGHT, scene, storyData } from "./scenes.js";
import { headChoice, stackChoice, wordChoice } from "./controls.js";
import { caption, download, forSlide } from "./share.js";

const SECONDS = 2.4; // of a chapter
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function story(page, box) {
  const own = (page.story ??= { at: still() ? 1 : 0, playing: null });
  const picks = el("div", { class: "controls" }), title = el("h2", { class: "chapter" }), text = el("p", { class: "telling", "aria-live": "polite" });
  const stage = svg("svg", { class: "scene", role: "img", tabindex: 0, "data-key": "scene" });
  const telling = el("div", { class: "tale" }, title, text, stage), steps = el("div", { class: "chips", role: "group", "aria-label": "Chapters" });
  const scrubber = el("input", { type: "range", min: 0, step: 0.02, class: "scrubber", "data-key": "scrub", "aria-label": "Place in the story",
    oninput: (e) => { stop(); go(Number(e.target.value)); } });
  const button = (key, label, name, act) => el("button", { class: "act", "data-key": key, "aria-label": name, text: label, onclick: act });
  const playButton = button("story-play", "play", "Play the story", () => (own.playing ? stop() : play()));
  const end = el("div", { class: "chips" }), message = el("p", { class: "message" });
  const scenes = el("div", {}, telling, el("div", { class: "player" }, button("story-back", "◀", "The chapter before", () => move(-1)), playButton,
    button("story-next", "▶", "The next chapter", () => move(1)), scrubber), steps, end);
  box.append(picks, message, scenes, behind("The numbers of the story", () => storyTable(data)));
  let data = null, chapters = [];

  const chapterAt = (at) => clamp(Math.ceil(at - 1e-9) - 1, 0, chapters.length - 1);
  const draw = () => {
    own.at = clamp(own.at, 0, chapters.length);
    const n = chapterAt(own.at), chapter = chapters[n], sentence = chapter.say(data);
    stage.replaceChildren(hatching("story-hatch"), ...[chapter.draw(data, own.at - n)].flat(4));
    if (own.sentence !== sentence) { text.textContent = own.sentence = sentence; title.textContent = `${n + 1} · ${chapter.name}`; }
    stage.setAttribute("aria-label", `${chapter.name}: ${sentence}`);
    scrubber.value = own.at;
    [...steps.children].forEach((chip, m) => chip.setAttribute("aria-pressed", String(m === n)));
    end.replaceChildren(...(n === chapters.length - 1 ? [el("button", { class: "chip", "data-key": "story-open", text: `open ${data.head.name} again`,
      onclick: () => page.choose([data.head], data.same ? "spotlight" : "cross") })] : []),
    el("button", { class: "chip quiet", "data-key": "story-slides", text: "save as slides", onclick: () => slides() }));
  };
  const go = (at) => { own.at = at; draw(); if (!own.playing) page.writeAddress(); };
  const stop = () => { own.playing = null; playButton.textContent = "play"; page.writeAddress(); };
  // From where it stands to a place; without motion, at once.
  const glide = (to, then) => {
    if (still()) { own.playing = null; go(to); then?.(); return; }
    const mine = (own.playing = Symbol("playing")), speed = Math.max(1, Math.abs(to - own.at));
    let last = null;
    const frame = (now) => {
      if (own.playing !== mine || !stage.isConnected) return;
      const seconds = chapters[chapterAt(Math.min(own.at + 1e-6, chapters.length))].seconds ?? SECONDS, by = last === null ? 0 : ((now - last) / 1000 / seconds) * speed;
      last = now;
      own.at = to > own.at ? Math.min(to, own.at + by) : Math.max(to, own.at - by);
      draw();
      if (own.at === to) { then ? then() : stop(); } else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  };
  const move = (by) => glide(clamp(by > 0 ? Math.floor(own.at + 1e-6) + 1 : Math.ceil(own.at - 1e-6) - 1, still() ? 1 : 0, chapters.length));
  const play = () => {
    if (own.at >= chapters.length) own.at = 0;
    if (still()) { move(1); return; }
    playButton.textContent = "pause";
    const on = () => { if (own.at >= chapters.length) { stop(); return; } setTimeout(() => { if (own.playing && stage.isConnected) next(); }, 900); };
    const next = () => glide(Math.floor(own.at + 1e-6) + 1, on);
    next();
  };
  const slides = async () => {
    const back = own.at, pages = [];
    stop();
    await forSlide(page, () => range(chapters.length).forEach((n) => {
      own.at = n + 1;
      draw();
      pages.push(snapshot(telling, `${chapters[n].name}. ${caption(page)}`, getComputedStyle(document.body).backgroundColor));
    }));
    go(back);
    download(page, "html", new Blob([deck(page, pages)], { type: "text/html" }));
  };
  telling.addEventListener("keydown", (event) => {
    const act = { ArrowRight: () => move(1), ArrowLeft: () => move(-1), Home: () => { stop(); go(still() ? 1 : 0); }, End: () => { stop(); go(chapters.length); },
      " ": () => (own.playing ? stop() : play()) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  return () => {
    scene.width = page.narrow ? 480 : 960;
    stage.setAttribute("viewBox", `0 0 ${scene.width} ${SCENE_HEIGHT}`);
    data = storyData(page);
    const { head, word: lit } = data, numbers = [data.w, data.alike, data.scores, data.x, data.v].flat(2);
    scenes.hidden = numbers.some(Number.isNaN);
    message.textContent = scenes.hidden ? `“${lit}” or what it looks at has numbers in ${head.name} that are not numbers (NaN): of these there is no story. Choose another ${head.stack.rows.unit} or head.` : "";
    chapters = CHAPTERS.filter((chapter) => chapter.when(data));
    scrubber.max = chapters.length;
    own.sentence = null;
    picks.replaceChildren(...[stackChoice(page), wordChoice(page), headChoice(page)].filter(Boolean));
    steps.replaceChildren(...chapters.map((chapter, n) => el("button", { class: "chip", "data-key": `chapter-${n}`, text: `${n + 1} ${chapter.name}`,
      onclick: () => glide(n + 1) })));
    if (scenes.hidden) { stop(); return; }
    draw();
    if (own.at === 0 && !own.playing) glide(1);
  };
}

// What the chapters draw: products of vectors, scores, weights.
function storyTable({ page, names, alike, scores, w }) {
  const columns = [["alike", alike], ["score", scores], ["weight", w]].filter(([, values]) => values);
  return [[page.stack.cols.unit, ...columns.map(([name]) => name)], names.map((name, n) => [word(name), ...columns.map(([, values]) => values[n])])];
}

// The chapters one after the other, one a screen, without a script; printed, one a slide.
function deck(page, pages) {
  const text = new XMLSerializer(), escaped = text.serializeToString(document.createTextNode(page.header.title)), ground = getComputedStyle(document.body).backgroundColor;
  return `<!doctype html><html lang="en"><meta charset="utf-8"><title>${escaped}</title><style>html{scroll-snap-type:y mandatory}body{margin:0;background:${ground}}`
    + "section{height:100vh;display:grid;place-items:center;scroll-snap-align:start;break-after:page}section:last-child{break-after:auto}svg{width:92vw;height:92vh}"
    + `@page{size:13.33in 7.5in;margin:0}</style>${pages.map((one) => `<section>${text.serializeToString(one)}</section>`).join("")}</html>`;
}
