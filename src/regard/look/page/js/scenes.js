// The scenes of the story: each is a pure function of the numbers of one word and of a time between 0 and 1.
// Every number comes from the recorded head, or from the model's own word vectors where the page has them.

import { clamp, dot, fixed, largest, mix, range, softmax, sum } from "./numbers.js";
import { svg } from "./elements.js";
import { RIGHT_TO_LEFT } from "./book.js";
import { outside } from "./window.js";

export const SCENE_HEIGHT = 450;
// How wide the scene is drawn, and how many words fit: fewer on a small screen, so that they can be read.
export const scene = { width: 960 };
const [EDGE, FLOOR, ROOF, NUMBERS] = [30, 350, 40, 8];
const eased = (t) => { const x = clamp(t, 0, 1); return x * x * (3 - 2 * x); };
const tween = (a, b, t) => a + (b - a) * t;
// When the n-th of so many things moves, if they move one after the other: 0 before, 1 after.
const turnOf = (t, n, many) => eased(t * (many + 2) / 3 - n / 3);

const SLANT = 0.56; // radians
const LONGEST = 100; // of a slanted name, which would reach the end of the scene
// A word from right to left inside of a sentence: isolated, so that it does not turn what stands around it.
const isolated = (text) => (RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text);
const clipped = (text) => (text.length > 30 ? `${text.slice(0, 29)}…` : text);

// The numbers of the story: one word, the words it is shown with, and a head.
export function storyData(page) {
  const { head, stack } = page, i = page.state.word, row = head.row(i), embedded = page.header.embedded?.stack === stack.n ? page.header.embedded : null;
  const most = Math.floor(scene.width / 53), all = range(stack.cols.length), others = all.filter((j) => j !== i || !stack.same).sort((a, b) => row[b] - row[a]);
  const keys = all.length <= most ? all : [...new Set([...(stack.same ? [i, i + 1, i + 2] : []),
    ...others])].filter((j) => j < all.length).slice(0, most).sort((a, b) => a - b);
  const [q, k, v] = ["q", "k", "v"].map((name) => head.vectors(name)), stored = head.part("s"), { layer } = head;
  const pick = (x) => x && keys.map((j) => x[j]), raw = q && all.map((j) => dot(q[i], k[j]));
  const everyScore = stored ? all.map((j) => stored[i * head.j + j]) : raw?.map((x) => x * (layer.scale ?? 1));
  const few = (x) => Array.from(x.slice(0, NUMBERS));
  const data = { page, i, keys, at: stack.same ? keys.indexOf(i) : -1, same: stack.same, names: keys.map((j) => isolated(stack.cols.name(j))), word: isolated(clipped(stack.rows.name(i))),
    head, w: keys.map((j) => row[j]), left: 1 - sum(keys.map((j) => row[j])), scores: pick(everyScore), everyScore, size: layer.d, v: v && keys.map((j) => few(v[j])),
    y: v && few(mix(row, v)), visible: keys.map((j) => head.visible(i, j)), unit: stack.cols.unit, units: stack.cols.units };
  if (embedded) {
    const width = page.header.shape(embedded.x)[1], flat = page.header.array(embedded.x), t = stack.rows.length;
    const vector = (n) => few(flat.subarray(n * width, (n + 1) * width)), products = page.header.array(embedded.dots);
    Object.assign(data, { x: keys.map(vector), own: vector(i), everyAlike: all.map((j) => products[i * t + j]), width: embedded.size });
  } else if (q) Object.assign(data, { x: keys.map((j) => few(k[j])), own: few(q[i]), everyAlike: raw, width: layer.d,
    projected: !stack.same || q[i].some((x, n) => x !== k[i][n]) });
  data.alike = pick(data.everyAlike);
  if (q) Object.assign(data, { q: few(q[i]), k: keys.map((j) => few(k[j])) });
  return layNames(data);
}

// Drawing.

const stepOf = (data) => (scene.width - EDGE - data.left) / data.keys.length;
const placeOfWord = (data, n) => data.left + (n + 0.5) * stepOf(data);
const tinyText = (x, y, text, props) => svg("text", { class: "tiny", x, y, "text-anchor": "middle", text, ...props });
const cellOf = (x, y, width, height, fill, props) => svg("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), style: { fill }, ...props });

// How wide words are as the scene draws them, bold as the lit one.
const canvas = globalThis.document?.createElement("canvas").getContext("2d");
function widthOfWord(page, text) {
  canvas.font = `700 17px ${page.serif ??= getComputedStyle(page.root).getPropertyValue("--serif")}`;
  return canvas.measureText(text).width;
}
// The beginning of a word, at most eleven letters and as wide as the space there is.
function beginning(page, name, space = Infinity) {
  const letters = [...name];
  for (let n = Math.min(11, letters.length); ; n--) {
    const text = n === letters.length ? name : `${letters.slice(0, Math.max(1, n - 1)).join("")}…`;
    if (n <= 2 || space === Infinity || widthOfWord(page, text) <= space) return text;
  }
}
// Names stand side by side, or slanted where they are too long: then the words begin where those at the left end are seen whole.
function layNames(data) {
  const { page, names } = data, plain = names.map((name) => beginning(page, name)), many = names.length;
  data.left = EDGE;
  data.slanted = Math.max(...plain.map((name) => widthOfWord(page, name))) + 5 > stepOf(data);
  if (data.slanted) {
    data.shortNames = names.map((name) => beginning(page, name, LONGEST));
    const needed = data.shortNames.map((name, n) => { const at = (n + 0.5) / many;
      return (widthOfWord(page, name) * Math.cos(SLANT) + 6 - at * (scene.width - EDGE)) / (1 - at); });
    data.left = Math.max(EDGE, ...needed);
  } else data.shortNames = plain;
  return data;
}
// The middle of a text that stays within the scene.
function within(data, x, text) {
  const half = Math.min(scene.width, widthOfWord(data.page, text) + 4) / 2;
  return clamp(x, half, scene.width - half);
}

// The words below; the lit one is framed, those that are hidden are pale.
function wordsBelow(data, hidden = (_) => 0, y = FLOOR + 26) {
  return data.shortNames.map((name, n) => svg("text", { class: `story-word${n === data.at ? " lit" : ""}${hidden(n) > 0.5 ? " faint" : ""}`,
    ...(data.slanted ? { transform: `translate(${placeOfWord(data, n) + 4} ${y}) rotate(${(-180 * SLANT) / Math.PI})`, "text-anchor": "end" }
      : { x: placeOfWord(data, n), y, "text-anchor": "middle" }), text: name }));
}

// A vector as a column of cells; its colours are those of all vectors of the scene.
function vectorColumn(data, vector, x, y, most, { width = 14, cell = 8, opacity = 1 } = {}) {
  const { paint } = data.page;
  return svg("g", { opacity }, vector.map((value, n) => cellOf(x - width / 2, y + n * cell, width, cell, paint.css(paint.signed(most ? value / most : 0)))),
    svg("rect", { class: "cellframe", x: x - width / 2, y, width, height: cell * vector.length }));
}
// A weight as a cell of a matrix; hatched where the mask forbids it.
function weightCell({ page: { paint } }, weight, ...place) {
  const colour = paint.cell(weight);
  return colour ? cellOf(...place, paint.css(colour)) : cellOf(...place, null, { class: "storyhatch", fill: "url(#story-hatch)" });
}
const sizeOf = (vectors) => Math.max(1e-9, ...vectors.flat().map(Math.abs));

// Bars that stand on a line, one a word, with their numbers; `shares` says how much of a bar is there.
function barsOf(data, values, { base, high, most, shown = (_) => 1, colour = "var(--accent)", digits = 2, ghost = null, numbered = (_) => true }) {
  const wide = Math.min(34, stepOf(data) * 0.62), tall = (x) => (high * Math.abs(x)) / most;
  return values.map((x, n) => {
    const [h, at] = [tall(x) * shown(n), placeOfWord(data, n)], up = x >= 0;
    return svg("g", {}, ghost && Number.isFinite(ghost[n]) ? svg("rect", { class: "ghostbar", x: at - wide / 2, width: wide,
      y: ghost[n] >= 0 ? base - tall(ghost[n]) : base, height: tall(ghost[n]) }) : [],
    cellOf(at - wide / 2, up ? base - h : base, wide, h, up ? colour : "rgb(var(--minus))"),
    shown(n) > 0.5 && numbered(n) ? tinyText(at, up ? base - h - 6 : base + h + 13, Number.isFinite(x) ? fixed(x, digits) : "−∞") : []);
  });
}
const baseline = (y) => svg("path", { class: "axis", d: `M${EDGE - 8} ${y}H${scene.width - EDGE + 8}` });
const noteAt = (x, y, text, props) => svg("text", { class: "story-note", x, y, text, ...props });
// Where bars stand so that those above and below the line, with their numbers, share the height between two places.
function standing(values, top, bottom) {
  const finite = values.filter(Number.isFinite), up = Math.max(0, ...finite), down = Math.max(0, ...finite.map((x) => -x)), most = Math.max(1e-9, up + down);
  const first = up ? top + 18 : top, last = down ? bottom - 18 : bottom;
  return { base: first + ((last - first) * up) / most, high: last - first, most };
}

// 1 and 2: how alike two vectors are, and the scale.

function alike(data, t) {
  const most = sizeOf([...data.x, data.own]), many = data.keys.length, at = clamp(t * 1.1, 0, 1) * (many - 1), strips = 266;
  const passed = (n) => eased(t * 1.1 * (many - 1) - n + 1), place = standing(data.alike, 50, strips - 22);
  const probe = t < 0.97 ? [vectorColumn(data, data.own, placeOfWord(data, at) - 11, strips, most, { width: 11 }),
    tinyText(within(data, placeOfWord(data, at) - 11, data.word), strips - 6, data.word)] : [];
  return [baseline(place.base), barsOf(data, data.alike, { ...place, shown: passed }), wordsBelow(data),
    data.x.map((x, n) => vectorColumn(data, x, placeOfWord(data, n) + (t < 0.97 ? 2 : 0), strips, most)), probe];
}

function scaleDown(data, t) {
  const factor = tween(1, 1 / Math.sqrt(data.width), eased(t)), values = data.alike.map((x) => x * factor), peak = Math.max(...softmax(data.everyAlike.map((x) => x * factor)));
  const place = standing(data.alike, 56, 316), most = tween(place.most, place.most / Math.sqrt(data.width), eased(t) * 0.75);
  return [baseline(place.base), barsOf(data, values, { ...place, most, ghost: t > 0 && t < 1 ? data.alike : null }), wordsBelow(data),
    noteAt(EDGE, 330, `÷ ${fixed(1 / factor, 2)}`), noteAt(EDGE + 110, 330, `softmax would give one ${data.unit} ${fixed(peak, 3)}`)];
}

// 3: queries, keys and values.

function projections(data, t) {
  const s = eased(t), blend = (a, b) => a.map((x, n) => tween(x, b[n] ?? 0, s)), from = data.alike.map((x) => x / Math.sqrt(data.width));
  const most = tween(sizeOf([...data.x, data.own]), sizeOf([...data.k, data.q]), s), values = from.map((x, n) => tween(x, data.scores[n], s));
  const strips = data.x.map((x, n) => vectorColumn(data, blend(x, data.k[n]), placeOfWord(data, n), 266, most));
  const place = standing([...from, ...data.scores], 52, 250);
  return [baseline(place.base), barsOf(data, values, place), wordsBelow(data), strips,
    data.v ? data.v.map((v, n) => vectorColumn(data, v, placeOfWord(data, n) + 12, 266, sizeOf(data.v), { width: 6, opacity: s })) : [],
    vectorColumn(data, blend(data.own, data.q), 14, 266, most, { width: 16 }),
    tinyText(14, 258, s > 0.5 ? "q" : "x"), noteAt(EDGE, 20, s > 0.5 ? `below: k${data.v ? " (wide) and v (narrow)" : ""}` : `below: x of every ${data.unit}`),
    s > 0.5 ? noteAt(EDGE, 41, `left: q of “${data.word}”`) : []];
}

// 4: exp, and the sum.

function normalise(data, t) {
  const seen = data.scores.map((s, n) => (data.visible[n] ? s : -Infinity)), m = Math.max(...seen), grown = seen.map((s) => Math.exp(s - m));
  const l = 1 / Math.max(1e-30, Math.max(...data.w)), lowest = Math.min(...seen.filter(Number.isFinite), 0), range_ = Math.max(1e-9, m - lowest);
  const rise = eased(t * 2), shrink = eased(t * 2 - 1);
  const values = seen.map((s, n) => tween(tween((s - lowest) / range_, grown[n], rise), data.w[n], shrink));
  const text = m === -Infinity ? "every score is −∞: there is nothing to divide" : t < 0.05 ? `scores, from ${fixed(lowest, 2)} to ${fixed(m, 2)}` : t < 0.5 ? "exp(score − largest score): differences become ratios"
    : `divided by their sum ${fixed(l, 2)}: weights that sum to 1`;
  return [baseline(FLOOR), barsOf(data, values.map((x) => (Number.isFinite(x) ? x : 0)), { base: FLOOR, high: FLOOR - ROOF - 30, most: 1 }), wordsBelow(data), noteAt(EDGE, ROOF, text)];
}

// 5: the values are mixed.

function mixing(data, t) {
  const most = sizeOf(data.v), order = range(data.keys.length).sort((a, b) => data.w[b] - data.w[a]), rank = range(data.keys.length).map((n) => order.indexOf(n));
  const arrived = (n) => turnOf(t, rank[n], data.keys.length), y = range(data.y.length).map((e) => sum(data.v.map((v, n) => arrived(n) * data.w[n] * v[e])));
  const rest = t >= 1 ? data.y : y, { paint } = data.page, cell = 56, x0 = scene.width / 2 - (cell * rest.length) / 2;
  const flying = data.v.map((v, n) => { const s = arrived(n);
    return vectorColumn(data, v, tween(placeOfWord(data, n), scene.width / 2, s), tween(262, 92, s), most, { width: tween(14, 4 + 40 * data.w[n], Math.min(1, s * 2)), opacity: s >= 1 ? 0 : tween(1, 0.25 + data.w[n], s) }); });
  const left = data.v.map((v, n) => vectorColumn(data, v, placeOfWord(data, n), 262, most, { opacity: arrived(n) * (0.15 + 0.85 * data.w[n]) }));
  return [wordsBelow(data), data.names.map((_, n) => tinyText(placeOfWord(data, n), 256, fixed(data.w[n], 2))), left, flying,
    rest.map((value, n) => { const colour = paint.signed(value / sizeOf([data.y])); return [cellOf(x0 + n * cell, ROOF + 6, cell, 34, paint.css(colour)),
      svg("text", { class: "tiny", x: x0 + (n + 0.5) * cell, y: ROOF + 27, "text-anchor": "middle", style: { fill: paint.ink(colour) }, text: fixed(value, 2) })]; }),
    svg("rect", { class: "cellframe", x: x0, y: ROOF + 6, width: cell * rest.length, height: 34 }), noteAt(x0, ROOF - 6, `y of “${data.word}”, its first ${rest.length} numbers`)];
}

// 6 to 9: many heads, the mask, two sentences, long texts.

function manyHeads(data, t) {
  const { head } = data, heads = head.stack.heads.filter((one) => one.place === head.place);
  const tall = Math.min(26, 270 / heads.length), top = 330 - tall * heads.length, wide = stepOf(data), many = data.keys.length;
  return [wordsBelow(data), heads.map((one, h) => { const s = one === head ? 1 : turnOf(t, h, heads.length);
    return svg("g", { opacity: s, transform: `translate(${(1 - s) * -60} 0)` }, data.keys.map((j, n) => weightCell(data, one.shown(data.i, j),
      placeOfWord(data, n) - wide / 2 + 1, top + h * tall + 1, wide - 2, tall - 2)), tinyText(data.left - 14, top + (h + 0.5) * tall + 4, String(one.head)),
    one === head ? svg("rect", { class: "marker", x: data.left, y: top + h * tall, width: many * wide, height: tall }) : []); })];
}

// The row if no word could look ahead; all words share it, also those that are not drawn.
function causalRow(data) {
  const row = softmax(data.everyScore.map((s, j) => (j <= data.i && data.head.visible(data.i, j) ? s : -Infinity)));
  return data.keys.map((j) => row[j]);
}
function masking(data, t) {
  const future = (n) => data.keys[n] > data.i, count = Math.max(1, data.keys.filter((_, n) => future(n)).length), first = data.keys.findIndex((j) => j > data.i);
  const hidden = (n) => (future(n) ? turnOf(t * 1.6, n - first, count) : 0), after = causalRow(data), s = eased(t * 2 - 1);
  const values = data.w.map((w, n) => tween(w * (1 - hidden(n)), after[n], s)), wide = stepOf(data);
  return [baseline(FLOOR), barsOf(data, values, { base: FLOOR, high: FLOOR - ROOF - 40, most: 1, ghost: data.w, numbered: (n) => hidden(n) < 0.5 }), wordsBelow(data, hidden),
    data.keys.map((_, n) => (hidden(n) > 0.02 ? svg("rect", { class: "storyhatch", x: placeOfWord(data, n) - wide / 2, y: ROOF, width: wide, height: (FLOOR - ROOF) * hidden(n), fill: "url(#story-hatch)" }) : []))];
}

function twoSentences(data, t) {
  const s = eased(t), y = 110, at = data.at >= 0 ? placeOfWord(data, data.at) : scene.width / 2;
  // Where names are slanted below, the others are dots above, but for those that the lit word covers.
  const lit = beginning(data.page, data.word), half = widthOfWord(data.page, lit) / 2 + 6, middle = within(data, at, lit);
  const above = (name, n) => (!data.slanted || n === data.at ? beginning(data.page, name) : Math.abs(placeOfWord(data, n) - middle) < half ? "" : "·");
  return [data.same ? data.names.map((name, n) => svg("text", { class: `story-word${n === data.at ? " lit" : " faint"}`, x: n === data.at ? middle : placeOfWord(data, n), y: y - 14,
    "text-anchor": "middle", text: above(name, n) })) : svg("text", { class: "story-word lit", x: at, y: y - 14, "text-anchor": "middle", text: data.word }),
  noteAt(EDGE, 60, "q comes from here"), noteAt(EDGE, 446, "k and v come from here"),
  data.w.map((w, n) => (w < 0.01 ? [] : svg("path", { class: "storyline", "stroke-width": 0.75 + 12 * w, opacity: 0.75 + 0.2 * w,
    "stroke-dasharray": "900", "stroke-dashoffset": 900 * (1 - s), d: `M${at} ${y}C${at} ${(y + FLOOR) / 2} ${placeOfWord(data, n)} ${(y + FLOOR) / 2} ${placeOfWord(data, n)} ${FLOOR}` }))),
  data.w.map((w, n) => (w >= 0.045 ? tinyText(placeOfWord(data, n) + 4 + 6 * w, FLOOR - 6, fixed(w, 2), { "text-anchor": "start" }) : [])), wordsBelow(data)];
}

function longTexts(data, t) {
  const { paint } = data.page, side = scene.width < 700 ? 190 : 300, right = 2 * 30 + side + 40, s = eased(t), scale = tween(1, 0.06, s), top = 40, n = data.keys.length, cell = (side * scale) / n, x0 = 30;
  const cells = data.keys.map((i, r) => data.keys.map((j, c) => (data.same || r === 0 ? weightCell(data, data.head.shown(data.same ? i : data.i, j),
    x0 + c * cell, top + r * cell, cell, cell) : [])));
  const total = Math.round(tween(n, 100_000, s ** 3)), count = (x) => Math.round(x).toLocaleString("en");
  return [svg("rect", { class: "storyhatch", x: x0, y: top, width: side, height: side, fill: "url(#story-hatch)", opacity: s }), cells,
    svg("rect", { class: "cellframe", x: x0, y: top, width: side, height: side }),
    noteAt(x0, top + side + 46, `${count(total)} ${data.units}: ${count(total * total)} weights`),
    ["q", "k"].map((name, m) => [cellOf(right + 40 * m, top, 22, side, paint.css(paint.tint(0.35))), tinyText(right + 11 + 40 * m, top + side + 18, name)]),
    [0, 1].map((m) => [cellOf(right + 90 + 26 * m, top, 8, side, "var(--h0)"), tinyText(right + 94 + 26 * m, top + side + 18, ["m", "l"][m])]),
    noteAt(right, top - 12, "stored: q, k and m, l"), noteAt(x0, top + side + 74, "any weight is exp(q·k·scale − m) / l")];
}

// The chapters in the order of the documents: what each shows, says, and needs.
const listed = ({ keys, same, word, units, page }) => (keys.length < page.stack.cols.length ? ` Shown are ${keys.length} of ${page.stack.cols.length} ${units}: `
  + `${same ? `“${word}”, up to two after it, and ` : ""}those with the largest weights.` : "");
// To which word the lit one gives most.
function mostOf({ w, word, names, head, i }, gives) {
  const n = largest(w);
  return w[n] > 0 ? `“${word}” ${gives(names[n], fixed(w[n], 3))}` : `“${word}” ${outside(head, i) ? "looks elsewhere" : "may look at nothing"}`;
}
const origin = ({ unit }) => (unit === "patch" ? "image" : "sentence");
// Vectors of words beside one another, or, where the page has none, a query and keys.
const compared = ({ projected, word, unit }) => (projected ? `the query of “${word}”, what it looks for, and the key of every ${unit}, what it offers`
  : `“${word}” and every other ${unit}`);
export const CHAPTERS = [
  { name: "Alike", draw: alike, seconds: 4, when: (d) => d.alike, say: (d) => `How alike are ${compared(d)}? Two vectors are multiplied number by number, and the `
    + `products added: a dot product, of ${d.width} numbers each. The bars are these sums; of the vectors the first ${d.own.length} numbers are drawn.${listed(d)}` },
  { name: "Scale", draw: scaleDown, when: (d) => d.alike, say: (d) => `Sums of ${d.width} products get larger the more products there are, and large scores leave everything to one ${d.unit}. Divided by √${d.width} = `
    + `${fixed(Math.sqrt(d.width), 1)} they do not: softmax would give one ${d.unit} up to ${fixed(Math.max(...softmax(d.everyAlike)), 3)} before, ${fixed(Math.max(...softmax(d.everyAlike.map((x) => x / Math.sqrt(d.width)))), 3)} after.` },
  { name: "Queries, keys, values", draw: projections, when: (d) => d.q && d.scores, say: (d) => `Vectors alone cannot tie ${d.units} that are not alike. Three learned matrices make of every ${d.unit} a query, what `
    + `it looks for, a key, what it offers, and a value, what it gives. These are the queries and keys of ${d.head.name}, as recorded.` },
  { name: "Softmax", draw: normalise, when: (d) => d.scores, say: (d) => `Scores become weights: exp makes them positive, and the sum is divided out. ${mostOf(d, (name, weight) => `gives “${name}” ${weight}`)}.` },
  { name: "Mix", draw: mixing, when: (d) => d.v, say: (d) => `Every value is taken as much as its weight says, and all are added: that is the output of “${d.word}”. What has a small weight drowns.` },
  { name: "Many heads", draw: manyHeads, when: (d) => d.head.stack.heads.filter((one) => one.place === d.head.place).length > 1, say: (d) => `A layer does this several times side by side, with matrices of their own: its heads look at different `
    + `${d.units}. The framed row is ${d.head.name}.` },
  { name: "Mask", draw: masking, when: (d) => d.scores && d.same && d.keys.some((j) => j > d.i), say: (d) => `A model that writes must not look ahead: ${d.units} after “${d.word}” get the score −∞, and the others share their weight. `
    + `${d.head.layer.mask_name ? `This head was recorded with ${d.head.layer.mask_name}.` : "This head looks in both directions; hidden here is what a causal mask would hide."}` },
  { name: "Two sentences", draw: twoSentences, when: () => true, say: (d) => (d.same ? "What is looked at may be another sentence: a translator’s queries come from the sentence it writes, keys and values "
    + `from the one it reads. The step is the same; the numbers are those of this ${origin(d)}.`
    : `Queries come from the ${origin(d.page.stack.rows)} above, keys and values from the ${origin(d)} below: ${mostOf(d, (name, weight) => `looks at “${name}” with ${weight}`)}.`) },
  { name: "Long", draw: longTexts, when: () => true, say: (d) => `Every ${d.page.stack.rows.unit} looks at every ${d.unit}: ${d.page.stack.rows.length} × ${d.page.stack.cols.length} weights here, ten billion at 100,000 ${d.units}. Queries, keys and two numbers a row are enough to compute any of them when it is asked for. `
    + `And this was ${d.head.name}, which you were looking at.` },
];
