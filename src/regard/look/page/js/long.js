// Long inputs: the map, numbers of the rows and columns in its window, the strongest links, any row.

import { clamp, count, edge, largest, spread, sum, weightText } from "./numbers.js";
import { behind, choice, el, lane, lanes, svg, table, tick, word } from "./elements.js";
import { fitChoice, headChoice, stackChoice } from "./controls.js";
import { topOf } from "./stored.js";
import { MatrixMap, complete, named } from "./map.js";

const READABLE = 300; // words a side that the views of short inputs can show

export function long(page, box) {
  const own = (page.long ??= { row: null, view: null, mode: "max", marks: true });
  Object.assign(own, page.wantedMap);
  page.wantedMap = null;
  const bar = el("div", { class: "controls" }), message = el("p", { class: "readout", "aria-live": "polite" });
  const stage = el("div", { class: "longmap" }), strips = el("div", { class: "profiles" }), rows = el("div", {}),
    links = el("div", { class: "links" });
  box.append(bar, message, el("div", { class: "halves" }, stage, el("div", {}, rows, strips, links)),
    behind("Weights of the window, or the strongest links", () => windowTable(page, own)));
  let shown = null;
  const follow = (view) => { strips.replaceChildren(...profiles(page, shown.source, view)); reading.refresh(view); };
  const reading = readButton(page, own);
  const draw = () => {
    const { head } = page, source = (page.source = head.stored);
    if (own.head !== head.id) Object.assign(own, { head: head.id, row: null });
    if (!canRead(source, own.row)) own.row = canRead(source, page.state.word) ? page.state.word : source.rows[0];
    if (own.view && !(own.view.i1 <= head.i && own.view.j1 <= head.j)) own.view = null;
    bar.replaceChildren(...mapControls(page, own, () => shown, reading, draw).filter(Boolean));
    const { rows: { units }, cols } = head.stack;
    message.replaceChildren(`${count(head.i)} ${units} look at ${count(head.j)}${units === cols.units ? "" : ` ${cols.units}`}`);
    shown = new MatrixMap(page, source, stage, message, (view) => { follow(view); page.writeAddress(); });
    shown.onrow = (i) => { if (canRead(source, i)) { own.row = i; exactRow(page, source, rows, own, shown); } };
    follow(shown.view);
    exactRow(page, source, rows, own, shown);
    links.replaceChildren(...strongest(page, source, shown));
  };
  return (resized) => {
    if (resized === true && shown && shown.source === page.head.stored) { shown.resize(); return; }
    draw();
  };
}

const canRead = (source, row) => row !== null && (source.exact || source.promise || source.server ? row < source.head.i
  : source.rows.includes(row));

function mapControls(page, own, map, reading, draw) {
  const find = el("input", { type: "search", "data-key": "find", "aria-label": `Find a ${page.stack.rows.unit}, or go to a row`,
    placeholder: `a ${page.stack.rows.unit}, or a row`, onkeydown: (event) => { if (event.key === "Enter") goTo(page, own, map(),
      event.target.value); } });
  return [
    stackChoice(page), headChoice(page),
    choice("a cell shows", "mode", [["max", "its largest weight"], ["mean", "its share of a row"],
      ["beyond", "what exceeds its place"]], own.mode,
      (mode) => { own.mode = mode; map().request(); page.writeAddress(); }),
    fitChoice(page),
    tick("mark the strongest", "marks", own.marks, (on) => { own.marks = on; map().request(); page.writeAddress(); }),
    el("label", { class: "field" }, el("span", { text: "find" }), find),
    reading.button,
  ];
}

// A word, from the place where one is on, or the number of a row: the window goes to where that row looks most.
function goTo(page, own, map, text) {
  const { rows, length = rows.length } = page.stack, from = (map.cursor?.[0] ?? -1) + 1;
  let row = /^[\d,]+$/.test(text.trim()) ? Number(text.replaceAll(",", "")) : -1;
  if (row < 0 && rows.tokens) {
    const wanted = text.trim().toLowerCase();
    for (let n = 0; n < length && row < 0; n++) if (rows.label((from + n) % length).toLowerCase() === wanted) row = (from + n) % length;
  }
  if (!(row >= 0 && row < length)) { map.readout.replaceChildren(`There is no ${/^\d/.test(text) ? "row" : rows.unit} “${text}”.`); return; }
  fly(map, row, map.source.peakAt[row]);
}

function fly(map, i, j) {
  map.cursor = [i, j];
  map.box.scrollIntoView({ block: "nearest" });
  map.go(map.around(i, j, Math.min(128, Math.max(map.head.i, map.head.j))));
  map.read(i, j);
  map.onrow(i);
}

// The words of a small window can be read: every view of short inputs shows them.
// The button is as wide as the longer of its texts, so that zooming does not break the controls anew and move the map.
function readButton(page, own) {
  const { units } = page.stack.rows, ready = el("span", { text: `read these ${units}` }),
    not = el("span", { text: `zoom in to ${READABLE} ${units} to read them` });
  const button = el("button", { class: "chip either", "data-key": "read" }, ready, not);
  const words = ({ i0, i1, j0, j1 }) => [Math.floor(i0), Math.ceil(i1), Math.floor(j0), Math.ceil(j1)];
  button.addEventListener("click", () => !button.disabled && page.openWindow(page.head,
    ...words(own.view ?? complete(page.head))).catch((error) => { not.textContent = error.message; refresh(complete(page.head)); }));
  const refresh = (view) => {
    const [i0, i1, j0, j1] = words(view), fits = i1 - i0 <= READABLE && j1 - j0 <= READABLE;
    button.hidden = !page.head.stored.exact && !page.server;
    button.disabled = !fits;
    ready.classList.toggle("invisible", !fits);
    not.classList.toggle("invisible", fits);
  };
  return { button, refresh };
}

function profiles(page, source, view) {
  const { rows, cols } = page.stack, span = (a, b) => [Math.floor(a), Math.ceil(b)];
  const [down, across] = [span(view.i0, view.i1), span(view.j0, view.j1)];
  return [profile("entropy of every row", source.entropy, rows, down), profile("largest weight of every row",
    source.peak, rows, down),
    profile(`attention received by every ${cols.unit}`, source.received, cols, across)];
}

// Which of rows × cols cells of a canvas the pointer is over.
export function tileUnder(canvas, event, rows, cols) {
  const box = canvas.getBoundingClientRect(), at = (share, n) => clamp(Math.floor(share * n), 0, n - 1);
  return [at((event.clientY - box.top) / box.height, rows), at((event.clientX - box.left) / box.width, cols)];
}

// A number for every word of a window as a strip: the mean and the largest of what falls on a pixel.
function profile(title, every, sequence, span = [0, every.length]) {
  const [from, to] = span, part = every.subarray(from, to), broken = part.filter(Number.isNaN).length, numbers = part.map((x) => x || 0);
  const [width, height] = [640, 54], n = numbers.length, bins = Math.min(n, width), high = [], mean = [];
  for (let b = 0; b < bins; b++) {
    const bin = numbers.subarray(edge(b, bins, n), edge(b + 1, bins, n));
    high.push(bin[largest(bin)]);
    mean.push(sum(bin) / bin.length);
  }
  const most = Math.max(...high) || 1, best = largest(numbers), x = (b) => (b * width) / bins,
    average = sum(numbers) / (n - broken || 1);
  const area = (y) => `M0 ${height}${y.map((v, b) => `L${x(b)} ${height - (v / most) * height}H${x(b + 1)}`).join("")}L${width} ${height}Z`;
  const message = `${broken ? `${count(broken)} not numbers, ` : ""}mean ${weightText(average)}, largest ${weightText(numbers[best])}`;
  const where = to - from < every.length ? `, ${sequence.units} ${count(from)}–${count(to - 1)}` : "";
  return el("figure", { class: "profile" }, el("figcaption", {}, title + where, el("span", { class: "who" },
    ` ${message} at `,
    word(named(sequence, from + best)))),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}: ${message}` },
      svg("path", { class: "range", d: area(high) }), svg("path", { class: "mean", d: area(mean) })));
}

async function exactRow(page, source, box, own, map) {
  const { rows, cols } = page.stack, requested = own.row;
  let row = null;
  try { row = await source.row(requested); } catch (error) {
    box.replaceChildren(el("p", { class: "hint", text: `Row ${count(requested)} cannot be shown: ${error.message}` }));
    return;
  }
  if (requested !== own.row || !map.box.isConnected) return; // another row was asked for since
  const best = topOf(row, 12).filter((j) => row[j] !== 0);
  const some = [...new Set([own.row, ...spread(source.rows, 11)])];
  const chip = (i) => el("button", {
    class: "chip", "data-key": `row-${i}`, "aria-pressed": String(i === own.row), text: named(rows, i),
    onclick: () => { own.row = i; exactRow(page, source, box, own, map); },
  });
  const line = (j) => el("li", {}, el("button", { class: "plain", "data-key": `key-${j}`, title: "show it in the map",
    onclick: () => fly(map, own.row, j) }, word(named(cols, j))),
  lanes([lane("var(--accent)", row[j], weightText(row[j]), { "data-row": own.row, "data-j": j })]));
  page.keepingFocus(() => box.replaceChildren(el("h2", {}, "Where ", word(named(rows, own.row)), " looks"),
    el("p", { class: "hint", text: source.promise || source.server ? "Click any row of the map; a full bar is 1."
      : "The page holds these rows exactly; a full bar is 1." }),
    el("div", { class: "chips", role: "group", "aria-label": "Rows" }, some.map(chip)),
    profile(`weights of ${named(rows, own.row)}`, row, cols), el("ol", { class: "best" }, best.map(line))));
}

// The weights of a small window; of a larger one the strongest links.
const TABLE = 300;
function windowTable(page, own) {
  const { rows, cols } = page.stack, source = page.head.stored, { peak, peakAt } = source;
  const { i0, i1, j0, j1 } = own.view ?? complete(page.head), [a, b, c, d] = [Math.floor(i0), Math.ceil(i1),
    Math.floor(j0), Math.ceil(j1)];
  if (!source.exact || b - a > TABLE || d - c > TABLE) {
    return [["row", rows.unit, "key", `its ${cols.unit}`, "weight"], source.links(200).map((i) => [String(i), word(rows.label(i)),
      String(peakAt[i]),
      word(cols.label(peakAt[i])), peak[i]])];
  }
  const weights = source.exact.block(a, b, c, d), width = d - c, span = (from, to) => Array.from({ length: to - from },
    (_, n) => from + n);
  return [["", ...span(c, d).map((j) => word(named(cols, j)))], span(a, b).map((i, n) => [word(named(rows, i)),
    ...weights.subarray(n * width, (n + 1) * width)])];
}

function strongest(page, source, map) {
  const { rows, cols, same } = page.stack, { peak, peakAt } = source;
  const caption = same ? `The largest weights between two ${rows.units}, one a row`
    : "The largest weights of the matrix, one a row";
  const link = (i) => el("button", { class: "plain", "data-key": `link-${i}`, title: "show it in the map",
    onclick: () => fly(map, i, peakAt[i]) }, word(named(rows, i)));
  const body = source.links(20).map((i) => [link(i), word(named(cols, peakAt[i])), peak[i]]);
  return [el("h2", { text: "Strongest links" }), el("div", { class: "scroll" }, table(caption, ["from", "to", "weight"],
    body))];
}
