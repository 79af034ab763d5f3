// Lab: change the rules of attention and see what the weights do. Axes are fixed, and ghosts show what was recorded.

import { brief, clamp, dot, entropy, fixed, largest, mix, near, range, SIMILARITIES, softmax, sum } from "./numbers.js";
import { behind, choice, el, lane, lanes, pooledHeat, strip, svg, tick, word } from "./elements.js";
import { headChoice, stackChoice, wordChoice } from "./controls.js";
import { tileUnder } from "./long.js";
import { legend } from "./square.js";
import { labOf } from "./address.js";

export function play(page, box) {
  const t = page.stack.rows.length;
  const own = (page.play ??= labOf(page.stack));
  own.order = own.order.length === t ? own.order : range(t);
  own.forbidden = own.forbidden.filter((j) => j < page.stack.cols.length);
  const picks = el("span", { class: "picks" }), scale = el("output", {}), result = el("div", { class: "plays" });
  const map = el("div", { class: "map" }), values = el("div", { class: "outputs" });
  const again = (change) => { Object.assign(own, change); update(); page.writeSoon(); };
  const curves = saturation(page.stack.cols, (power) => { slider.value = power; again({ power }); });
  const bars = playBars(page, own, (forbidden) => page.keepingFocus(() => again({ forbidden })));
  const update = () => {
    scale.textContent = `× ${fixed(2 ** own.power, 2)}`;
    const now = played(page, own);
    if (!now) {
      result.replaceChildren(el("p", { class: "hint", text: "Of this head the page holds the weights alone; choose another one." }));
      return;
    }
    if (!bars.node.isConnected) result.replaceChildren(curves.node, bars.node, map, values,
      behind("Weights as computed in this page", () => playTable(page, page.played.w, own)));
    // The row of the lit word at once, all others in slices of time: the slider must not wait for them.
    curves.draw(now, own);
    bars.draw(now);
    page.played = now.all;
    inSlices(page, function* () {
      for (let i = 0; i < t; i++) { now.w(i); now.y(i); now.straight(i); yield; }
      map.replaceChildren(playMap(page, now, own));
      yield;
      values.replaceChildren(...(page.stack.same && now.all.y ? [outputs(page, now, own)] : []));
    });
  };
  const slider = playControls(page, box, own, picks, scale, again);
  box.append(result);
  return () => {
    picks.replaceChildren(...[stackChoice(page), wordChoice(page), headChoice(page), similarityChoice(page, own, again)].filter(Boolean));
    update();
  };
}

// Work that goes on in a slice of a few milliseconds a frame, until it is done (`page.slices` is null) or other work begins.
function inSlices(page, work) {
  const steps = work(), mine = (page.slices = Symbol("work"));
  const go = () => {
    if (page.slices !== mine) return;
    for (const end = performance.now() + 4; performance.now() < end;) if (steps.next().done) { page.slices = null; return; }
    requestAnimationFrame(go);
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
      "aria-label": `${rows.units} to either side`,
    oninput: (e) => again({ width: Math.max(0, Math.floor(Number(e.target.value)) || 0) }),
  });
  const button = (key, text, cls, order) => el("button", { class: cls, "data-key": key, text,
    onclick: () => again({ order: order() }) });
  const places = same ? [
    tick("causal mask", "causal", own.causal, (causal) => again({ causal })),
    el("span", { class: "pair" }, tick("window of", "window", own.window, (window) => again({ window })), width),
  ] : [];
  box.append(
    el("div", { class: "controls" }, picks),
    el("div", { class: "controls" }, el("label", { class: "field wide" }, el("span", { text: "scale" }), slider, scale),
      places,
      masked && tick("the recorded mask", "recorded", own.recorded, (recorded) => again({ recorded })),
      same && [button("shuffle", `shuffle the ${rows.units}`, "chip", () => shuffled(rows.length)),
        button("unshuffle", "put them back", "chip quiet", () => range(rows.length))]));
  return slider;
}

// A head whose scores are not q·k / √d: how they were recorded. Null of others, and where places change the scores.
function recordedAs(head) {
  const { d, scale, s, by_place: byPlace, score_name: name } = head.layer;
  if (byPlace || (s === undefined && Math.abs(scale * Math.sqrt(d) - 1) < 1e-6)) return null;
  const scores = head.part("s");
  return { name: name ?? (scale === 1 ? "q·k" : `${near(scale)} q·k`), of: (q, k, i, j) => (scores ? scores[i * head.j + j] : scale * dot(q, k)) };
}

const similarityOf = (page, own) => (own.similarity === "recorded" && !recordedAs(page.head) ? "scaled" : own.similarity);
function similarityChoice(page, own, again) {
  const recorded = recordedAs(page.head), all = Object.entries(SIMILARITIES).map(([id, { name, formula }]) => [id, `${name}: ${formula}`]);
  return choice("similarity", "similarity", [...(recorded ? [["recorded", `as recorded: ${recorded.name}`]] : []), ...all], similarityOf(page, own),
    (similarity) => again({ similarity }));
}

// Attention by the rules that were chosen, with the words in the order they stand in; a row is computed when it is asked
// for. Scores do not depend on the scale: while the slider moves, they are taken from the last time.
function played(page, own) {
  const { head } = page, { same } = page.stack, [q, k, v] = ["q", "k", "v"].map((name) => head.vectors(name));
  if (!q) return null;
  const barred = new Set(own.forbidden);
  const visible = (i, j) => (!own.causal || j <= i) && (!own.window || Math.abs(i - j) <= own.width)
    && (!own.recorded || head.visible(i, j)) && !barred.has(keys[j]);
  const { causal, window, width, recorded, order } = own, similarity = similarityOf(page, own), keys = same ? order : range(k.length);
  const key = JSON.stringify([head.id, similarity, causal, window && width, recorded, own.forbidden]);
  if (own.scores?.key !== key || own.scores.orders.size > 8) own.scores = { key, orders: new Map() };
  const sink = (own.sinks ??= new Map()).get(head.id) ?? sinkScore(head, q, k);
  own.sinks.set(head.id, sink);
  // A sink is one more score, which no scale changes; its weight goes to no word.
  const share = (scores, by) => softmax([...scores.map((s) => s * by), sink]).slice(0, -1);
  const factor = 2 ** own.power, like = (SIMILARITIES[similarity] ?? recordedAs(head)).of, straight = range(q.length);
  const scoresOf = (rows, cols) => {
    const name = String(rows), { orders } = own.scores;
    if (!orders.has(name)) orders.set(name, once((i) => cols.map((j, m) => (visible(i, m) ? like(q[rows[i]], k[j], rows[i], j)
      : -Infinity))));
    return orders.get(name);
  };
  const attend = (rows, cols) => {
    const scores = scoresOf(rows, cols), w = once((i) => share(scores(i), factor));
    return { scores, w, y: once((i) => v && mix(w(i), cols.map((j) => v[j]))) };
  };
  const moved = order.some((x, n) => x !== n), now = attend(order, keys), place = order.indexOf(page.state.word);
  const unmoved = moved && same ? attend(straight, straight) : now;
  return {
    ...now, key: `${key} ${order} ${place}`, place, moved, straight: unmoved.y, rowAt: (power) => share(now.scores(place), 2 ** power),
    all: { get w() { return straight.map(now.w); }, get y() { return v && straight.map(now.y); } },
  };
}

// The score of a head's sink, from the row whose weights lack most of 1; −∞ of a head that has none.
function sinkScore(head, q, k) {
  if (!head.layer.sink) return -Infinity;
  const lacking = range(head.i).map((i) => 1 - sum(head.row(i))), i = largest(lacking);
  const scores = range(head.j).map((j) => (head.visible(i, j) ? dot(q[i], k[j]) * head.layer.scale : -Infinity));
  const most = Math.max(...scores);
  return Math.log(lacking[i] / (1 - lacking[i])) + most + Math.log(sum(scores.map((s) => Math.exp(s - most))));
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

// Peak and entropy of the row at every scale, and where the slider stands; a drag over the curves moves it.
function saturation({ unit }, slide) {
  const [width, height] = [300, 110], across = (p) => ((p + 5) / 10) * width, up = (share) => height - share * height;
  const text = (x, y, anchor, text) => svg("text", { class: "tiny", x, y, "text-anchor": anchor, text });
  const ticks = [0, 0.5, 1].flatMap((y) => [text(-6, up(y) + 4, "end", String(y)), svg("path", { class: "axis", d: `M-3 ${up(y)}H${width}` })]);
  const powers = range(11).map((n) => n - 5).flatMap((p) => [[-5, -3, 0, 3, 5].includes(p) ? text(across(p), height + 15, "middle", `×${near(2 ** p)}`) : [],
    svg("path", { class: "axis", d: `M${across(p)} ${height}v3` })]);
  const line = (colour, cls) => svg("polyline", { class: cls, style: { stroke: colour } });
  const point = (colour) => svg("circle", { r: 4, style: { fill: colour } });
  const [peakLine, entropyLine] = [line("var(--accent)", "curve"), line("var(--h0)", "curve dashed")];
  const [peakPoint, entropyPoint] = [point("var(--accent)"), point("var(--h0)")], mark = svg("line", { class: "mark", y1: -4, y2: height });
  const plot = svg("svg", { class: "plot-area", viewBox: `-26 -10 ${width + 44} ${height + 30}`, role: "img" }, ticks, powers,
    svg("path", { class: "axis", d: `M0 0V${height}H${width}` }), mark, peakLine, entropyLine, peakPoint, entropyPoint);
  const drag = (event) => {
    const box = plot.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * (width + 44) - 26;
    slide(Math.round(clamp((x / width) * 10 - 5, -5, 5) * 10) / 10);
  };
  plot.addEventListener("pointerdown", (event) => { plot.setPointerCapture(event.pointerId); drag(event); });
  plot.addEventListener("pointermove", (event) => { if (event.buttons) drag(event); });
  const [peakText, entropyText] = ["peak", "entropy"].map((name) => el("b", { "data-read": name })), limit = el("span"), caption = el("figcaption");
  const named = (name, value, colour, more) => el("span", { style: { "--colour": colour } }, el("i", { class: "dot" }), `${name} `, value, more);
  const node = el("figure", { class: "saturation" }, el("div", { class: "pairs" }, named("peak", peakText, "var(--accent)"),
    named("entropy", entropyText, "var(--h0)", limit)), plot, caption);
  let drawn = null;
  // The curves do not depend on the scale: they are computed anew only for another row or other rules.
  const draw = (now, { power }) => {
    const w = now.w(now.place), seen = now.scores(now.place).filter((s) => s > -Infinity).length, most = Math.log(seen || 1), [peak, h, x] = [Math.max(...w), entropy(w), across(power)];
    if (drawn !== now.key) {
      const points = range(41).map((n) => { const p = -5 + n / 4, row = now.rowAt(p);
        return [across(p), Math.max(...row), entropy(row) / (most || 1)]; });
      [peakLine, entropyLine].forEach((one, n) => one.setAttribute("points", points.map((p) => `${p[0]},${up(p[n + 1])}`).join(" ")));
      limit.textContent = ` of ${fixed(most, 2)} nats`;
      drawn = now.key;
    }
    for (const [node, values] of [[mark, { x1: x, x2: x }], [peakPoint, { cx: x, cy: up(peak) }], [entropyPoint, { cx: x, cy: up(h / (most || 1)) }]]) {
      for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
    }
    peakText.textContent = fixed(peak, 3);
    entropyText.textContent = fixed(h, 3);
    plot.setAttribute("aria-label", `peak ${fixed(peak, 3)}, entropy ${fixed(h, 3)}`);
    if (seen < 2) {
      caption.textContent = seen ? `it may look at one ${unit} alone, whatever the scale` : "it may look at nothing, whatever the scale";
      return;
    }
    const summary = peak > 0.95 ? `saturated: nearly all on one ${unit}` : h > 0.95 * most ? `nearly uniform: every ${unit} that it sees alike` : "in between";
    caption.textContent = `peak, and entropy as a share of ${fixed(most, 2)}, at every scale; now ${summary}`;
  };
  return { node, draw };
}

const SHOWN = 20; // bars of a long sentence: the words with the largest recorded weights, whatever the rules do
// The row of the lit word: bars from 0 to 1, ghosts of the recorded weights, and words that a click forbids. Bars are made
// once for a row and changed in place.
function playBars(page, own, forbid) {
  const caption = el("figcaption"), list = el("ol", { class: "best tight" }), note = el("p", { class: "hint", "data-read": "forbidden" });
  const axis = el("li", { class: "bar-axis", "aria-hidden": "true" }, el("span"), el("span", { class: "ruler" }, [0, 0.25, 0.5, 0.75, 1].map((x) => el("span",
    { style: { "--w": `${100 * x}%` }, text: String(x) }))));
  const node = el("div", { class: "bars" }, el("figure", {}, caption, list, note));
  let builtKey = null, lines = [];
  const build = (now) => {
    const { same, rows, cols } = page.stack, { order } = own, token = (j) => (same ? order[j] : j), ghost = page.head.row(order[now.place]);
    const all = range(cols.length), barred = new Set(own.forbidden);
    // Of words that the recorded mask forbids, the nearest.
    const far = (j) => (same ? Math.abs(j - now.place) : 0), most = (a, b) => ghost[token(b)] - ghost[token(a)] || far(a) - far(b);
    const chosen = all.length > 30 ? new Set([...all].sort(most).slice(0, SHOWN)) : null;
    const shown = all.filter((j) => !chosen || chosen.has(j) || barred.has(token(j)));
    const toggle = (n) => forbid(barred.has(n) ? own.forbidden.filter((m) => m !== n) : [...own.forbidden, n]);
    lines = shown.map((j) => {
      const n = token(j), out = barred.has(n), row = lane("var(--accent)", 0, "", { "data-j": n }, ghost[n]);
      const name = el("button", { class: "plain", "data-key": `forbid-${n}`, "aria-pressed": String(out),
        title: out ? `allow this ${cols.unit} again` : `forbid this ${cols.unit}`, onclick: () => toggle(n) }, word(cols.name(n)));
      const item = el("li", { class: [same && j === now.place && "lit", out && "barred"].filter(Boolean).join(" ") }, name, lanes([row]));
      return { j, item, bar: row, number: row.querySelector("b"), ghost: ghost[n], out };
    });
    list.replaceChildren(...lines.map(({ item }) => item), axis);
    caption.replaceChildren(word(rows.name(order[now.place])), ` looks at; the frame is the recorded weight. Click a ${cols.unit} to forbid it`,
      page.head.layer.sink ? "; the rest goes to the sink" : "", page.head.layer.by_place ? `; scores are not those of ${page.head.layer.score_name}` : "", page.stack.window ? `; here the ${cols.units} of the window share the whole row` : "",
      shown.length < all.length ? `; the ${shown.length} ${cols.units} with the largest recorded weights` : "");
    const lost = own.forbidden.reduce((sum, n) => sum + ghost[n], 0), count = own.forbidden.length;
    note.replaceChildren(count ? `${count} ${count > 1 ? page.stack.cols.units : page.stack.cols.unit} forbidden: ${fixed(lost, 3)} of the recorded row is shared by the others. ` : "",
      count ? el("button", { class: "chip quiet", "data-key": "forbid-none", text: "allow all", onclick: () => forbid([]) }) : "");
  };
  const draw = (now) => {
    const w = now.w(now.place), scores = now.scores(now.place), key = `${page.head.id} ${own.order} ${now.place} ${own.forbidden}`;
    if (builtKey !== key) { build(now); builtKey = key; }
    for (const { j, item, bar, number, ghost, out } of lines) {
      const by = w[j] - ghost, masked = !out && scores[j] === -Infinity;
      item.classList.toggle("unseen", masked);
      bar.style.setProperty("--w", `${100 * w[j]}%`);
      number.textContent = out ? "forbidden" : masked ? "masked" : brief(w[j]);
      bar.title = `${by > 0 ? "+" : ""}${fixed(by, 3)} against the recorded weight`;
    }
  };
  return { node, draw };
}

// Pointing at the map reads a weight, a click lights its row.
function playMap(page, { scores, all: { w } }, { order }) {
  const { paint, stack: { same, rows, cols } } = page, title = `all ${rows.units} at once`, caption = el("figcaption", { text: title });
  const at = (event) => tileUnder(map, event, w.length, w[0].length), map = pooledHeat(w.length, w[0].length, 220, paint, (r, c) => paint.cell(scores(r)[c] === -Infinity ? -1 : w[r][c]));
  map.addEventListener("pointermove", (event) => { const [r, c] = at(event);
    caption.replaceChildren(word(rows.name(order[r])), " → ", word(cols.name(same ? order[c] : c)), ` ${scores(r)[c] === -Infinity ? "masked" : fixed(w[r][c], 3)}`); });
  map.addEventListener("pointerleave", () => { caption.textContent = title; });
  map.addEventListener("click", (event) => page.set({ word: order[at(event)[0]] }));
  return el("figure", {}, caption, map, legend(page, 1));
}

// Of a long sentence, sixty places around the lit word; which ones is said.
const SOME = 60;
function nearby(page, own) {
  const t = page.stack.rows.length, from = clamp(own.order.indexOf(page.state.word) - SOME / 2, 0, Math.max(0, t - SOME));
  return range(Math.min(t, SOME)).map((n) => from + n);
}
const partOf = (places, t, units) => (places.length < t ? `, ${units} ${places[0]}–${places.at(-1)} of ${t}` : "");

// Shuffle the words and the outputs are shuffled the same way, unless a mask tells places apart.
function outputs(page, { all: { y }, straight, moved }, own) {
  const { unit, units } = page.stack.rows, few = 24, size = (row) => { let most = 0; for (const x of row) most = Math.max(most, Math.abs(x)); return most;
    };
  const gap = Math.max(...y.map((row, n) => size(row.map((x, e) => x - straight(own.order[n])[e]))));
  const exact = gap <= 1e-5 * Math.max(...y.map((_, n) => size(straight(n))));
  const most = Math.max(...y.map((row) => size(row.slice(0, few))));
  const summary = !moved ? `Shuffle the ${units}: does each keep its output?`
    : exact ? `Shuffled ${units}, outputs shuffled the same way: every ${unit} keeps its output. Attention sees a set.`
      : `Now places matter: with this mask outputs change by up to ${fixed(gap, 2)}.`;
  const places = nearby(page, own), line = (n) => el("li", {}, word(page.stack.rows.name(own.order[n])), strip(y[n].slice(0, few), most,
    page.paint, "output"));
  return el("figure", {}, el("figcaption", { text: `outputs y${partOf(places, y.length, units)}` }),
    el("ol", {}, places.map(line)),
    el("p", { class: "hint", "data-read": "equivariant", text: summary }));
}

function playTable(page, w, own) {
  const { same, rows, cols } = page.stack, { order } = own, name = (j) => cols.name(same ? order[j] : j);
  const places = nearby(page, own), keys = same ? places : range(Math.min(SOME, cols.length));
  return [[`${partOf(places, w.length, rows.units)}${same ? "" : partOf(keys, cols.length, cols.units)}`.slice(2), ...keys.map((j) => word(name(j)))],
    places.map((n) => [word(rows.name(order[n])), ...keys.map((j) => w[n][j])])];
}
