// Decoding, colouring and formatting of numbers.

// The value of every float16, divided by 2^15, because tiles are encoded as weights times 2^15.
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const magnitude = exponent === 31 ? (fraction ? NaN : Infinity)
    : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return (bits >> 15 ? -magnitude : magnitude) / 32768;
});

// Decode a tile: the mean and the largest weight of each cell, [rows, cols]; single weights have one plane for both. If `sampled`
// is n > 1, they are estimated from every n-th query.
function decode(buffer) {
  const [sampled, planes, rows, cols] = new Uint32Array(buffer, 0, 4);
  const size = rows * cols, masked = buffer.byteLength === 16, exact = buffer.byteLength === 16 + 4 * planes * size;
  const numbers = masked ? new Float32Array(planes * size).fill(NaN) // a header without numbers: all cells are masked
    : exact ? new Float32Array(buffer, 16) : Float32Array.from(new Uint16Array(buffer, 16), (n) => HALVES[n]);
  const plane = (n) => numbers.subarray(n * size, (n + 1) * size);
  return { sampled, rows, cols, exact, mean: plane(0), max: plane(planes - 1) };
}

// Decode the weight that each key receives, and the entropy of each query; null until the scan is complete.
function decodeMarginals(buffer) {
  const [ready, , t, s] = new Uint32Array(buffer, 0, 4);
  if (!ready) return null;
  const numbers = new Float32Array(buffer, 16);
  return { received: numbers.subarray(0, s), entropy: numbers.subarray(s, s + t) };
}

const DECADES = 4; // the length of a logarithmic scale, in powers of ten

// The scales of colours: their names on buttons. The square root shows small weights without hiding which are large.
const SCALES = { sqrt: "√", linear: "linear", log: "log" };

// 256 colours. `place` maps a weight to a place among them, from 0 to 1, on a scale that ends at `top`.
class ColorScale {
  constructor(colors) {
    this.rgb = Uint8ClampedArray.from({ length: 768 }, (_, n) => parseInt(colors.slice(2 * n, 2 * n + 2), 16));
  }

  static place(weight, top, scale) {
    if (scale === "sqrt") return Math.sqrt(weight / top);
    if (scale === "log") return weight > 0 ? 1 + Math.log10(weight / top) / DECADES : 0;
    return weight / top;
  }

  place(weight, top, scale) {
    return ColorScale.place(weight, top, scale);
  }

  // The weights to label on a colour bar.
  ticks(top, scale) {
    return colorTicks(top, scale);
  }

  css(place) {
    const n = 3 * Math.round(255 * Math.min(1, Math.max(0, place)));
    return `rgb(${this.rgb[n]} ${this.rgb[n + 1]} ${this.rgb[n + 2]})`;
  }

  // Black or white text, whichever is legible on a colour.
  textColor(place) {
    const n = 3 * Math.round(255 * Math.min(1, Math.max(0, place)));
    return 0.299 * this.rgb[n] + 0.587 * this.rgb[n + 1] + 0.114 * this.rgb[n + 2] < 128 ? "#fff" : "#000";
  }

  // Return an image of the means or maxima of a tile, transparent where masked.
  paint(tile, pooling, top, scale) {
    const canvas = document.createElement("canvas");
    canvas.width = tile.cols, canvas.height = tile.rows;
    const context = canvas.getContext("2d"), image = context.createImageData(tile.cols, tile.rows);
    const weights = tile[pooling], pixels = image.data;
    for (let n = 0; n < weights.length; n++) {
      const weight = weights[n];
      if (weight !== weight) continue;
      const at = 3 * Math.round(255 * Math.min(1, Math.max(0, this.place(weight, top, scale))));
      pixels[4 * n] = this.rgb[at], pixels[4 * n + 1] = this.rgb[at + 1], pixels[4 * n + 2] = this.rgb[at + 2];
      pixels[4 * n + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

// Round x up to 1, 2 or 5 times a power of ten.
function roundUp(x) {
  if (!(x > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(x) + 1e-9);
  return ten * [1, 2, 5, 10].find((n) => n * ten >= x * (1 - 1e-6));
}

// Format a weight or a score with two decimals. A number below 1 that would be rounded to 1.00 has more, up to four: "0.999".
// `highlights.format_score` does the same.
function twoDecimals(value) {
  const texts = [2, 3, 4].map((decimals) => value.toFixed(decimals));
  return texts.find((text) => Math.abs(Number(text)) !== 1) ?? texts[0];
}

// Format a number that may be negative, with a minus sign.
const number = (x, digits = 3) => (x === null ? "not finite" : x < 0 ? `−${format(-x, digits)}` : format(x, digits));

const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// The size of a matrix, such as "20,000 queries × 3 keys".
const matrixSize = ([, , t, s]) => `${count(t)} ${t === 1 ? "query" : "queries"} × ${plural(s, "key")}`;

// Format a weight with at most this many significant digits, without zeros at its end: "0.5", "1.2e-7". A number below 1 that would
// be rounded to 1 has more, up to `most`.
function format(weight, digits = 3, most = 4) {
  const rounded = Number(weight.toPrecision(digits));
  if (rounded === 1 && weight < 1 && digits < most) return format(weight, digits + 1, most);
  return rounded && Math.abs(rounded) < 0.001 ? rounded.toExponential() : String(rounded);
}
