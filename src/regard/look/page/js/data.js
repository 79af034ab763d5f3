// The data of a page: one block of bytes, the length of a header, the header in JSON, and arrays.
// The n-th bytes of all numbers of an array stand together, as `format.Packer` writes them.

const WIDTH = { f4: 4, f2: 2, u4: 4, u1: 1 };

export async function inflate(base64) {
  const text = atob(base64.trim());
  const packed = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) packed[n] = text.charCodeAt(n);
  return inflateBytes(packed);
}

export async function inflateBytes(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function unpack(bytes) {
  const size = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  let offset = 4 + size;
  const places = header.arrays.map(([kind, ...shape]) => {
    const count = shape.reduce((a, b) => a * b, 1);
    const place = { kind, shape, count, offset };
    offset += count * WIDTH[kind];
    return place;
  });
  const decoded = [];
  header.array = (n) => (decoded[n] ??= numbers(bytes, places[n]));
  header.shape = (n) => places[n].shape;
  return header;
}

function numbers(bytes, { kind, count, offset }) {
  const width = WIDTH[kind];
  const raw = new Uint8Array(count * width);
  for (let b = 0; b < width; b++) {
    const from = offset + b * count;
    for (let n = 0; n < count; n++) raw[n * width + b] = bytes[from + n];
  }
  if (kind === "f4") return new Float32Array(raw.buffer);
  if (kind === "u4") return new Int32Array(raw.buffer);
  return kind === "u1" ? raw : Float32Array.from(new Uint16Array(raw.buffer), half);
}

// The second block, queries and keys of long inputs: raw bytes, decoded in slices so that the page stays responsive.
export async function readBlock(base64) {
  const text = base64.trim(), size = 1 << 20;
  const bytes = new Uint8Array((text.length / 4) * 3 - (text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0));
  for (let at = 0; at < text.length; at += size) {
    const part = atob(text.slice(at, at + size)), from = (at / 4) * 3;
    for (let n = 0; n < part.length; n++) bytes[from + n] = part.charCodeAt(n);
    await new Promise((done) => { setTimeout(done, 0); });
  }
  return bytes.buffer;
}

export function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}
