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
  const pen = { out, x: frame.left - 12, y: frame.top - 12, colour: colourReader() };
  out.append(svgLabel("title", caption.split(". ")[0]), svgLabel("desc", caption));
  const width = Math.ceil(frame.width + 24);
  const ground = svgNode("rect", { width: "100%", height: "100%", fill: pen.colour(paper).fill });
  out.append(ground);
  drawNode(root, pen);
  const tall = Math.ceil((pen.bottom ?? frame.bottom) - frame.top + 24);
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${tall}`, width,
    height: tall })) out.setAttribute(name, value);
  return out;
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
  pen.bottom = Math.max(pen.bottom ?? 0, box.bottom);
  if (node instanceof HTMLCanvasElement) { drawCanvas(node, box, pen); drawFrame(style, box, pen); return; }
  if (node instanceof SVGSVGElement) { drawSvg(node, box, pen); return; }
  drawGround(style, box, pen);
  drawFrame(style, box, pen);
  for (const child of node.childNodes) drawNode(child, pen);
}

const placeOf = (box, pen) => ({ x: twoDigits(box.left - pen.x), y: twoDigits(box.top - pen.y),
  width: twoDigits(box.width), height: twoDigits(box.height) });

function drawGround(style, box, pen) {
  const rx = Math.min(parseFloat(style.borderTopLeftRadius), box.height / 2) || undefined,
    plain = pen.colour(style.backgroundColor);
  if (plain.opacity) pen.out.append(svgNode("rect", { ...placeOf(box, pen), rx, fill: plain.fill,
    "fill-opacity": twoDigits(plain.opacity) }));
  if (!style.backgroundImage.startsWith("linear-gradient(")) return;
  // Bands of one colour each, from a share of the height to another one; a band is two stops or one with two places.
  const stops = [...style.backgroundImage.matchAll(/((?:rgba?|color|oklab|oklch)\([^()]*\)) ([\d.]+)%(?: ([\d.]+)%)?/g)];
  for (let n = 0; n < stops.length; n++) {
    const [, colour, from] = stops[n], to = stops[n][3] ?? stops[++n]?.[2] ?? from;
    const { fill, opacity } = pen.colour(colour), { x, y, width, height } = placeOf(box, pen);
    if (opacity) pen.out.append(svgNode("rect", { x, width, y: twoDigits(y + (from / 100) * height),
      height: twoDigits(((to - from) / 100) * height), fill, "fill-opacity": twoDigits(opacity) }));
  }
}

function drawFrame(style, box, pen) {
  const rx = Math.min(parseFloat(style.borderTopLeftRadius), box.height / 2) || undefined,
    ring = style.boxShadow.match(/^((?:rgba?|color)\([^()]*\)) 0px 0px 0px ([\d.]+)px/);
  const stroke = (colour, thick, grow) => {
    const { fill, opacity } = pen.colour(colour), place = placeOf({ left: box.left - grow, top: box.top - grow,
      width: box.width + 2 * grow, height: box.height + 2 * grow }, pen);
    if (opacity) pen.out.append(svgNode("rect", { ...place, rx, fill: "none", stroke: fill, "stroke-width": thick,
      "stroke-opacity": twoDigits(opacity) }));
  };
  if (ring) stroke(ring[1], Number(ring[2]), Number(ring[2]) / 2);
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => (style[`border${side}Style`] === "none" ? 0
    : parseFloat(style[`border${side}Width`])));
  if (sides.every((width) => width > 0)) stroke(style.borderTopColor, sides[0], -sides[0] / 2);
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

// A text line by line, as it is broken and cut on the screen.
function drawText(node, pen) {
  if (!node.data.trim()) return;
  const style = getComputedStyle(node.parentElement), range = document.createRange(), lines = [], end = cutOf(node, parseFloat(style.fontSize));
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
    const baseline = line.box.top + line.box.height / 2 + 0.33 * size;
    pen.out.append(svgLabel("text", line.text, { x: twoDigits((line.left + line.right) / 2 - pen.x),
      y: twoDigits(baseline - pen.y), "text-anchor": "middle", fill,
      "fill-opacity": opacity < 1 ? twoDigits(opacity) : undefined, "font-family": style.fontFamily.replaceAll('"',
        "'"), "font-size": twoDigits(size),
      "font-weight": style.fontWeight === "400" ? undefined : style.fontWeight,
        "font-style": style.fontStyle === "normal" ? undefined : style.fontStyle,
      direction: rtl ? "rtl" : undefined, "xml:space": "preserve" }));
  }
}

function drawCanvas(canvas, box, pen) {
  pen.out.append(svgNode("image", { ...placeOf(box, pen), href: canvas.toDataURL("image/png"),
    preserveAspectRatio: "none",
    "image-rendering": "pixelated" }));
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
}
