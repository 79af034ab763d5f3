// Share: a link to exactly this view, the view as SVG, PNG or CSV, and a caption with the command that makes it again.

import { el } from "./elements.js";
import { snapshot } from "./snapshot.js";

// Widths of a picture: the name, the width in inches, and in pixels the width at which the view is laid out for it, so that
// its letters are 5 to 8 points high on paper and 9 to 17 on a slide, whatever the window is.
const SIZES = { screen: ["as on the screen", null, null], column: ["a column, 3.3 in", 3.3, 455], page: ["a page, 6.9 in", 6.9, 950],
  slide: ["a slide, 13.3 in", 13.33, 1020] };
const DOTS = 300; // of a PNG with a width, in an inch

export function shareMenu(page) {
  const own = (page.share ??= { size: "screen" }), message = el("p", { class: "hint", "aria-live": "polite" });
  const act = (key, text, run) => el("button", { class: "act", "data-key": key, text, onclick: async () => {
    try { message.textContent = await run(); } catch (error) { message.textContent = `That failed: ${error.message}`; }
  } });
  const size = el("select", { "data-key": "share-size", "aria-label": "Width of the picture",
    onchange: (e) => { own.size = e.target.value; } },
    Object.entries(SIZES).map(([id, [name]]) => el("option", { value: id, text: name })));
  size.value = own.size;
  const menu = el("details", { class: "share" }, el("summary", { "data-key": "share", text: "Share" }), el("div",
    { class: "sheet" },
    el("div", { class: "acts" }, act("copy-link", "copy link", () => (page.link
      ? copyText(page.link, "The link is copied.") : "A frame has no address: save the page as a file, and its links can be copied.")),
      act("copy-caption", "copy caption", () => copyText(caption(page), "The caption is copied."))),
    el("div", { class: "acts" }, size, act("save-svg", "SVG", async () => download(page, "svg",
      new Blob([await svgText(page)], { type: "image/svg+xml" }))),
      act("save-png", "PNG", async () => download(page, "png", await pngOf(await svgText(page), SIZES[own.size][1] ? DOTS / 96 : 2))),
      act("save-pdf", "PDF", async () => printView(page)),
      act("save-csv", "CSV", async () => download(page, "csv", new Blob([`\uFEFF${csvOf(page)}`],
        { type: "text/csv" })))),
    message));
  menu.addEventListener("keydown", (event) => { if (event.key === "Escape") { menu.open = false;
    menu.querySelector("summary").focus(); } });
  return menu;
}

async function copyText(text, reply) {
  try {
    // Asked in vain, Chromium would write an error to the console.
    const policy = /** @type {any} */ (document).featurePolicy;
    if (policy && !policy.allowsFeature("clipboard-write")) return text;
    await navigator.clipboard.writeText(text);
  } catch {
    // Where a page may not write to the clipboard, the text is shown to be copied by hand.
    return text;
  }
  return reply;
}

export function download(page, suffix, blob) {
  const place = page.book ? page.heads.map((head) => head.brief.replace("·", "-")) : page.pairs
    ? [page.pairs[page.state.pair].brief.replaceAll("·", "-").replaceAll(" ", "")] : [];
  const name = `${["regard", page.state.view, place.join("_")].filter(Boolean).join("-")}.${suffix}`, link = el("a", { href: URL.createObjectURL(blob),
    download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  return `Saved as ${name}.`;
}

// The view laid out at another width for a moment: a picture is drawn there, whatever the window is.
export async function laidOut(page, pixels, draw) {
  const set = (width) => { document.body.style.width = width; page.width = page.root.clientWidth; page.keepingFocus(() => page.refresh?.(true)); };
  if (!pixels) return draw();
  set(`${pixels}px`);
  try {
    while (page.slices) await new Promise(requestAnimationFrame); // the Lab computes in slices
    return draw();
  } finally { set(""); }
}
export const forSlide = (page, draw) => laidOut(page, SIZES.slide[2], draw);

async function svgText(page) {
  const [, inches, pixels] = SIZES[page.share.size];
  return laidOut(page, pixels, () => drawnSvg(page, inches));
}

function drawnSvg(page, inches) {
  const paper = getComputedStyle(document.body).backgroundColor, picture = snapshot(page.main.querySelector(".view"),
    caption(page), paper);
  if (inches) {
    const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
    picture.setAttribute("width", `${inches}in`);
    picture.setAttribute("height", `${Math.round((1000 * inches * height) / width) / 1000}in`);
  }
  return new XMLSerializer().serializeToString(picture);
}

// The browser prints the view alone, on paper of its size: its printer is the one that writes vectors into a PDF.
async function printView(page) {
  const sheet = el("div", { class: "print" }), picture = document.importNode(new DOMParser().parseFromString(await svgText(page),
    "image/svg+xml").documentElement, true);
  sheet.append(picture);
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number), inches = SIZES[page.share.size][1] ?? width / 96;
  const [rules] = document.styleSheets, at = rules.insertRule(
    `@page { size: ${inches}in ${(inches * height) / width + 0.01}in; margin: 0 }`, rules.cssRules.length);
  document.body.append(sheet);
  document.body.classList.add("printing");
  addEventListener("afterprint", () => { sheet.remove(); rules.deleteRule(at); document.body.classList.remove("printing"); },
    { once: true });
  print();
  return "Choose “Save as PDF” in the window of the printer.";
}

// The SVG drawn larger by a factor.
async function pngOf(text, factor) {
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })), image = new Image();
  await new Promise((done, failed) => { image.onload = done; image.onerror = () => failed(new Error("the picture could not be drawn")); image.src = url; });
  const canvas = el("canvas", { width: Math.round(factor * image.width), height: Math.round(factor * image.height) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

// The table behind the view. A text that a spreadsheet would take for a formula begins with an apostrophe.
function csvOf(page) {
  const write = page.main.querySelector("details.behind")?.write;
  if (!write) throw new Error("this view has no table");
  const cell = (x) => {
    const number = typeof x === "number", plain = x instanceof Element
      ? x.getAttribute("title") ?? x.textContent : x instanceof Node ? x.textContent : String(x);
    const safe = number || !/^[=+\-@\t\r]/.test(plain) ? plain : `'${plain}`;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const [head, rows] = write();
  return [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
}

// What the picture shows, of which model, and how to make it again.
export function caption(page) {
  const { header, book, state } = page, { version, about, command } = header;
  if (page.pairs) return `Attention of “${page.pairs[state.pair].label("rows", state.word)}” in ${header.names.join(" and in ")}, `
    + `${page.pairs[state.pair].name}. ${about}. Made with regard ${version}${command ? `: ${command}` : ""}`;
  if (!book) return `${header.title}. regard ${version}.`;
  const { rows } = page.stack, heads = page.heads.map((head) => head.name), [head] = page.heads;
  const whose = state.view === "overview" ? "Attention of every head" : state.view === "long" || state.view === "square"
    ? `Attention in ${heads.join(" and ")}`
    : `Attention of “${rows.name(state.word)}” in ${heads.join(" and ")}`;
  const word = page.stack.window ? state.word + page.stack.window[0] : state.word;
  const place = head && (head.layer.name ? { layer: head.layer.index, head: head.head } : { head: head.head });
  const options = place ? Object.entries(place) : [];
  const again = command ? `${command} --word ${word}${options.map(([name, n]) => ` --${name} ${n}`).join("")}`
    : `show(${[word, ...options.map(([name, n]) => `${name}=${n}`)].join(", ")})`;
  return `${whose}. ${about}. Made with regard ${version}: ${again}`;
}
