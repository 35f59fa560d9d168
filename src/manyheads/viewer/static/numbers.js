// Numbers: decoded, coloured and formatted.

// The value of every float16, divided by 2^15.
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const magnitude = exponent === 31 ? (fraction ? NaN : Infinity)
    : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return (bits >> 15 ? -magnitude : magnitude) / 32768;
});

// A tile: means and maxima of cells, or weights, [rows, cols]. sampled: estimated from one query in this many.
function decode(buffer) {
  const [sampled, planes, rows, cols] = new Uint32Array(buffer, 0, 4);
  const size = rows * cols, masked = buffer.byteLength === 16, exact = buffer.byteLength === 16 + 4 * planes * size;
  const numbers = masked ? new Float32Array(planes * size).fill(NaN) // all of it
    : exact ? new Float32Array(buffer, 16) : Float32Array.from(new Uint16Array(buffer, 16), (n) => HALVES[n]);
  const plane = (n) => numbers.subarray(n * size, (n + 1) * size);
  return { sampled, rows, cols, exact, mean: plane(0), max: plane(planes - 1) };
}

// The weight that each key receives, and each query's entropy; null before a scan.
function decodeMarginals(buffer) {
  const [ready, , t, s] = new Uint32Array(buffer, 0, 4);
  if (!ready) return null;
  const numbers = new Float32Array(buffer, 16);
  return { received: numbers.subarray(0, s), entropy: numbers.subarray(s, s + t) };
}

const DECADES = 4; // of a logarithmic scale

// 256 colours, and a weight's place among them, from 0 to 1, on a scale that ends at `top`.
class ColorScale {
  constructor(colors) {
    this.rgb = Uint8ClampedArray.from({ length: 768 }, (_, n) => parseInt(colors.slice(2 * n, 2 * n + 2), 16));
  }

  static place(weight, top, scale) {
    return scale === "log" ? (weight > 0 ? 1 + Math.log10(weight / top) / DECADES : 0) : weight / top;
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

  // Means or maxima of a tile as an image, transparent where masked.
  paint(tile, pooling, top, scale) {
    const canvas = document.createElement("canvas");
    canvas.width = tile.cols, canvas.height = tile.rows;
    const context = canvas.getContext("2d"), image = context.createImageData(tile.cols, tile.rows);
    const weights = tile[pooling], pixels = image.data;
    for (let n = 0; n < weights.length; n++) {
      const weight = weights[n];
      if (weight !== weight) continue;
      const at = 3 * Math.round(255 * Math.min(1, Math.max(0, ColorScale.place(weight, top, scale))));
      pixels[4 * n] = this.rgb[at], pixels[4 * n + 1] = this.rgb[at + 1], pixels[4 * n + 2] = this.rgb[at + 2];
      pixels[4 * n + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

// The smallest of 1, 2 and 5 times a power of ten that is at least x.
function roundUp(x) {
  if (!(x > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(x) + 1e-9);
  return ten * [1, 2, 5, 10].find((n) => n * ten >= x * (1 - 1e-6));
}

// A token isolated from the text around it, which a right-to-left token would reorder.
const isolated = (name) => `\u2068${name}\u2069`;

const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// A weight with a number of significant digits.
function format(weight, digits = 3) {
  if (weight === 0) return "0";
  return Math.abs(weight) < 0.001 ? weight.toExponential(digits - 1) : String(Number(weight.toPrecision(digits)));
}
