// The state of the page as the fragment of its address: a link, a reload and the history lead to the same picture.
// It holds places and numbers alone, no text of the subject.

const headPlace = (head) => `${head.place}.${head.head}`;

export function addressOf(page) {
  const { state: { view, stack, word, chosen, hide, merge, fit, pair }, book, long: map, overview: atlas } = page;
  const at = book?.stacks[stack], round = (...x) => x.map(Math.round).join(".");
  const fields = {
    v: view, s: stack && !at.window ? stack : null, win: at?.window ? [at.base.n, ...at.window].join(".") : null,
    w: book || page.pairs ? word : null, p: page.pairs ? pair : null, h: chosen?.map((id) => headPlace(book.heads[id])).join(",") || null,
    hide: hide ? 1 : null, merge: merge ? 1 : null, fit: fit ? 1 : at?.cols?.patches ? 0 : null,
    z: view === "long" && map?.view ? round(map.view.i0, map.view.i1, map.view.j0, map.view.j1) : null,
    c: view === "story" && page.story ? Math.round(100 * page.story.at) : null,
    m: view === "long" && ["mean", "beyond"].includes(map?.mode) ? map.mode : null,
    o: view === "overview" && atlas ? [atlas.by, atlas.sort, atlas.mode].join(".") : null,
  };
  return `#${Object.entries(fields).filter(([, x]) => x !== null).map(([key, x]) => `${key}=${x}`).join("&")}`;
}

const naturals = (text) => { const all = (text ?? "").split(".").map(Number);
  return all.every((n) => Number.isInteger(n) && n >= 0) ? all : []; };

// Set the state by an address; whatever in it does not fit this page is left out.
export function readAddress(page, hash) {
  const fields = new URLSearchParams(hash.slice(1)), { state, book } = page;
  if (fields.has("v") && page.views.some(([id]) => id === fields.get("v"))) state.view = fields.get("v");
  if (page.header.kind === "comparison" && fields.has("w")) {
    const { heads, groups } = page.header, pair = indexOrFirst(fields.get("p"), heads.length);
    Object.assign(state, { pair, hover: null, word: indexOrFirst(fields.get("w"), groups[heads[pair].group].rows.labels.length) });
  }
  if (!book || !fields.has("w")) return;
  const stack = windowOf(page, fields) ?? book.stacks[indexOrFirst(fields.get("s"), book.stacks.length)];
  const heads = (fields.get("h") ?? "").split(",").map((text) => stack.heads.find((head) => headPlace(head) === text)).filter(Boolean);
  const word = indexOrFirst(fields.get("w"), stack.rows.length);
  if (word !== state.word) state.target = null;
  Object.assign(state, { stack: stack.n, word, hover: null, cell: null, chosen: heads.length
    ? heads.map((head) => head.id) : null,
    hide: fields.has("hide"), merge: fields.has("merge"), fit: fields.has("fit") ? fields.get("fit") !== "0" : Boolean(stack.cols.patches) });
  if (stack.long) readMap(page, stack, fields);
  const at = Number(fields.get("c") ?? NaN) / 100;
  if (at > 0) page.story = { ...page.story, at, playing: null };
  const [by, sort, mode] = (fields.get("o") ?? "").split(".");
  if (page.header.metrics[by] && ["layer", "metric", "tie"].includes(sort)) page.wantedAtlas = { by, sort,
    mode: mode === "row" ? "row" : "pattern" };
}

const indexOrFirst = (text, length) => { const n = Number(text ?? 0); return Number.isInteger(n) && n >= 0 && n < length
  ? n : 0; };

// A window of a long input exists once its queries and keys are there, or once a server has sent it; until then it is
// remembered.
function windowOf(page, fields) {
  const [n, i0, i1, j0, j1] = naturals(fields.get("win")), base = page.book.stacks[n];
  if (!base?.long || !(i0 < i1 && i1 <= base.rows.length && j0 < j1 && j1 <= base.cols.length && i1 - i0 <= 300
    && j1 - j0 <= 300)) return null;
  const there = page.book.stacks.find((stack) => stack.window && String(stack.window) === String([i0, i1, j0, j1]));
  if (there || base.heads.some((head) => head.stored.exact)) return there ?? page.addWindow(base, [i0, i1, j0, j1]);
  page.fetchWindow(base, [i0, i1, j0, j1]);
  return null;
}

function readMap(page, { rows, cols }, fields) {
  const [i0, i1, j0, j1] = naturals(fields.get("z")), fits = i0 < i1 && i1 <= rows.length && j0 < j1
    && j1 <= cols.length;
  page.wantedMap = { view: fits ? { i0, i1, j0, j1 } : null, mode: ["mean",
    "beyond"].includes(fields.get("m")) ? fields.get("m") : "max" };
}
