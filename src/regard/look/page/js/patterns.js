// Patterns while training: what a head gives, over one piece of text, at every look of a run.

import { clamp, count, fixed, range } from "./numbers.js";
import { choice, el, heat, word } from "./elements.js";

export function trainingPatterns(page) {
  const { patterns } = page.header;
  if (!patterns?.layers.length) return [];
  const { steps, layers } = patterns, heads = layers.flatMap((layer, n) => range(page.header.shape(layer.w)[1]).map((head) => ({ n, head, layer })));
  const own = (page.patterns ??= { head: 0, look: steps.length - 1, cell: null });
  const big = el("div", { class: "three pattern-now" }), strip = el("div", { class: "flow small", role: "group", "aria-label": "The pattern at every look" });
  const message = el("p", { class: "readout", "aria-live": "polite" }), scrub = el("input", { type: "range", class: "scrubber", min: 0, max: steps.length - 1,
    step: 1, "data-key": "look", "aria-label": "Step of training", oninput: (e) => set({ look: Number(e.target.value) }) });
  const play = el("button", { class: "act", "data-key": "play-looks", text: "play", onclick: () => (own.playing ? stop() : start()) });
  const at = ({ layer, head }, look, i, j) => { const [, h, m, n] = page.header.shape(layer.w);
    return page.header.array(layer.w)[((look * h + head) * m + i) * n + j] / 255; };
  const picture = (one, look) => { const [, , m, n] = page.header.shape(one.layer.w);
    return heat(m, n, (i, j) => page.paint.cell(at(one, look, i, j))); };
  const read = (one) => {
    const { rows, cols } = one.layer, [i, j] = own.cell ?? strongest(one);
    message.replaceChildren(`step ${count(steps[own.look])} `, word(rows[i]), el("span", { class: "arrow", text: " → " }), word(cols[j]),
      el("b", { "data-read": "pattern", text: fixed(at(one, own.look, i, j), 2) }));
  };
  // The weight that changed most from the first look to the last: it is followed where nothing is pointed at.
  const strongest = (one) => {
    const { rows, cols } = one.layer, last = steps.length - 1;
    let best = [0, 0, -1];
    rows.forEach((_, i) => cols.forEach((__, j) => { const by = Math.abs(at(one, last, i, j) - at(one, 0, i, j)); if (by > best[2]) best = [i, j, by]; }));
    return best;
  };
  let drawn = null;
  const draw = () => {
    const one = heads[own.head];
    scrub.value = own.look;
    big.replaceChildren(picture(one, own.look));
    if (drawn !== `${own.head}`) {
      strip.replaceChildren(...steps.map((step, n) => el("button", { class: "headcell", "data-key": `look-${n}`, onclick: () => set({ look: n }), title: `step ${count(step)}` },
        picture(one, n), el("span", { text: count(step) }))));
      drawn = `${own.head}`;
    }
    [...strip.children].forEach((cell, n) => { cell.classList.toggle("on", n === own.look); cell.setAttribute("aria-pressed", String(n === own.look)); });
    read(one);
  };
  const set = (changes) => { Object.assign(own, changes); draw(); };
  const stop = () => { own.playing = false; play.textContent = "play"; };
  const start = () => {
    own.playing = true;
    play.textContent = "pause";
    if (own.look === steps.length - 1) own.look = 0;
    const next = () => {
      if (!own.playing || !big.isConnected) return;
      if (own.look >= steps.length - 1) { stop(); return; }
      set({ look: own.look + 1 });
      setTimeout(next, 260);
    };
    setTimeout(next, 260);
    draw();
  };
  big.addEventListener("pointermove", (event) => {
    const { rows, cols } = heads[own.head].layer, box = big.getBoundingClientRect();
    own.cell = [clamp(Math.floor(((event.clientY - box.top) / box.height) * rows.length), 0, rows.length - 1),
      clamp(Math.floor(((event.clientX - box.left) / box.width) * cols.length), 0, cols.length - 1)];
    read(heads[own.head]);
  });
  big.addEventListener("pointerleave", () => { own.cell = null; read(heads[own.head]); });
  const menu = choice("head", "pattern-head", heads.map(({ layer, head }, n) => [n, `${layer.name} · ${head}`]), own.head, (n) => set({ head: Number(n), cell: null }));
  draw();
  return [el("figure", { class: "train patterns" }, el("h2", { text: "the pattern of a head as it learns" }),
    el("p", { class: "hint", text: "Rows look at columns, over one piece of the validation text, the same at every look." }),
    el("div", { class: "controls" }, menu), message, el("div", { class: "halves" }, big, strip), el("div", { class: "player" }, play, scrub))];
}
