// All heads: the atlas of thumbnails, a closer look at one head or the difference of two, and two numbers as a scatter plot.

import { fixed, near, range } from "./numbers.js";
import { behind, choice, el, hands, pooledHeat, svg, word } from "./elements.js";
import { everyHead, grid, pattern, sorted } from "./atlas.js";
import { wordChoice } from "./controls.js";
import { legend } from "./square.js";
import { rootOf } from "./window.js";

const METRICS = {
  entropy: ({ unit }) => `How spread out a head looks, in nats: 0 is one ${unit}, large is everywhere. The fullest bar is the sharpest head.`,
  mean_distance_without_sink: ({ units }) => `How far away a head looks, in ${units}, the sink left out.`,
  sink: ({ unit }) => `The share of its weight that a head puts on the ${unit} all heads give most to: attention parked, not used.`,
  previous: ({ unit }) => `The mean weight on the ${unit} before.`,
  induction: ({ unit }) => `The mean weight on what followed the same ${unit} earlier: a head that continues what it saw.`,
};

// In words, and no wider than a menu should be; that the sink is left out is said below it.
const shortName = (by) => by.replace("_without_sink", "").replaceAll("_", " ");

export function overview(page, box) {
  const have = Object.keys(METRICS).filter((by) => page.header.metrics[by].some(Boolean)), heads = everyHead(page);
  const first = { by: have[0], x: have[0], y: have[1] ?? have[0] };
  const own = (page.overview ??= { ...first, at: null, pair: null, sort: "layer",
    mode: "pattern", target: null, pictures: new Map(), clicked: null });
  Object.assign(own, page.wantedAtlas);
  page.wantedAtlas = null;
  for (const name of Object.keys(first)) if (!have.includes(own[name])) own[name] = first[name];
  const again = (place) => heads.find((one) => one.row === place?.row && one.head === place.head) ?? null, pair = own.pair?.map(again);
  Object.assign(own, { at: again(own.at), pair: pair?.every(Boolean) ? pair : null });
  if (own.target >= page.stack.cols.length) own.target = 0; // of a longer sentence
  const message = el("p", { class: "hint" }), scale = el("div", {}), cells = el("div", { class: "scroll" }), plot = el("div",
    { class: "plot" }),
    peek = el("div", { class: "peek" }), bar = el("div", { class: "controls" });
  const act = {
    // Two heads that are compared stay in sight, whatever is pointed at.
    look: (one) => { own.at = one; if (!own.pair) act.peek(); },
    peek: () => page.keepingFocus(() => peek.replaceChildren(...peekAt(page, own, own.at ?? own.first, have, act))),
    add: (one) => {
      // A second click soon after opens; the cells are drawn anew in between, so that no double click reaches one.
      const twice = own.clicked?.one === one && performance.now() - own.clicked.at < 400;
      own.clicked = { one, at: performance.now() };
      if (twice) act.open(one);
      else if (one.held) addToTray(page, one.held);
    },
    // With the first of the heads that all views show; none is compared with itself.
    compare: (one) => {
      const first = heads.find(({ held }) => held === rootOf(page.head));
      own.pair = !one || one === first || !one.held || own.pair?.[1] === one ? null : [first, one];
      act.peek();
      page.writeAddress();
    },
    open: (one) => { if (one.held) openHeads(page, page.state.chosen?.includes(one.held.id) ? page.state.chosen
      : [one.held.id]); },
  };
  const update = () => page.keepingFocus(() => {
    own.across = Math.max(1, Math.floor((cells.clientWidth + 6) / 86));
    bar.replaceChildren(...atlasControls(page, own, have, update).filter(Boolean));
    scale.replaceChildren(scaleOf(page, own));
    message.textContent = own.sort === "metric" || own.sort === "layer" ? METRICS[own.by](page.stack.cols) : "";
    cells.replaceChildren(grid(page, own, heads, act));
    plot.replaceChildren(...(have.length > 1 ? [scatter(page, own, heads, act)] : []));
    own.first = sorted(heads, { ...own, sort: "metric" }, (one) => one.value(own.by))[0]; // until one is pointed at
    act.peek();
  });
  const axes = have.length > 1 ? el("div", { class: "controls" }, ...["x", "y"].map((name) =>
    choice(name === "x" ? "across" : "up", `axis-${name}`, have.map((by) => [by, shortName(by)]), own[name],
      (by) => { own[name] = by; update(); page.writeAddress(); }))) : "";
  box.append(bar, message, el("div", { class: "columns" }, el("div", {}, cells, scale, axes, plot), peek),
    behind("Every head", () => [["layer", "head", ...have],
      heads.map((one) => [`${one.index} ${one.layer}`, String(one.head), ...have.map((by) => one.value(by) ?? "–")])]));
  return () => update();
}

function atlasControls(page, own, have, update) {
  const short = !page.stack.long && page.stack.heads.length > 0, { rows, cols } = page.stack;
  const set = (changes) => { Object.assign(own, changes); update(); page.writeAddress(); };
  const orders = [["layer", "layer and head"], ["metric", "the number"], ["tie", `how they tie the ${rows.unit}`],
    ...(short ? [["given", `what the ${rows.unit} gives to`]] : [])];
  const tray = page.state.chosen ?? [];
  return [
    choice("number", "metric", have.map((by) => [by, shortName(by)]), own.by, (by) => set({ by })),
    choice("sort by", "sort", orders, own.sort, (sort) => set({ sort, target: own.target ?? 0 })),
    short && own.sort === "given" && choice(`another ${cols.unit}`, "given", range(cols.length).map((n) => [n, cols.name(n)]),
      own.target ?? 0,
      (n) => set({ target: Number(n) })),
    short && choice("a cell shows", "cells", [["pattern", "the pattern"], ["row", `the row of the ${rows.unit}`]], own.mode,
      (mode) => set({ mode })),
    short && (own.mode === "row" || own.sort === "tie" || own.sort === "given") && wordChoice(page),
    tray.length > 0 && el("button", { class: "chip", "data-key": "open-tray",
      text: `open ${tray.length === 1 ? "this head" : `these ${tray.length} heads`}`,
      onclick: () => openHeads(page, tray) }),
    tray.length > 0 && el("button", { class: "chip quiet", "data-key": "clear-tray", text: "none",
      onclick: () => page.set({ chosen: null }) }),
  ];
}

// Add a head to those that all views show, four at most, or take it away.
function addToTray(page, head) {
  const chosen = (page.state.chosen ?? []).filter((id) => page.book.heads[id].stack === head.stack);
  const next = chosen.includes(head.id) ? chosen.filter((id) => id !== head.id) : [...chosen, head.id].slice(-4);
  if (head.stack.n === page.state.stack) page.set({ chosen: next.length ? next : null });
  else { page.setStack(head.stack.n); page.set({ chosen: [head.id] }); }
}

function openHeads(page, ids) {
  const head = page.book.heads[ids[0]];
  page.choose(ids.map((id) => page.book.heads[id]), head.stack.long ? "long" : head.stack.same ? "spotlight" : "cross");
}

// What the colours of the cells say, or the height of their bars.
function scaleOf(page, { mode }) {
  if (mode !== "row" || page.stack.long) return legend(page, 1);
  return el("p", { class: "hint", text: page.stack.cols.patches ? "Colours are fitted to each row."
    : "Bars are as high as the root of the weight." });
}

// A head closer, or both heads that are compared and their difference.
function peekAt(page, own, pointed, have, act) {
  const [one, other] = own.pair ?? [pointed, null], { head } = page, comparable = one.held && one.held !== rootOf(head);
  const number = (by) => [el("dt", { text: shortName(by) }), el("dd", { text: [one, other].filter(Boolean).map((x) =>
    (x.value(by) === null ? "–" : fixed(x.value(by), 2))).join(" and ") })];
  const hint = !one.held ? "This page does not hold its weights." : [
    hands(`Click adds it to the heads that are shown, shift-click compares it with ${head.name}, Enter opens it.`,
      "A tap adds it to the heads that are shown, a second one soon after opens it.")];
  return [el("p", {}, el("b", { text: one.name }), other && [" and ", el("b", { text: other.name })]),
    el("dl", {}, have.map(number)), other ? difference(page, one, other) : picture(page, one),
    el("p", { class: "hint" }, hint),
    el("div", { class: "chips" }, one.held && el("button", { class: "chip", "data-key": "open-head", text: other ? "open both" : "open this head",
      onclick: () => openHeads(page, [one, other].filter((x) => x?.held?.stack === one.held.stack).map((x) => x.held.id)) }),
    !other && comparable && el("button", { class: "chip", "data-key": "compare", text: `compare with ${head.name}`, onclick: () => act.compare(one) }),
    other && el("button", { class: "chip quiet", "data-key": "compare", text: "do not compare", onclick: () => act.compare(null) }))];
}

const PEEK = 170; // cells a side of a pattern that is looked at closer, and of each of two
function picture(page, one, most = PEEK) {
  const { paint } = page, { held } = one;
  if (held && !held.stack.long) return pooledHeat(held.i, held.j, most, paint, (i, j) => paint.cell(held.shown(i, j)));
  return pattern(page, one) ?? "";
}

// Two patterns, and the first minus the second: blue where the first looks more, orange where the second does.
function difference(page, one, other) {
  const [a, b] = [one.held, other.held], { paint } = page;
  if (!a || !b || a.stack !== b.stack) return el("p", { class: "hint",
    text: `Only heads of the same ${page.stack.rows.units} can be compared.` });
  const long = a.stack.long, [m, n] = long ? a.stored.tiles : [a.i, a.j];
  const at = (head, i, j) => (long ? head.stored.most(i, j) : head.at(i, j)), shown = (head, i, j) => (long ? head.stored : head).shown(i, j);
  // Hatched is what the masks of both forbid.
  const colour = (i, j) => { const [x, y] = [shown(a, i, j), shown(b, i, j)], by = Math.max(0, x) - Math.max(0, y);
    return x < 0 && y < 0 ? null : paint.signed(signed(by)); };
  let most = { by: 0 };
  for (let i = 0; i < m; i++) for (let j = 0; j < n; j++) {
    const by = at(a, i, j) - at(b, i, j);
    if (Math.abs(by) > Math.abs(most.by)) most = { by, i, j };
  }
  const signed = (x) => Math.sign(x) * Math.abs(x) ** 0.6;
  const { rows, cols } = a.stack, differences = most.by && !long ? [el("p", { class: "hint", "data-read": "difference" },
    "most: ",
    word(rows.name(most.i)), " → ", word(cols.name(most.j)),
      ` ${fixed(at(a, most.i, most.j), 2)} and ${fixed(at(b, most.i, most.j), 2)}`)] : [];
  return el("div", { class: "versus" }, el("div", {}, picture(page, one, PEEK / 2)), el("div", {}, picture(page, other, PEEK / 2)),
    el("figure", {}, pooledHeat(m, n, PEEK, paint, colour),
      el("figcaption", { text: "the first minus the second: blue where the first gives more, orange where the second does" }), differences));
}

// Where a number stands between the smallest and the largest.
function span(heads, by) {
  const numbers = heads.map((one) => one.value(by)).filter((x) => x !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return { low, high, part: (x) => (high > low ? (x - low) / (high - low) : 0.5) };
}

function scatter(page, own, heads, act) {
  const [width, height] = [520, 300], [sx, sy] = [span(heads, own.x), span(heads, own.y)], { paint } = page,
    deepest = page.header.all.length - 1, [across, up] = [own.x, own.y].map(shortName), tray = page.heads.map(rootOf);
  const point = (one) => {
    const [cx, cy] = [sx.part(one.value(own.x)) * width, height - sy.part(one.value(own.y)) * height], n = tray.indexOf(one.held);
    return [n >= 0 && one.held && svg("circle", { class: "ring", r: 10, cx, cy, style: { stroke: page.colour(n) } }), svg("circle", {
      class: "point", r: 6, cx, cy, style: { fill: paint.css(paint.tint(deepest ? 0.3 + (0.7 * one.row) / deepest : 0.75)) },
      onmouseenter: () => act.look(one), onclick: () => act.open(one),
    }, svg("title", { text: `${one.name}: ${across} ${fixed(one.value(own.x), 2)}, ${up} ${fixed(one.value(own.y), 2)}` }))];
  };
  const text = (t, props) => svg("text", { class: "tiny", ...props, text: t });
  return el("figure", {},
    svg("svg", { class: "scatter", viewBox: `-66 -20 ${width + 86} ${height + 60}`, role: "img",
      "aria-label": `${up} against ${across}, one point a head` },
      svg("path", { class: "axis", d: `M-10 -10V${height + 10}H${width + 10}` }),
      text(near(sx.low), { x: 0, y: height + 26 }),
        text(near(sx.high), { x: width, y: height + 26, "text-anchor": "end" }),
      text(near(sy.low), { x: -14, y: height, "text-anchor": "end" }),
        text(near(sy.high), { x: -14, y: 4, "text-anchor": "end" }),
      text(across, { x: width / 2, y: height + 34, "text-anchor": "middle" }),
        text(up, { transform: `translate(-44 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }),
      heads.filter((one) => one.value(own.x) !== null && one.value(own.y) !== null).map(point)),
    el("figcaption", { text: `One point a head; ${deepest ? "the later the layer, the stronger the colour; " : ""}a ring marks those that all views show.` }));
}
