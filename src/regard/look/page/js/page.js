// The page: its state, its frame, its tabs and the heads that all views show.

import { largest, range } from "./numbers.js";
import { el, palette } from "./elements.js";
import { LETTERS } from "./sentence.js";
import { firstTwo, openBook, ranked } from "./book.js";
import { readBlock } from "./data.js";
import { Exact } from "./exact.js";
import { addressOf, readAddress } from "./address.js";
import { shareMenu } from "./share.js";
import { rootOf, windowStack } from "./window.js";
import { typing } from "./served.js";
import { windowNote } from "./controls.js";
import { VIEWS } from "./views.js";

export class Page {
  constructor(root, header) {
    this.root = root;
    this.book = header.kind === "attention" ? openBook(header) : null;
    this.header = header;
    this.server = header.server ?? null;
    this.long = null; // what the map of a long input shows
    const start = header.start;
    this.state = {
      view: null, stack: start?.stack ?? 0, word: start?.word ?? 0, pair: start?.pair ?? 0, hover: null, hide: start?.hide ?? false,
        merge: start?.merge ?? false, fit: Boolean(this.book?.stacks[start?.stack ?? 0]?.cols.patches), target: start?.target ?? null, theme: "auto",
      chosen: start?.heads?.length ? start.heads.map(([place, h]) => this.book.heads.findIndex((x) => x.place === place
        && x.head === h)) : null,
      layer: start?.heads?.length ? null : start?.layer ?? null, cell: null,
    };
    this.chooseViews();
    this.state.view = this.first = this.views.find(([, view]) => !this.book || (view.stack?.(this.stack) ?? true))[0];
    this.chooseViews();
    this.frame();
    readAddress(this, location.hash);
    if (header.vectors?.length) this.vectors = this.readVectors();
    this.open(this.state.view);
    this.initial = addressOf(this);
    this.ready = true;
    if (parent !== window) this.inFrame();
    addEventListener("hashchange", () => {
      readAddress(this, location.hash || this.initial);
      this.frame();
      this.open(this.state.view, false);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    this.printOnPaper();
    new ResizeObserver(() => { const width = root.clientWidth; if (width !== this.width) { this.width = width;
      this.keepingFocus(() => this.refresh?.(true)); } }).observe(root);
  }
  // The views that have something to show, the first one first.
  chooseViews() {
    this.views = Object.entries(VIEWS).filter(([, view]) => view.when?.(this) ?? this.book?.stacks.some(view.stack));
    this.views.sort(([a], [b]) => Number(b === this.first) - Number(a === this.first));
  }
  // Queries and keys of long inputs come after the first picture; then every weight is at hand.
  async readVectors() {
    this.vectorsPending = true;
    const exact = this.header.vectors.map((spec) => [spec,
      this.book.heads.find((one) => one.place === spec.place && one.head === spec.head)]);
    let done = (_) => {};
    const promise = new Promise((resolve) => { done = resolve; });
    for (const [, head] of exact) head.stored.promise = promise;
    const buffer = this.server ? await this.server.vectors() : await readBlock(await textAtEnd("regard-vectors"));
    for (const [spec, head] of exact) head.stored.exact = new Exact(spec, buffer, head.i, head.j);
    done();
    this.vectorsPending = false;
    const { head } = this, at = this.state.word;
    if (this.stack.long && head.stored.exact && this.stack.same) {
      // The words around the lit one, and the one that it looks at most, where that is near.
      const most = head.stored.peakAt[at], key = Math.abs(most - at) < 150 ? most : at, size = Math.max(80, Math.abs(key - at) + 20);
      const from = Math.max(0, Math.min(Math.floor((at + key - size) / 2), head.i - size)), to = Math.min(head.i, from + size);
      this.addWindow(this.stack, [from, to, from, to]);
    }
    if (location.hash.includes("win=")) readAddress(this, location.hash);
    this.keepingFocus(() => { this.frame(); this.select(this.state.view); this.draw(); });
  }
  // A window of a long input as one more stack; there is one at a time.
  addWindow(base, span) {
    const { book } = this;
    book.stacks = book.stacks.filter((stack) => !stack.window);
    book.heads = book.heads.filter((head) => !head.stack.window);
    const stack = windowStack(book, base, book.stacks.length, span);
    book.stacks.push(stack);
    book.heads.push(...stack.heads);
    this.chooseViews();
    return stack;
  }
  // A window that the address names, from the server; then the address is read once more.
  async fetchWindow(base, span) {
    if (!this.server || this.fetching || this.header.vectors?.length) return;
    const hash = this.fetching = location.hash, head = base.heads[0];
    try {
      head.stored.window = await this.server.window(head, span);
      this.addWindow(base, span);
      readAddress(this, hash);
      this.frame();
      this.open(this.state.view, false);
    } catch { /* the map is shown */ }
    this.fetching = null;
  }
  async openWindow(head, ...span) {
    if (!head.stored.exact) {
      for (const one of head.stack.heads) one.stored.window = null; // of another window
      head.stored.window = await this.server.window(head, span);
    }
    const stack = this.addWindow(head.stack, span), [i0, i1] = span, row = this.long?.row ?? this.state.word;
    const one = stack.heads.find((other) => other.base === head);
    Object.assign(this.state, { stack: stack.n, word: row >= i0 && row < i1 ? row - i0 : 0, chosen: one ? [one.id]
      : null,
      hover: null, target: null, layer: null, cell: null });
    this.frame();
    this.open(stack.same ? "spotlight" : "cross");
  }
  // Paper is light; a picture that is printed alone has its colours already.
  printOnPaper() {
    const { documentElement } = this.root.ownerDocument;
    let theme = null;
    const wear = (name) => { if (name) documentElement.setAttribute("data-theme", name); else documentElement.removeAttribute("data-theme"); this.repaint(); };
    addEventListener("beforeprint", () => {
      if (document.body.classList.contains("printing")) return;
      theme = [documentElement.getAttribute("data-theme")];
      wear("light");
    });
    addEventListener("afterprint", () => { if (theme) wear(theme[0]); theme = null; });
  }
  // In a notebook: the frame gets the height of the page, and the page the theme of the notebook.
  inFrame() {
    const tell = () => parent.postMessage({ regardHeight: Math.ceil(this.root.getBoundingClientRect().height) + 8 },
      "*");
    new ResizeObserver(tell).observe(this.root);
    addEventListener("message", ({ source, data }) => {
      if (source === parent && ["light", "dark"].includes(data?.regardTheme)) this.useTheme(data.regardTheme);
    });
  }
  get narrow() { return this.root.clientWidth < 760; }
  get stack() { return this.book.stacks[this.state.stack]; }
  get paint() { return (this.colours ??= palette(this.root)); }
  get row() { return this.state.hover ?? this.state.word; }
  // The heads that are shown: those chosen, else those that matter for the word.
  get heads() {
    const { chosen } = this.state;
    return chosen ? chosen.map((id) => this.book.heads[id]) : firstTwo(ranked(this), this);
  }
  get head() { return this.heads[0] ?? this.stack.heads[0]; }
  colour(n) { return `var(--h${n % 4})`; }
  set(changes) {
    if (Object.entries(changes).every(([key, value]) => this.state[key] === value)) return;
    // The word that was asked for is that of the first lit word alone.
    if ("word" in changes && changes.word !== this.state.word) this.state.target = null;
    Object.assign(this.state, changes);
    const redraw = ["stack", "hide", "merge", "theme"].some((name) => name in changes);
    this.keepingFocus(() => (redraw ? this.draw() : this.refresh?.()));
    this.writeAddress();
  }
  // Null in a frame without an address, as in a notebook.
  get link() { return location.protocol === "about:" ? null : location.href.split("#")[0] + addressOf(this); }
  writeAddress(push) {
    // A frame without an origin, as in a notebook, may not write its address.
    try {
      const address = addressOf(this);
      if (this.ready && location.hash !== address) history[push ? "pushState" : "replaceState"](null, "", address);
    } catch { /* no address */ }
  }
  // Once nothing has changed for a moment: browsers refuse the many addresses of a slider.
  writeSoon() {
    clearTimeout(this.writing);
    this.writing = setTimeout(() => this.writeAddress(), 150);
  }
  // A control that is drawn anew keeps the focus; where it is gone, as "none" once no head is chosen, the nearest control
  // before it takes the focus, else the one after it: on the body the next Tab would begin at the top of the page.
  keepingFocus(redraw) {
    const key = document.activeElement?.getAttribute("data-key");
    const keys = key ? [...this.root.querySelectorAll("[data-key]")].map((one) => one.getAttribute("data-key")) : [];
    redraw();
    if (!key || document.activeElement !== document.body) return;
    const at = keys.indexOf(key), control = (one) => this.root.querySelector(`[data-key="${CSS.escape(one)}"]`);
    const next = [key, ...keys.slice(0, Math.max(0, at)).reverse(), ...keys.slice(at + 1)].find((one) => control(one)?.checkVisibility());
    if (next) control(next).focus({ preventScroll: true });
  }
  repaint() {
    this.colours = null;
    this.keepingFocus(() => this.draw());
  }
  // Another stack: the word goes along where it has the same sentence, the heads where it has the same ones.
  setStack(n) {
    this.set({ stack: n, ...carried(this, this.book.stacks[n]), hover: null, layer: null });
  }
  choose(heads, view) {
    const [head] = heads;
    this.state.chosen = heads.map((one) => one.id);
    if (head.stack.n !== this.state.stack) Object.assign(this.state,
      { stack: head.stack.n, word: carried(this, head.stack).word, target: null });
    this.open(view);
    this.main.querySelector('[tabindex="0"], select, button')?.focus({ preventScroll: true });
  }
  frame() {
    const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (e) => this.tabKey(e) },
      this.views.map(([id, view]) => el("button", { role: "tab", id: `tab-${id}`, "data-key": `tab-${id}`,
        "aria-controls": "view", text: id === "cross" && this.book.sequences.some((one) => one.patches) ? "Text and image" : view.name, onclick: () => this.open(id) })));
    this.tray = el("div", { class: "tray", role: "group", "aria-label": "Heads that are shown" });
    this.main = el("main", { id: "view", role: "tabpanel", tabindex: "-1" });
    this.root.className = "regard";
    this.root.replaceChildren(
      el("header", { class: "top" }, el("p", { class: "mark", text: "regard" }),
        el("h1", {}, el("bdi", { text: this.header.title })),
        this.header.about && el("p", { class: "about" }, el("bdi", { text: this.header.about })),
        shareMenu(this), el("button", { class: "quiet theme", "data-key": "theme",
          "aria-label": "Change between light and dark",
          title: "light / dark", onclick: () => this.turn() }, "◐")),
      ...(this.header.served?.types ? [typing(this)] : []),
      ...(this.views.length > 1 ? [tabs] : []), ...(this.book?.total > 1 ? [this.tray] : []), this.main, this.foot());
  }
  // The heads that all views show, in their colours; the first one is that of views which show a single head.
  showTray() {
    const chip = (head, n) => el("button", { class: "pill", "data-key": `tray-${n}`, "aria-current": n === 0 ? "true"
      : undefined, title: head.name,
      style: { "--colour": this.colour(n) }, onclick: () => this.set({ chosen: [head.id,
        ...this.heads.map((one) => one.id).filter((id) => id !== head.id)] }) },
      el("i", { class: "dot", text: LETTERS[n] }), head.name);
    this.tray.replaceChildren(el("span", { class: "who", text: this.state.chosen ? "heads"
      : `best heads for the ${this.stack.rows.unit}` }), ...this.heads.map(chip),
      ...(this.state.chosen ? [el("button", { class: "pill quiet", "data-key": "tray-auto", text: "the best again",
        onclick: () => this.set({ chosen: null, layer: null }) })] : []));
  }
  foot() {
    const { notes, refused } = this.header;
    return el("footer", {}, notes.map((note) => el("p", { text: note })),
      refused.length ? el("details", {},
        el("summary", { text: `${refused.length} ${refused.length > 1 ? "modules were" : "module was"} not recorded` }),
        el("ul", {}, refused.map(([name, why]) => el("li", {}, el("b", { text: name }), `: ${why}`)))) : null);
  }
  turn() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = this.state.theme === "auto" ? (dark ? "dark" : "light") : this.state.theme;
    this.useTheme(now === "dark" ? "light" : "dark");
  }
  useTheme(theme) {
    if (theme === this.state.theme) return;
    this.root.ownerDocument.documentElement.setAttribute("data-theme", theme);
    this.state.theme = theme;
    this.repaint();
  }
  tabKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -99, End: 99 }[event.key];
    if (!step) return;
    event.preventDefault();
    const names = this.views.map(([id]) => id), at = names.indexOf(this.state.view);
    const to = Math.abs(step) === 99 ? (step < 0 ? 0 : names.length - 1) : (at + step + names.length) % names.length;
    this.open(names[to]);
    this.root.querySelector(`#tab-${names[to]}`).focus();
  }
  // Open a view; the way back leads to the one before.
  open(id, push = true) {
    this.state.view = id;
    const view = VIEWS[id];
    if (view.stack && !view.stack(this.stack)) {
      const fits = this.book.stacks.filter(view.stack), stack = fits.find((one) => sameRows(one, this.stack)) ?? fits[0];
      Object.assign(this.state, { ...carried(this, stack), stack: stack.n, hover: null, layer: null, target: null, cell: null });
      if (stack.long && this.long) Object.assign(this.long, { head: this.head.id, row: this.state.word });
    }
    this.select(id);
    this.draw();
    this.writeAddress(push);
  }
  // Mark the tab of a view as the one that is open.
  select(id) {
    for (const [name] of this.views) {
      const tab = this.root.querySelector(`#tab-${name}`);
      tab?.setAttribute("aria-selected", String(name === id));
      tab?.setAttribute("tabindex", name === id ? "0" : "-1");
    }
    this.main.setAttribute("aria-labelledby", `tab-${id}`);
  }
  draw() {
    const view = VIEWS[this.state.view], part = view.stack && this.stack.window, note = el("p", { class: "hint", "data-read": "window" });
    const box = el("section", { class: `view ${this.state.view}` });
    this.main.replaceChildren(el("p", { class: "look" }, typeof view.look === "function" ? view.look(this) : view.look), part ? note : "", box);
    const update = view.build(this, box) ?? null, frame = () => { if (this.book) this.showTray(); if (part) note.replaceChildren(...windowNote(this)); };
    this.refresh = update && ((...how) => { frame(); update(...how); });
    frame();
    update?.();
  }
}

// A block that stands after the script, once the browser has read the file to its end.
async function textAtEnd(id) {
  while (document.readyState === "loading") {
    await new Promise((done) => { document.addEventListener("readystatechange", done, { once: true }); });
  }
  return document.getElementById(id).textContent;
}

// A window of a long input has the sentence and the heads of its base.
const sameRows = (a, b) => (a.base ?? a).rows === (b.base ?? b).rows;

// The word that is lit and the heads that were chosen, in another stack.
function carried({ book, stack, state, long }, to) {
  const shown = stack.long ? long?.row ?? state.word : state.word, word = shown + (stack.window?.[0] ?? 0) - (to.window?.[0] ?? 0);
  const roots = (state.chosen ?? []).map((id) => rootOf(book.heads[id]));
  const chosen = roots.map((root) => to.heads.find((head) => rootOf(head) === root)).filter(Boolean).map((head) => head.id);
  return { word: sameRows(stack, to) && word >= 0 && word < to.rows.length ? word : telling(to), chosen: chosen.length ? chosen : null };
}

// The row of a stack that some head ties most clearly.
function telling(stack) {
  if (stack.long) {
    const strength = (i) => Math.max(...stack.heads.map((head) => (i < head.stored.settled ? -Infinity
      : head.stored.best(i).beyond)));
    return largest(range(stack.rows.length).map(strength));
  }
  const rows = range(stack.rows.length).filter((i) => !stack.rows.special.has(i));
  const strength = rows.map((i) =>
    Math.max(...stack.heads.map((head) => head.sheet({ hide: false, merge: false }).best(i).beyond)));
  return rows[largest(strength)] ?? 0;
}
