// Lines from the lit word to the words it looks at. No line passes through a word: within a line of text they are arcs,
// to another line of text they run between the lines and along the margin; between two sentences they pass behind words.

import { clamp } from "./numbers.js";
import { svg } from "./elements.js";

// Thickness says how much weight a line has; the thinnest still stands out from the paper, by 3 to 1.
// The first two heads differ in colour and side; the third and the fourth share a side with them, and are dashed.
const DASHES = [undefined, undefined, "7 6", "1 7"];
const MARGIN = 12; // pixels beside the sentence, where lines change from one line of text to another

export function drawLines(lines, stage, queries, keys, sheets, i) {
  const frame = stage.getBoundingClientRect(), same = queries === keys;
  const place = (node) => {
    const box = node.getBoundingClientRect();
    return { x: box.left + box.width / 2 - frame.left, top: box.top - frame.top, bottom: box.bottom - frame.top };
  };
  const begin = queries.children[i] && place(queries.children[i]);
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const drawn = [], patches = [queries, keys].some((one) => one.classList.contains("patches"));
  const reach = same && begin && !patches ? space(queries, queries.children[i]) : null;
  if (begin && !patches) sheets.forEach(({ w }, h) => w[i].forEach((weight, j) => {
    if (!(weight >= 0.02) || (same && j === i)) return;
    const end = place(keys.children[j]), elsewhere = same && Math.abs(begin.top - end.top) > 4;
    const d = !same ? between(begin, end, h) : elsewhere ? around(begin, end, frame.width, h) : arc(begin, end, frame,
      h, reach[h % 2]);
    drawn.push(svg("path", { d, "data-head": h, "stroke-width": 0.75 + (elsewhere ? 3 : 8) * weight,
      opacity: 0.75 + 0.2 * weight, style: { stroke: `var(--h${h % 4})` }, "stroke-dasharray": DASHES[h] }));
  }));
  lines.replaceChildren(...drawn);
}

// How far an arc above a line of text, or below it, may reach before it meets the words of the next line, or the end of the sentence.
function space(sentence, node) {
  const inner = (one) => one.querySelector(".token").getBoundingClientRect(), own = inner(node);
  const others = [...sentence.children].map(inner).filter((box) => box.bottom <= own.top || box.top >= own.bottom);
  const box = node.getBoundingClientRect(), { top, bottom } = sentence.getBoundingClientRect();
  const above = Math.min(box.top - top, ...others.filter((x) => x.bottom <= own.top).map((x) => box.top - x.bottom));
  const below = Math.min(bottom - box.bottom, ...others.filter((x) => x.top >= own.bottom).map((x) => x.top - box.bottom));
  return [above, below];
}

// Over the words, or under them. A curve reaches three quarters as far as its handles.
function arc(a, b, frame, h, reach) {
  const above = h % 2 === 0, y = above ? a.top : a.bottom, shift = h > 1 ? 5 : 0;
  const handle = clamp(16 + 0.22 * Math.abs(a.x - b.x), 20, frame.width < 600 ? 34 : 86) + (h > 1 ? 16 : 0);
  const lift = (above ? -1 : 1) * Math.min(handle, Math.max(8, (reach - 5) / 0.75));
  return `M${a.x + shift} ${y}C${a.x + shift} ${y + lift} ${b.x + shift} ${y + lift} ${b.x + shift} ${y}`;
}

// To another line of text: beside the line, along the margin, and beside the other line. Heads have tracks of their own.
function around(a, b, width, h) {
  const above = h % 2 === 0, track = 5 + 3 * (h >> 1), side = above ? -1 : 1, r = 4;
  const [y1, y2] = [a, b].map((one) => (above ? one.top : one.bottom)), [g1, g2] = [y1 + side * track,
    y2 + side * track];
  const margin = above ? MARGIN - track : width - MARGIN + track, turn = margin < a.x ? -1 : 1;
  const down = g2 > g1 ? 1 : -1;
  return `M${a.x} ${y1}L${a.x} ${g1}L${margin - turn * r} ${g1}Q${margin} ${g1} ${margin} ${g1 + down * r}`
    + `L${margin} ${g2 - down * r}Q${margin} ${g2} ${margin - turn * r} ${g2}L${b.x} ${g2}L${b.x} ${y2}`;
}

// Between two sentences.
function between(a, b, h) {
  const shift = (h - 0.5) * 5, middle = (a.bottom + b.top) / 2;
  return `M${a.x + shift} ${a.bottom}C${a.x + shift} ${middle} ${b.x + shift} ${middle} ${b.x + shift} ${b.top}`;
}
