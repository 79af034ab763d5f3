// Training: every head over the steps.

import { clamp, count, fixed, largest, near, range, roundMarks, markText } from "./numbers.js";
import { behind, choice, el, heat, svg } from "./elements.js";
import { tileUnder } from "./long.js";
import { trainingPatterns } from "./patterns.js";

const STRIPS = {
  entropy_share: ["entropy, as a share of the most it could be",
    "Faint is sharp. A row that fades and stays so is a head that collapsed."],
  max_score: ["largest score", "A row that grows strong to the right is a head whose scores explode."],
};

const NAMES = 112; // the width of the names beside the rows

const CURVES = new Map([["val_loss", "validation loss"], ["lr", "learning rate"]]);

export function training(page, box) {
  page.looked ??= {};
  const { steps, curves } = page.header, draws = [];
  for (const [name, values] of curves) {
    const numbers = page.header.array(values), finite = numbers.filter(Number.isFinite);
    const curve = el("div", {}), draw = () => curve.replaceChildren(lineOf(page, steps, numbers, least(finite), -least(finite.map((x) => -x))));
    draws.push(draw);
    draw();
    box.append(el("figure", { class: "train" }, el("h2", { text: CURVES.get(name) ?? name }), curve));
  }
  for (const [title, text] of page.header.texts)
    box.append(el("figure", { class: "train" }, el("h2", { text: title }), el("pre", { class: "sample", text })));
  box.append(...trainingPatterns(page));
  for (const one of page.header.strips) box.append(trainingStrip(page, one, draws));
  return (resized) => { if (resized === true) for (const draw of draws) draw(); };
}

function trainingStrip(page, { what, heads, values }, draws) {
  const { steps } = page.header, { paint } = page, n = steps.length, numbers = page.header.array(values);
  // One pass: a long run has more numbers than a call takes arguments.
  let [low, high] = [0, what === "entropy_share" ? 1 : 0];
  for (const x of numbers) if (Number.isFinite(x)) [low, high] = [Math.min(low, x), Math.max(high, x)];
  const part = (x) => (Number.isFinite(x) ? (x - low) / (high - low || 1) : Number.isNaN(x) ? x : x > 0 ? 1 : 0);
  // Hatched is what was not measured yet.
  const starts = heads.map((_, h) => numbers.subarray(h * n, (h + 1) * n).findIndex((x) => !Number.isNaN(x)));
  const canvas = heat(heads.length, n, (h, c) => (c < starts[h] ? null : paint.tint(part(numbers[h * n + c]))));
  const height = clamp(heads.length * 14, 60, 420);
  canvas.style.setProperty("height", `${height}px`);
  const message = el("p", { class: "readout", "aria-live": "polite" }), curve = el("div", {});
  const short_ = (name) => (name.length > 40 ? `…${name.slice(-39)}` : name);
  let shown = () => {};
  const look = (h, c) => {
    page.looked[what] = h;
    menu.querySelector("select").value = h;
    // The number stands first: on a phone the name of a layer leaves no space behind it.
    message.replaceChildren(el("b", { class: "first", "data-read": what, text: fixed(numbers[h * n + c], 3) }),
      el("bdi", { text: heads[h][0] }), ` head ${heads[h][1]}, step ${count(steps[c])}`);
    (shown = () => curve.replaceChildren(lineOf(page, steps, numbers.subarray(h * n, (h + 1) * n), low, high)))();
  };
  draws.push(() => shown());
  const menu = choice("head", `train-${what}`, heads.map(([layer, head], h) => [h, `${short_(layer)} · ${head}`]), 0,
    (h) => look(Number(h), n - 1));
  canvas.addEventListener("mousemove", (event) => look(...tileUnder(canvas, event, heads.length, n)));
  const last = heads.map((_, h) => numbers[h * n + n - 1] * (what === "entropy_share" ? -1 : 1));
  look(page.looked[what] ?? largest(last), n - 1);
  const [title, hint] = STRIPS[what];
  return el("figure", { class: "train" }, el("h2", { text: title }), el("p", { class: "hint", text: hint }),
    el("div", { class: "named" }, rowNames(heads, height), canvas),
    el("p", { class: "ends" }, el("span", { text: `step ${count(steps[0])}` }),
      el("span", { text: `step ${count(steps[n - 1])}` })),
    el("p", { class: "legend", "aria-hidden": "true" }, near(low), heat(1, 64, (_, c) => paint.tint(c / 63)),
      near(high)),
    el("div", { class: "controls" }, menu), message, curve,
    behind(title, () => [["step", ...heads.map(([layer, head]) => `${layer} · ${head}`)],
      steps.map((step, c) => [count(step), ...heads.map((_, h) => numbers[h * n + c])])]));
}

// The layers beside their rows, with a rule between them, and the numbers of the heads where they have space.
function rowNames(heads, height) {
  const cell = height / heads.length, starts = range(heads.length).filter((h) => !h || heads[h][0] !== heads[h - 1][0]);
  const short = (name) => name.replace(/^.*?(\d+)(\D*)$/, "layer $1").slice(0, 14);
  return svg("svg", { class: "rownames", width: NAMES, height, "aria-hidden": "true" },
    starts.map((h) => [svg("line", { class: "axis", x1: 0, x2: NAMES, y1: h * cell, y2: h * cell }),
      svg("text", { class: "tiny", x: 2, y: h * cell + Math.max(10, cell / 2 + 4), text: short(heads[h][0]) })]),
    cell >= 10 ? heads.map(([, head], h) => svg("text", { class: "tiny", x: 106, y: (h + 0.5) * cell + 4,
      "text-anchor": "end", text: head })) : []);
}

// Without a call of as many arguments as numbers.
const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);

// A curve over the steps; its axis goes from the round number below the range to the one above it.
function lineOf(page, steps, numbers, from, to) {
  // As wide as the rows of heads above it, beside their names: a step stands below its column.
  const [width, height] = [Math.max(180, (page.main.clientWidth || 760) - NAMES - 2), 140], first = steps[0], last = steps.at(-1);
  const marks = Number.isFinite(from + to) ? roundMarks(from, to) : [0, 1], [low, high] = [marks[0], marks.at(-1)];
  const x = (step) => (last > first ? ((step - first) / (last - first)) * width : width / 2);
  const y = (value) => height - ((value - low) / (high - low)) * height;
  const points = steps.filter((_, c) => Number.isFinite(numbers[c])).map((step) =>
    `${x(step)},${y(numbers[steps.indexOf(step)])}`);
  const finite = [...numbers].filter(Number.isFinite);
  return svg("svg", { class: "curve-of-steps", viewBox: `${-NAMES} -12 ${width + NAMES + 2} ${height + 36}`, role: "img",
    "aria-label": `from ${fixed(finite[0], 3)} to ${fixed(finite.at(-1), 3)}` },
    svg("path", { class: "axis", d: `M0 0V${height}H${width}` }),
    marks.map((v) => [svg("path", { class: "axis", d: `M-4 ${y(v)}H0` }),
      svg("text", { class: "tiny tick", x: -7, y: y(v) + 4, "text-anchor": "end", text: markText(v) })]),
    [["start", first], ["end", last]].map(([anchor, step]) => svg("text", { class: "tiny", x: x(step), y: height + 20,
      "text-anchor": anchor, text: `step ${count(step)}` })),
    svg("polyline", { class: "curve", points: points.join(" "), style: { stroke: "var(--accent)" } }));
}
