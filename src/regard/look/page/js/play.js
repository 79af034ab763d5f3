// Play: change the rules of attention and see what the weights do.

import { brief, entropy, fixed, mix, near, range, SIMILARITIES, softmax } from "./numbers.js";
import { behind, choice, el, heat, lane, lanes, shade, strip, svg, tick, word } from "./elements.js";
import { headChoice, stackChoice, wordChoice } from "./controls.js";
import { legend } from "./square.js";

export function play(page, box) {
  const t = page.stack.rows.length;
  const own = (page.play ??= { similarity: "scaled", power: 0, causal: false, window: false, width: 2,
    recorded: true });
  own.order = own.order?.length === t ? own.order : range(t);
  const picks = el("span", { class: "picks" }), scale = el("output", {}), result = el("div", { class: "plays" });
  const row = el("div", { class: "row" }), bars = el("div", { class: "bars" }), map = el("div", { class: "map" }),
    values = el("div", { class: "outputs" });
  const update = () => {
    scale.textContent = `× ${fixed(2 ** own.power, 2)}`;
    const now = played(page, own);
    if (!now) {
      result.replaceChildren(el("p", { class: "hint", text: "Of this head the page holds the weights alone; choose another one." }));
      return;
    }
    if (!row.isConnected) result.replaceChildren(row, bars, map, values,
      behind("Weights as computed in this page", () => playTable(page, page.played.w, own.order)));
    // The row of the lit word at once, all others in slices of time: the slider must not wait for them.
    row.replaceChildren(saturation(now.w(now.place), now.rowAt, own.power));
    bars.replaceChildren(playBars(page, now.w(now.place), own.order, now.place));
    page.played = now.all;
    inSlices(page, function* () {
      for (let i = 0; i < t; i++) { now.w(i); now.y(i); now.straight(i); yield; }
      map.replaceChildren(playMap(page, now.all.w));
      yield;
      values.replaceChildren(...(page.stack.same && now.all.y ? [outputs(page, now, own)] : []));
    });
  };
  playControls(page, box, own, picks, scale, (change) => { Object.assign(own, change); update(); });
  box.append(result);
  return () => {
    picks.replaceChildren(...[stackChoice(page), wordChoice(page), headChoice(page)].filter(Boolean));
    update();
  };
}

// Work that goes on in slices of a few milliseconds, until other work is begun.
function inSlices(page, work) {
  const steps = work(), mine = (page.slices = Symbol("work"));
  const go = () => {
    for (const end = performance.now() + 8; page.slices === mine
      && performance.now() < end;) if (steps.next().done) return;
    if (page.slices === mine) setTimeout(go, 0);
  };
  requestAnimationFrame(go);
}

function playControls(page, box, own, picks, scale, again) {
  const { same, rows } = page.stack, masked = page.head.layer.visible !== undefined;
  const slider = el("input", {
    type: "range", min: -5, max: 5, step: 0.1, value: own.power, "data-key": "power", "aria-label": "scale",
    oninput: (e) => again({ power: Number(e.target.value) }),
  });
  const width = el("input", {
    type: "number", min: 0, max: rows.length, value: own.width, "data-key": "width",
      "aria-label": "words to either side",
    oninput: (e) => again({ width: Math.max(0, Number(e.target.value) || 0) }),
  });
  const similarities = Object.entries(SIMILARITIES).map(([id, s]) => [id, `${s.name}: ${s.formula}`]);
  const button = (key, text, cls, order) => el("button", { class: cls, "data-key": key, text,
    onclick: () => again({ order: order() }) });
  const places = same ? [
    tick("causal mask", "causal", own.causal, (causal) => again({ causal })),
    el("span", { class: "pair" }, tick("window of", "window", own.window, (window) => again({ window })), width),
  ] : [];
  box.append(
    el("div", { class: "controls" }, picks,
      choice("similarity", "similarity", similarities, own.similarity, (similarity) => again({ similarity }))),
    el("div", { class: "controls" }, el("label", { class: "field wide" }, el("span", { text: "scale" }), slider, scale),
      places,
      masked && tick("the recorded mask", "recorded", own.recorded, (recorded) => again({ recorded })),
      same && [button("shuffle", "shuffle the words", "chip", () => shuffled(rows.length)),
        button("unshuffle", "put them back", "chip quiet", () => range(rows.length))]));
}

// Attention by the rules that were chosen, with the words in the order they stand in; a row is computed when it is asked
// for. Scores do not depend on the scale: while the slider moves, they are taken from the last time.
function played(page, own) {
  const { head } = page, { same } = page.stack, [q, k, v] = ["q", "k", "v"].map((name) => head.vectors(name));
  if (!q) return null;
  const visible = (i, j) => (!own.causal || j <= i) && (!own.window || Math.abs(i - j) <= own.width)
    && (!own.recorded || head.visible(i, j));
  const { similarity, causal, window, width, recorded, order } = own, keys = same ? order : range(k.length);
  const key = JSON.stringify([head.id, similarity, causal, window && width, recorded]);
  if (own.scores?.key !== key || own.scores.orders.size > 8) own.scores = { key, orders: new Map() };
  const factor = 2 ** own.power, like = SIMILARITIES[similarity].of, straight = range(q.length);
  const scoresOf = (rows, cols) => {
    const name = String(rows), { orders } = own.scores;
    if (!orders.has(name)) orders.set(name, once((i) => cols.map((j, m) => (visible(i, m) ? like(q[rows[i]], k[j])
      : -Infinity))));
    return orders.get(name);
  };
  const attend = (rows, cols) => {
    const scores = scoresOf(rows, cols), w = once((i) => softmax(scores(i).map((s) => s * factor)));
    return { scores, w, y: once((i) => v && mix(w(i), cols.map((j) => v[j]))) };
  };
  const moved = order.some((x, n) => x !== n), now = attend(order, keys), place = order.indexOf(page.state.word);
  const unmoved = moved && same ? attend(straight, straight) : now;
  return {
    ...now, place, moved, straight: unmoved.y, rowAt: (power) => softmax(now.scores(place).map((s) => s * 2 ** power)),
    all: { get w() { return straight.map(now.w); }, get y() { return v && straight.map(now.y); } },
  };
}

// A function of a number that computes every value once.
function once(make) {
  const values = [];
  return (n) => (values[n] ??= make(n));
}

// Any order but the one the words stand in.
function shuffled(t) {
  const order = range(t);
  for (let n = t - 1; n > 0; n--) {
    const m = Math.floor(Math.random() * (n + 1));
    [order[n], order[m]] = [order[m], order[n]];
  }
  return t > 1 && order.every((x, n) => x === n) ? order.reverse() : order;
}

// Peak and entropy of the row at every scale, and where the slider stands.
function saturation(w, rowAt, power) {
  const most = Math.log(w.length) || 1, [width, height] = [300, 110], across = (p) => ((p + 5) / 10) * width;
  const points = range(41).map((n) => {
    const p = -5 + n / 4, row = rowAt(p);
    return [across(p), Math.max(...row), entropy(row) / most];
  });
  const [peak, h, x] = [Math.max(...w), entropy(w), across(power)];
  const curve = (n, share, colour, cls) => [
    svg("polyline", { class: cls, points: points.map((p) => `${p[0]},${height - p[n] * height}`).join(" "),
      style: { stroke: colour } }),
    svg("circle", { cx: x, cy: height - share * height, r: 4, style: { fill: colour } }),
  ];
  const number = (name, value, colour, more) => el("span", { style: { "--colour": colour } },
    el("i", { class: "dot" }), `${name} `, el("b", { "data-read": name, text: fixed(value, 3) }), more);
  const said = peak > 0.95 ? "saturated: nearly all on one word" : h > 0.95 * most ? "nearly uniform: every word alike"
    : "in between";
  const label = `peak ${fixed(peak, 3)}, entropy ${fixed(h, 3)}`;
  const text = (x, y, anchor, text) => svg("text", { class: "tiny", x, y, "text-anchor": anchor, text });
  const ticks = [text(-4, height + 3, "end", "0"), text(-4, 5, "end", "1"),
    ...[-5, -3, 0, 3, 5].map((p) => text(across(p), height + 14, "middle", `×${near(2 ** p)}`))];
  return el("figure", { class: "saturation" },
    el("div", { class: "pairs" }, number("peak", peak, "var(--accent)"), number("entropy", h, "var(--h0)",
      ` of ${fixed(most, 2)} nats`)),
    svg("svg", { viewBox: `-16 -8 ${width + 32} ${height + 26}`, role: "img", "aria-label": label },
      svg("path", { class: "axis", d: `M0 0V${height}H${width}` }), ticks,
      svg("line", { class: "mark", x1: x, x2: x, y1: -4, y2: height }),
      curve(1, peak, "var(--accent)", "curve"), curve(2, h / most, "var(--h0)", "curve dashed")),
    el("figcaption", { text: `peak, and entropy as a share of ${fixed(most, 2)}, at every scale; now ${said}` }));
}

function playBars(page, w, order, place) {
  const { same, rows, cols } = page.stack, name = (j) => (same ? order[j] : j), recorded = page.head.row(order[place]);
  const shown = w.length > 30 ? range(w.length).sort((a, b) => w[b] - w[a]).slice(0, 20) : range(w.length);
  const line = (j) => el("li", { class: same && j === place ? "lit" : "" }, word(cols.label(name(j))),
    lanes([lane("var(--accent)", w[j], brief(w[j]), { "data-j": name(j) }, recorded[name(j)])]));
  return el("figure", {}, el("figcaption", {}, word(rows.label(order[place])),
    " looks at; a full bar is 1, the mark is the recorded weight"),
    el("ol", { class: "best tight" }, shown.map(line)));
}

function playMap(page, w) {
  const { paint } = page, map = heat(w.length, w[0].length, (r, c) => paint.tint(shade(w[r][c], 1)));
  return el("figure", {}, el("figcaption", { text: "all words at once" }), map, legend(page, 1));
}

// Shuffle the words and the outputs are shuffled the same way, unless a mask tells places apart.
function outputs(page, { all: { y }, straight, moved }, own) {
  const few = 24, size = (row) => { let most = 0; for (const x of row) most = Math.max(most, Math.abs(x)); return most;
    };
  const gap = Math.max(...y.map((row, n) => size(row.map((x, e) => x - straight(own.order[n])[e]))));
  const exact = gap <= 1e-5 * Math.max(...y.map((_, n) => size(straight(n))));
  const most = Math.max(...y.map((row) => size(row.slice(0, few))));
  const said = !moved ? "Shuffle the words: does each keep its output?"
    : exact ? "Shuffled words, outputs shuffled the same way: every word keeps its output. Attention sees a set."
      : `Now places matter: with this mask outputs change by up to ${fixed(gap, 2)}.`;
  const line = (row, n) => el("li", {}, word(page.stack.rows.label(own.order[n])), strip(row.slice(0, few), most,
    page.paint, "output"));
  return el("figure", {}, el("figcaption", { text: "outputs y" }),
    el("ol", {}, y.slice(0, 60).map(line)),
    el("p", { class: "hint", "data-read": "equivariant", text: said }));
}

function playTable(page, w, order) {
  const { same, rows, cols } = page.stack, few = 60, name = (j) => cols.label(same ? order[j] : j);
  const body = w.slice(0, few).map((row, n) => [word(rows.label(order[n])), ...Array.from(row.slice(0, few))]);
  return [["", ...w[0].slice(0, few).map((_, j) => word(name(j)))], body];
}
