// The server of a page that has one: its data, tiles, rows and windows that the page cannot compute itself, typed texts.

import { el } from "./elements.js";
import { half, readBlock } from "./data.js";

export class Server {
  constructor(look) { this.look = look; this.who = "server"; }
  async ask(path, fields, signal) {
    const query = new URLSearchParams({ look: this.look });
    for (const [name, value] of Object.entries(fields)) for (const one of [value].flat()) query.append(name, one);
    let answer = null;
    try {
      answer = await fetch(`${path}?${query}`, { credentials: "same-origin", signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error("the server does not answer; is it still running?");
    }
    if (answer.ok) return answer;
    const text = await answer.text();
    throw new Error(answer.headers.get("Content-Type").includes("json") ? JSON.parse(text).error : text.trim());
  }
  // A header and arrays, as `_send_arrays` writes them; null for one that is not there yet.
  async arrays(path, fields, signal) {
    return readArrays(await (await this.ask(path, fields, signal)).arrayBuffer());
  }
  tiles(head, by, tiles, signal) {
    return this.arrays("tiles", { head: `${head.place}.${head.head}`, by, tile: tiles }, signal);
  }
  // A row of weights; those that the mask forbids, which are sent as −1, are 0.
  async row(head, i) {
    const { arrays: [row] } = await this.arrays("row", { head: `${head.place}.${head.head}`, row: i });
    return row.map((w) => Math.max(0, w));
  }
  async window(head, [i0, i1, j0, j1]) {
    const { header, arrays: [w, q, k] } = await this.arrays("window", { head: `${head.place}.${head.head}`,
      rows: `${i0}.${i1}`, cols: `${j0}.${j1}` });
    return new ServedWindow([i0, i1, j0, j1], w, q, k, header);
  }
  async vectors() { return (await this.ask("vectors", {})).arrayBuffer(); }
  // The data of the page, once it is there; until then, how far it is.
  async data(onprogress) {
    for (;;) {
      const answer = await this.ask("data", {});
      if (answer.status === 200) return new Uint8Array(await answer.arrayBuffer());
      onprogress(await answer.json());
      await new Promise((done) => { setTimeout(done, 250); });
    }
  }
  // Look at a typed text: the address of its page.
  async type(text, decoder) {
    const body = JSON.stringify({ text, ...(decoder && { decoder_text: decoder }) });
    const answer = await fetch("look", { method: "POST", credentials: "same-origin", body,
      headers: { "Content-Type": "application/json" } });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    return `/?look=${(await answer.json()).look}`;
  }
}

function readArrays(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const { arrays, ...header } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const read = ([kind, at, count]) => (kind === "f4" ? new Float32Array(buffer, 4 + size + at, count)
    : Float32Array.from(new Uint16Array(buffer, 4 + size + at, count), half));
  return { header, arrays: arrays.map((place) => place && read(place)) };
}

// The kernel of a notebook in the place of a server: questions go to the widget around the page.
export class Kernel extends Server {
  constructor() {
    super("kernel");
    this.who = "kernel"; this.waiting = new Map();
    addEventListener("message", ({ source, data }) => {
      const { id, error, buffer } = data?.regardAnswer ?? {}, one = source === parent ? this.waiting.get(id) : null;
      if (!one) return;
      this.waiting.delete(id);
      if (error || !buffer) one.failed(new Error(error ?? "the kernel has not answered"));
      else one.done(readArrays(buffer));
    });
  }
  arrays(path, fields) {
    const id = crypto.getRandomValues(new Uint32Array(2)).join(".");
    return new Promise((done, failed) => {
      this.waiting.set(id, { done, failed });
      parent.postMessage({ regardAsk: { id, path, fields } }, "*");
    });
  }
  vectors() { return readBlock(document.getElementById("regard-vectors").textContent); }
}

// Weights of a window that the server computed, with its queries and keys where scores are their products.
class ServedWindow {
  constructor([i0, i1, j0, j1], w, q, k, { scale, d }) {
    this.i0 = i0; this.j0 = j0; this.width = j1 - j0; this.sent = w; this.w = w.map((x) => Math.max(0, x));
    this.scale = scale; this.d = d; this.lo = w.some((x) => x < 0) ? true : null;
    // Vectors are asked for by the place of their word in the text.
    const shifted = (flat, from) => flat && { subarray: (a, b) => flat.subarray(a - from * d, b - from * d) };
    this.q = shifted(q, i0); this.k = shifted(k, j0);
  }
  block(rowFrom, rowTo, keyFrom, keyTo) {
    const out = new Float32Array((rowTo - rowFrom) * (keyTo - keyFrom));
    for (let i = rowFrom, at = 0; i < rowTo; i++) for (let j = keyFrom; j < keyTo; j++, at++) {
      out[at] = this.w[(i - this.i0) * this.width + j - this.j0];
    }
    return out;
  }
  visible(i, j) { return this.sent[(i - this.i0) * this.width + j - this.j0] >= 0; }
}

// A field for a sentence of one's own.
export function typing(page) {
  const field = el("input", { type: "text", class: "typed", "data-key": "typed", maxlength: 20000, autocomplete: "off",
    spellcheck: "false", "aria-label": "Your own sentence", placeholder: "type your own sentence" });
  const message = el("span", { class: "hint", "aria-live": "polite" });
  const look = async () => {
    if (!field.value.trim()) { field.focus(); return; }
    message.textContent = "looking …";
    try { location.assign(await page.server.type(field.value)); } catch (error) { message.textContent = error.message; }
  };
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") look(); });
  return el("div", { class: "typing" }, field, el("button", { class: "chip", "data-key": "look", text: "look", onclick: look }),
    message);
}

// What stands in the place of the page until its data is there.
export function waiting(root, { step, done }) {
  const bar = el("progress", done === null ? {} : { value: done, max: 1 });
  root.className = "regard";
  root.replaceChildren(el("p", { class: "mark", text: "regard" }), el("p", { class: "hint", "data-read": "progress",
    text: `${step} …${done === null ? "" : ` ${Math.floor(100 * done)} %`}` }), bar);
}
