// The view as one SVG: every text, ground, border, line and canvas of the page where it stands, and nothing else.

const NAMESPACE = "http://www.w3.org/2000/svg";
// A document of its own: what is drawn there loads nothing, and no policy has to allow it.
const SHEET = globalThis.document?.implementation.createDocument(NAMESPACE, "svg", null);
const LEFT_OUT = ".controls, .behind, .hint, .quiet, .map-below .crumbs, .peek .chips, .hidden, select, input, [hidden]";
// What of a computed style an element of a drawing needs when the style sheet is gone.
const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity",
  "font-family",
  "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline"];

export function snapshot(root, caption, paper) {
  const frame = root.getBoundingClientRect(), out = svgNode("svg", {});
  root.classList.add("snapped"); // what is left out takes no space
  const pen = { out, x: frame.left - 12, y: frame.top - 12, colour: colourReader(), hatches: new Map(),
    ends: { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity } };
  out.append(svgLabel("title", caption.split(". ")[0]), svgLabel("desc", caption));
  const ground = svgNode("rect", { fill: pen.colour(paper).fill });
  out.append(ground);
  try { drawNode(root, pen); } finally { root.classList.remove("snapped"); }
  // As large as what is drawn, with some air.
  const { left, top, right, bottom } = pen.ends.left < Infinity ? pen.ends : frame;
  const [x, y, width, height] = [left - pen.x - 12, top - pen.y - 12, right - left + 24, bottom - top + 24].map(Math.round);
  for (const [name, value] of Object.entries({ viewBox: `${x} ${y} ${width} ${height}`, width, height })) out.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x, y, width, height })) ground.setAttribute(name, value);
  return out;
}

// What is drawn lies within the picture.
function reach(pen, { left, top, right, bottom }) {
  const { ends } = pen;
  Object.assign(ends, { left: Math.min(ends.left, left), top: Math.min(ends.top, top), right: Math.max(ends.right, right), bottom: Math.max(ends.bottom, bottom) });
}

function svgNode(tag, attributes) {
  const node = SHEET.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined
    && value !== null) node.setAttribute(name, value);
  return node;
}
function svgLabel(tag, content, attributes = {}) {
  const node = svgNode(tag, attributes);
  node.textContent = content;
  return node;
}
const twoDigits = (x) => Math.round(x * 100) / 100;

// Any colour of the style sheet as hexadecimal digits and an opacity, which every program reads.
function colourReader() {
  const cache = new Map(), ctx = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  return (colour) => {
    if (!cache.has(colour)) {
      ctx.clearRect(0, 0, 1, 1);
      ctx.fillStyle = colour;
      ctx.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = ctx.getImageData(0, 0, 1, 1).data;
      cache.set(colour, { fill: `#${[r, g, b].map((x) => x.toString(16).padStart(2, "0")).join("")}`,
        opacity: a / 255 });
    }
    return cache.get(colour);
  };
}

function drawNode(node, pen) {
  if (node.nodeType === Node.TEXT_NODE) { drawText(node, pen); return; }
  if (node.nodeType !== Node.ELEMENT_NODE || node.matches(LEFT_OUT)) return;
  const style = getComputedStyle(node), box = node.getBoundingClientRect();
  if (style.display === "none" || style.visibility === "hidden" || (!box.width && !box.height)) return;
  if (node instanceof HTMLCanvasElement) { drawGround(style, box, pen); drawCanvas(node, style, box, pen); drawFrame(style, box, pen); return; }
  if (node instanceof SVGSVGElement) { drawSvg(node, box, pen); drawFrame(style, box, pen); return; }
  drawGround(style, box, pen);
  drawFrame(style, box, pen);
  // An image stands below the patches that are drawn before it.
  const depth = (child) => (child instanceof Element ? Math.min(0, Number(getComputedStyle(child).zIndex) || 0) : 0);
  for (const child of [...node.childNodes].sort((a, b) => depth(a) - depth(b))) drawNode(child, pen);
}

const placeOf = (box, pen) => ({ x: twoDigits(box.left - pen.x), y: twoDigits(box.top - pen.y),
  width: twoDigits(box.right - box.left), height: twoDigits(box.bottom - box.top) });

const roundOf = (style, box) => Math.min(parseFloat(style.borderTopLeftRadius), box.height / 2) || undefined;
function drawRect(pen, box, attributes) {
  reach(pen, box);
  pen.out.append(svgNode("rect", { ...placeOf(box, pen), ...attributes }));
}

const COLOUR = "(?:rgba?|color|oklab|oklch)\\([^()]*\\)";
function drawGround(style, box, pen) {
  const rx = roundOf(style, box), plain = pen.colour(style.backgroundColor), image = style.backgroundImage;
  if (plain.opacity) drawRect(pen, box, { rx, fill: plain.fill, "fill-opacity": twoDigits(plain.opacity) });
  if (image.startsWith("repeating-linear-gradient(")) drawRect(pen, box, { rx, fill: `url(#${hatchOf(image, pen)})` });
  if (!image.startsWith("linear-gradient(")) return;
  // Bands of one colour each, from a share of the height to another one; a band is two stops or one with two places.
  // Along a line there is one band, from its beginning.
  const stops = [...image.matchAll(new RegExp(`(${COLOUR}) ([\\d.]+)%(?: ([\\d.]+)%)?`, "g"))], across = image.startsWith("linear-gradient(to right");
  for (let n = 0; n < stops.length; n++) {
    const [, colour, first] = stops[n], from = across ? "0" : first, to = across ? first : stops[n][3] ?? stops[++n]?.[2] ?? from;
    const { fill, opacity } = pen.colour(colour), part = (side, size, share) => side + (Number(share) / 100) * size;
    const band = across ? { ...edges(box), right: part(box.left, box.width, to) } : { ...edges(box), top: part(box.top, box.height, from), bottom: part(box.top, box.height, to) };
    if (opacity && Number(to) > Number(from)) drawRect(pen, band, { fill, "fill-opacity": twoDigits(opacity) });
  }
}
const edges = ({ left, top, right, bottom }) => ({ left, top, right, bottom });

// The slanted lines of what the mask forbids, as a pattern.
function hatchOf(image, pen) {
  const line = [...image.matchAll(new RegExp(COLOUR, "g"))].map(([colour]) => pen.colour(colour)).find(({ opacity }) => opacity);
  const key = `${line?.fill} ${line?.opacity}`;
  if (!pen.hatches.has(key)) {
    const id = `hatching-${pen.hatches.size}`, pattern = svgNode("pattern", { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(-45)" });
    pattern.append(svgNode("rect", { width: 4, height: 1, fill: line?.fill ?? "none", "fill-opacity": twoDigits(line?.opacity ?? 1) }));
    pen.out.append(pattern);
    pen.hatches.set(key, id);
  }
  return pen.hatches.get(key);
}

function drawFrame(style, box, pen) {
  const rx = roundOf(style, box), ring = style.boxShadow.match(new RegExp(`^(${COLOUR}) 0px 0px 0px ([\\d.]+)px`)), shown = Number(style.opacity);
  const grown = (by) => ({ left: box.left - by, top: box.top - by, right: box.right + by, bottom: box.bottom + by });
  const stroke = (colour, thick, dash) => { const { fill, opacity } = pen.colour(colour);
    return opacity && thick ? { fill: "none", stroke: fill, "stroke-width": thick, "stroke-opacity": twoDigits(opacity * shown), "stroke-dasharray": dash ? "1 2" : undefined } : null; };
  const ringed = ring && stroke(ring[1], Number(ring[2]));
  if (ringed) drawRect(pen, grown(Number(ring[2]) / 2), { rx, ...ringed });
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => (style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`])));
  const [top, right, bottom, left] = sides, name = ["Top", "Right", "Bottom", "Left"][sides.findIndex(Boolean)];
  const lines = name && stroke(style[`border${name}Color`], Math.max(...sides), style[`border${name}Style`] === "dotted");
  if (!lines) return;
  const inner = grown(-Math.max(...sides) / 2);
  if (sides.every(Boolean)) { drawRect(pen, inner, { rx, ...lines }); return; }
  reach(pen, box);
  const at = ({ left: x, right: x1, top: y, bottom: y1 }) => [x - pen.x, x1 - pen.x, y - pen.y, y1 - pen.y].map(twoDigits);
  const [x0, x1, y0, y1] = at(box), [a0, a1, b0, b1] = at(inner);
  const parts = [top && `M${x0} ${b0}H${x1}`, right && `M${a1} ${y0}V${y1}`, bottom && `M${x0} ${b1}H${x1}`, left && `M${a0} ${y0}V${y1}`];
  pen.out.append(svgNode("path", { d: parts.filter(Boolean).join(""), ...lines }));
}

// Where a text that is too long ends with "…" on the screen; null where it is shown to its end.
function cutOf(node, size) {
  for (let one = node.parentElement; one; one = one.parentElement) {
    const { textOverflow, overflowX } = getComputedStyle(one);
    if (textOverflow !== "ellipsis" || overflowX === "visible") continue;
    if (one.scrollWidth <= one.clientWidth) return null;
    const { left, right } = one.getBoundingClientRect();
    return { left, right, size };
  }
  return null;
}

// A line under or through a text, which it may have from an element around it.
function decorationOf(element) {
  for (let one = element, n = 0; one && n < 3; one = one.parentElement, n++) {
    const { textDecorationLine: line, textDecorationStyle: kind } = getComputedStyle(one);
    if (line !== "none") return kind === "solid" ? line : `${line} ${kind}`;
  }
  return undefined;
}

// A text line by line, as it is broken and cut on the screen.
function drawText(node, pen) {
  if (!node.data.trim()) return;
  const style = getComputedStyle(node.parentElement);
  if (!pen.colour(style.color).opacity) return;
  const range = document.createRange(), lines = [], end = cutOf(node, parseFloat(style.fontSize));
  const boxOf = (n) => { range.setStart(node, n); range.setEnd(node, n + 1); return range.getClientRects()[0]; };
  const outside = (box, space) => box.right > end.right + 1 - space || box.left < end.left - 1 + (style.direction === "rtl" ? space : 0);
  const cut = end && Array.from(node.data, (_, n) => boxOf(n)).some((box) => box && outside(box, 0));
  for (let n = 0; n < node.data.length; n++) {
    const box = boxOf(n);
    if (!box || !box.width) continue;
    if (cut && outside(box, end.size)) {
      if (lines.length) lines.at(-1).text += "…";
      break;
    }
    const line = lines.at(-1);
    if (line && Math.abs(line.box.top - box.top) < 2) { line.text += node.data[n]; line.left = Math.min(line.left,
      box.left); line.right = Math.max(line.right, box.right); }
    else lines.push({ text: node.data[n], box, left: box.left, right: box.right });
  }
  const { fill, opacity } = pen.colour(style.color), size = parseFloat(style.fontSize), rtl = style.direction === "rtl";
  for (const line of lines) {
    reach(pen, { left: line.left, right: line.right, top: line.box.top, bottom: line.box.bottom });
    const baseline = line.box.top + line.box.height / 2 + 0.33 * size;
    pen.out.append(svgLabel("text", line.text, { x: twoDigits((line.left + line.right) / 2 - pen.x),
      y: twoDigits(baseline - pen.y), "text-anchor": "middle", fill,
      "fill-opacity": opacity < 1 ? twoDigits(opacity) : undefined, "font-family": style.fontFamily.replaceAll('"',
        "'"), "font-size": twoDigits(size),
      "font-weight": style.fontWeight === "400" ? undefined : style.fontWeight,
        "font-style": style.fontStyle === "normal" ? undefined : style.fontStyle,
      "text-decoration": decorationOf(node.parentElement), direction: rtl ? "rtl" : undefined, "xml:space": "preserve" }));
  }
}

// A canvas as the style sheet shows it, such as without most of its colours.
function filtered(canvas, filter) {
  if (filter === "none" || !canvas.width || !canvas.height) return canvas;
  const copy = document.createElement("canvas"), ctx = copy.getContext("2d");
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  ctx.filter = filter;
  ctx.drawImage(canvas, 0, 0);
  return copy;
}

function drawCanvas(canvas, style, box, pen) {
  reach(pen, box);
  pen.out.append(svgNode("image", { ...placeOf(box, pen), href: filtered(canvas, style.filter).toDataURL("image/png"),
    preserveAspectRatio: "none", "image-rendering": style.imageRendering === "auto" ? undefined : "pixelated" }));
}

function drawSvg(node, box, pen) {
  const copy = SHEET.importNode(node, true), { x, y, width, height } = placeOf(box, pen);
  const originals = [node, ...node.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((one, n) => {
    const style = getComputedStyle(one);
    for (const name of DRAWN) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none" && value !== "normal") copies[n].setAttribute(name, /^(rgb|color)/.test(value)
        ? pen.colour(value).fill : value.replaceAll('"', "'"));
      else if (name === "fill") copies[n].setAttribute("fill", "none");
    }
    for (const name of ["class", "style", "tabindex", "data-key", "data-link", "data-head", "aria-hidden", "aria-label",
      "role"]) copies[n].removeAttribute(name);
  });
  for (const [name, value] of Object.entries({ x, y, width, height, overflow: "visible" })) copy.setAttribute(name,
    value);
  pen.out.append(copy);
  for (const one of node.querySelectorAll(":scope :not(pattern, pattern *, title, g)")) {
    const drawn = one.getBoundingClientRect();
    if (drawn.width || drawn.height) reach(pen, drawn);
  }
}
