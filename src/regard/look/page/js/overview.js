// All heads: thumbnails, one number a head, and two numbers as a scatter plot.

import { edge, fixed, largest, near, range } from "./numbers.js";
import { behind, choice, el, heat, shade, svg } from "./elements.js";
import { ARROWS } from "./square.js";

const METRICS = {
  entropy: "How spread out a head looks, in nats: 0 is one word, large is everywhere.",
  mean_distance: "How far away a head looks, in words, the sink left out.",
  sink: "The share of its weight that a head puts on the word all heads give most to: attention parked, not used.",
  previous: "The mean weight on the word before.",
  induction: "The mean weight on what followed the same word earlier: a head that continues what it saw.",
};

// Every head there is, also those whose weights the page does not hold, with its numbers.
function everyHead(page) {
  const { metrics, all } = page.header;
  return all.flatMap(([index, layer, heads, place], row) => range(heads).map((head) => ({
    row, index, layer, head,
    name: layer || all.length > 1 ? `layer ${index}, head ${head}` : `head ${head}`,
    held: page.book.heads.find((one) => one.place === place && one.head === head),
    value: (by) => metrics[by][row]?.[head] ?? null,
  })));
}

export function overview(page, box) {
  const have = Object.keys(METRICS).filter((by) => page.header.metrics[by].some(Boolean)), heads = everyHead(page);
  const own = (page.overview ??= { by: have[0], x: have[0], y: have[1] ?? have[0], at: null });
  const message = el("p", { class: "hint" }), grid = el("div", { class: "scroll" }), plot = el("div", { class: "plot" }),
    peek = el("div", { class: "peek" });
  const look = (one) => { own.at = one; peek.replaceChildren(...peekAt(page, one, have)); };
  const update = () => {
    message.textContent = METRICS[own.by];
    grid.replaceChildren(metricGrid(page, own, heads, look));
    plot.replaceChildren(...(have.length > 1 ? [scatter(page, own, heads, look)] : []));
    // Sharpest first for entropy, largest first otherwise, as in `Recording.heads`.
    const rank = (one) => (one.value(own.by) ?? NaN) * (own.by === "entropy" ? -1 : 1);
    look(own.at ?? heads[largest(heads.map((one) => (Number.isNaN(rank(one)) ? -Infinity : rank(one))))]);
  };
  const menu = (label, key, name) => choice(label, key, have.map((by) => [by, by]), own[name], (by) => { own[name] = by;
    update(); });
  box.append(el("div", { class: "controls" }, menu("number", "metric", "by")), message, el("div", { class: "columns" },
    grid, peek),
    have.length > 1 ? el("div", { class: "controls" }, menu("across", "axis-x", "x"), menu("up", "axis-y", "y")) : "",
      plot,
    behind("Every head", () => [["layer", "head", ...have],
      heads.map((one) => [`${one.index} ${one.layer}`, String(one.head), ...have.map((by) => one.value(by) ?? "–")])]));
  update();
}

function peekAt(page, { name, held, value }, have) {
  const number = (by) => [el("dt", { text: by }), el("dd", { text: value(by) === null ? "–" : fixed(value(by), 2) })];
  const { paint } = page;
  const map = held && !held.stack.long ? [heat(held.i, held.j, (i, j) => paint.tint(shade(held.at(i, j), 1)))]
    : [];
  const open = held ? el("button", { class: "chip", "data-key": "open-head", text: "open this head",
    onclick: () => openHead(page, held) })
    : el("p", { class: "hint", text: "This page does not hold its weights." });
  return [el("p", {}, el("b", { text: name })), el("dl", {}, have.map(number)), ...map, open];
}

const openHead = (page, head) => page.choose(head, head.stack.long ? "long" : head.stack.same ? "spotlight" : "cross");

// Where a number stands between the smallest and the largest.
function span(heads, by) {
  const numbers = heads.map((one) => one.value(by)).filter((x) => x !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return { low, high, part: (x) => (high > low ? (x - low) / (high - low) : 0.5) };
}

function metricGrid(page, own, heads, look) {
  const { all } = page.header, { paint } = page, { part } = span(heads, own.by);
  const key = (event, { row, head }) => {
    const move = ARROWS[event.key];
    if (!move) return;
    event.preventDefault();
    page.root.querySelector(`[data-key="head-${row + move[0]}-${head + move[1]}"]`)?.focus();
  };
  const reached = own.at ?? heads[0];
  const cell = (one) => {
    // Strong is what comes first: the sharpest head by entropy, the largest number otherwise.
    const x = one.value(own.by), rank = own.by === "entropy" ? 1 - part(x) : part(x);
    const colour = paint.tint(x === null ? 0 : 0.04 + 0.96 * rank);
    return el("td", {}, el("button", {
      class: "headcell", "data-key": `head-${one.row}-${one.head}`, tabindex: one.name === reached.name ? 0 : -1,
      style: { background: paint.css(colour), color: paint.ink(colour) },
      "aria-label": `${one.name}: ${x === null ? "unknown" : fixed(x, 2)}`,
      onmouseenter: () => look(one), onfocus: () => look(one), onkeydown: (e) => key(e, one), onclick: () => one.held
        && openHead(page, one.held),
    }, one.held ? thumbnail(one.held, paint) : el("i", { class: "heat" }),
      el("span", { text: x === null ? "–" : fixed(x, x >= 10 ? 0 : x >= 1 ? 1 : 2) })));
  };
  const widest = Math.max(...all.map(([, , count]) => count));
  return el("table", { class: "grid", style: { "--heads": widest } },
    el("caption", { class: "hidden", text: `${own.by} of every head` }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: all[0][1] ? "layer" : "" }),
      range(widest).map((h) => el("th", { scope: "col", text: String(h) })))),
    el("tbody", {}, all.map(([index, name], row) => el("tr", {},
      el("th", { scope: "row", title: name, text: String(index) }),
      heads.filter((one) => one.row === row).map(cell)))));
}

// The pattern of a head in at most so many cells a side. A cell is the largest weight in it: none is lost.
const THUMBNAIL = 48;
function thumbnail(head, paint) {
  const { stored } = head.stack.long ? head : {}, [m, n] = stored ? stored.tiles : [head.i, head.j];
  const at = stored ? (i, j) => stored.share(i, j) : (i, j) => head.at(i, j), most = stored ? stored.scale : 1;
  const [rows, cols] = [Math.min(m, THUMBNAIL), Math.min(n, THUMBNAIL)];
  return heat(rows, cols, (r, c) => {
    let best = 0;
    for (let i = edge(r, rows, m); i < edge(r + 1, rows, m); i++) {
      for (let j = edge(c, cols, n); j < edge(c + 1, cols, n); j++) best = Math.max(best, at(i, j));
    }
    return paint.tint(shade(best, most));
  });
}

function scatter(page, own, heads, look) {
  const [width, height] = [520, 300], [sx, sy] = [span(heads, own.x), span(heads, own.y)], { paint } = page,
    deepest = Math.max(1, page.header.all.length - 1);
  const point = (one) => svg("circle", {
    class: "point", r: 6, cx: sx.part(one.value(own.x)) * width, cy: height - sy.part(one.value(own.y)) * height,
    style: { fill: paint.css(paint.tint(0.3 + (0.7 * one.row) / deepest)) },
    onmouseenter: () => look(one), onclick: () => one.held && openHead(page, one.held),
  }, svg("title", { text: `${one.name}: ${own.x} ${fixed(one.value(own.x), 2)}, ${own.y} ${fixed(one.value(own.y), 2)}` }));
  const text = (t, props) => svg("text", { class: "tiny", ...props, text: t });
  return el("figure", {},
    svg("svg", { class: "scatter", viewBox: `-46 -16 ${width + 66} ${height + 56}`, role: "img",
      "aria-label": `${own.y} against ${own.x}, one point a head` },
      svg("path", { class: "axis", d: `M-10 -10V${height + 10}H${width + 10}` }),
      text(near(sx.low), { x: 0, y: height + 26 }),
        text(near(sx.high), { x: width, y: height + 26, "text-anchor": "end" }),
      text(near(sy.low), { x: -14, y: height, "text-anchor": "end" }),
        text(near(sy.high), { x: -14, y: 4, "text-anchor": "end" }),
      text(own.x, { x: width / 2, y: height + 34, "text-anchor": "middle" }),
        text(own.y, { transform: `translate(-30 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }),
      heads.filter((one) => one.value(own.x) !== null && one.value(own.y) !== null).map(point)),
    el("figcaption", { text: "One point a head; the later the layer, the stronger the colour." }));
}
