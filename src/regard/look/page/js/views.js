// The views in the order of their tabs, and the start of the page.

import { inflate, inflateBytes, unpack } from "./data.js";
import { Kernel, Server, waiting } from "./served.js";
import { Page } from "./page.js";
import { hands } from "./elements.js";
import { spotlight } from "./spotlight.js";
import { story } from "./story.js";
import { walk } from "./walk.js";
import { play } from "./play.js";
import { square } from "./square.js";
import { overview } from "./overview.js";
import { long } from "./long.js";
import { training } from "./training.js";
import { compare, withUnits } from "./compare.js";

const short = (stack) => !stack.long && stack.heads.length > 0;
const hasPatches = ({ stack: { rows, cols } }) => rows.patches || cols.patches;
const withVectors = (stack) => short(stack) && stack.heads.some((head) => head.layer.q !== undefined);

// Ids stand in addresses (#v=) and stay: `long` is the Map, `overview` the Atlas, `play` the Lab.
export const VIEWS = {
  spotlight: {
    name: "Spotlight", build: spotlight, stack: (s) => short(s) && s.same,
    look: (page) => (hasPatches(page) ? [hands("Point at a patch, or click to keep it", "Tap a patch"), ": the stronger the colour of another patch, the more it looks there. "
      + "A patch is named by its row and column."]
      : (({ unit }) => [`Follow the lines from the lit ${unit}: the thicker, the more of it is made of that other ${unit}. `,
        hands(`Point at another ${unit}, or click to keep it lit.`, `Tap another ${unit} to light it.`)])(page.stack.rows)),
  },
  cross: {
    name: "Two sentences", build: spotlight, stack: (s) => short(s) && !s.same,
    look: (page) => (hasPatches(page) ? "What is lit above looks at what stands below: the stronger the colour, the more it draws on it. "
      + "A patch is named by its row and column."
      : "The lit word above looks into the sentence below: which of its words does it draw on?"),
  },
  long: {
    name: "Map", build: long, stack: (s) => s.long && s.heads.length > 0,
    look: ({ stack: { rows, cols } }) => `Zoom with the wheel, two fingers or + and −, drag to move. A strong column is a ${cols.unit} `
      + `that all ${rows.units} look at, a strong diagonal is the neighbourhood; rings mark the strongest links.`,
  },
  story: {
    name: "Story", build: story, stack: short,
    look: ({ stack: { rows } }) => `How attention comes about, chapter by chapter, on these ${rows.units}. The arrow keys lead forth and back, space plays it.`,
  },
  walk: {
    name: "Walk", build: walk, stack: short,
    look: "Read downwards: how a score becomes a weight, and weights become the output, number by number.",
  },
  play: {
    name: "Lab", build: play, stack: withVectors,
    look: ({ stack: { cols } }) => `Turn the scale up until one ${cols.unit} takes everything, and down until all are alike; `
      + `forbid a ${cols.unit} with a click; then change the rules.`,
  },
  square: {
    name: "Square", build: square, stack: short,
    look: ({ stack: { rows, cols } }) => `Each row is one ${rows.unit} looking, each column one ${cols.unit} looked at. `
      + `A strong column is a ${cols.unit} that all ${rows.units} look at, a diagonal is a habit of place.`,
  },
  overview: {
    name: "Atlas", build: overview, when: (page) => page.book?.total > 1,
    look: () => ["The pattern of every head, rows looking at columns: find the odd one out. ",
      hands("A click adds a head to those that are shown, a double click opens it.", "A tap adds a head to those that are shown, a double tap opens it.")],
  },
  compare: {
    name: "Compare", build: compare, when: (page) => page.header.kind === "comparison",
    look: ({ header: { groups: [{ rows }] } }, { unit } = withUnits(rows)) => `The same ${unit} in two recordings: blue is what the second gives more, orange what the first does. `
      + `Point at a ${unit}, or at a cell of the patterns.`,
  },
  training: {
    name: "Training", build: training, when: (page) => page.header.kind === "training",
    look: "Time runs to the right, one row a head: look for rows that change colour for good.",
  },
};

export async function show(root, base64, look) {
  try {
    if (!look) {
      const own = unpack(await inflate(base64));
      return new Page(root, own.served?.kernel && parent !== window ? { ...own, server: new Kernel() } : own);
    }
    const server = new Server(look), header = unpack(await inflateBytes(await server.data((how) => waiting(root, how))));
    document.title = header.title;
    return new Page(root, { ...header, server });
  } catch (error) {
    root.textContent = `This page could not be shown: ${error.message}`;
    throw error;
  }
}

const data = globalThis.document?.getElementById("regard-data"),
  look = globalThis.document?.querySelector('meta[name="regard-look"]')?.getAttribute("content");
if (data || look) globalThis.regard = show(document.getElementById("regard"), data?.textContent, look);
