// Numbers as they are sent, as they are coloured and as they are written.

// Every float16 times 2^-15, by its bits.
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const size = exponent === 31 ? (fraction ? NaN : Infinity)
    : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return (bits >> 15 ? -size : size) / 32768;
});

// A tile: planes [rows, cols] of means and maxima, or of weights alone. sampled: of how many queries one was read.
function decode(buffer) {
  const [sampled, planes, rows, cols] = new Uint32Array(buffer, 0, 4);
  const size = rows * cols, masked = buffer.byteLength === 16, exact = buffer.byteLength === 16 + 4 * planes * size;
  const numbers = masked ? new Float32Array(planes * size).fill(NaN) // all of it
    : exact ? new Float32Array(buffer, 16) : Float32Array.from(new Uint16Array(buffer, 16), (n) => HALVES[n]);
  const plane = (n) => numbers.subarray(n * size, (n + 1) * size);
  return { sampled, rows, cols, exact, mean: plane(0), max: plane(planes - 1) };
}

// What every key receives and every query's entropy; null until a pass has found them.
function decodeEdges(buffer) {
  const [ready, , t, s] = new Uint32Array(buffer, 0, 4);
  if (!ready) return null;
  const numbers = new Float32Array(buffer, 16);
  return { received: numbers.subarray(0, s), entropy: numbers.subarray(s, s + t) };
}

const DECADES = 4; // of a logarithmic scale, below its largest number

// Colours from 0 to 1, 256 of them; a weight's place among them on a scale that ends at `top`.
class Colours {
  constructor(ramp) {
    this.ramp = Uint8ClampedArray.from({ length: 768 }, (_, n) => parseInt(ramp.slice(2 * n, 2 * n + 2), 16));
  }

  static place(weight, top, scale) {
    return scale === "log" ? (weight > 0 ? 1 + Math.log10(weight / top) / DECADES : 0) : weight / top;
  }

  css(place) {
    const n = 3 * Math.round(255 * Math.min(1, Math.max(0, place)));
    return `rgb(${this.ramp[n]} ${this.ramp[n + 1]} ${this.ramp[n + 2]})`;
  }

  // Black or white, whichever can be read on a colour.
  ink(place) {
    const n = 3 * Math.round(255 * Math.min(1, Math.max(0, place)));
    return 0.299 * this.ramp[n] + 0.587 * this.ramp[n + 1] + 0.114 * this.ramp[n + 2] < 128 ? "#fff" : "#000";
  }

  // A plane of a tile as a picture; what is masked stays clear.
  paint(grid, plane, top, scale) {
    const canvas = document.createElement("canvas");
    canvas.width = grid.cols, canvas.height = grid.rows;
    const context = canvas.getContext("2d"), image = context.createImageData(grid.cols, grid.rows);
    const numbers = grid[plane], pixels = image.data;
    for (let n = 0; n < numbers.length; n++) {
      const weight = numbers[n];
      if (weight !== weight) continue;
      const at = 3 * Math.round(255 * Math.min(1, Math.max(0, Colours.place(weight, top, scale))));
      pixels[4 * n] = this.ramp[at], pixels[4 * n + 1] = this.ramp[at + 1], pixels[4 * n + 2] = this.ramp[at + 2];
      pixels[4 * n + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

// The first of 1, 2, 5, 10, 20, … times a power of ten that is at least x.
function roundUp(x) {
  if (!(x > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(x) + 1e-9);
  return ten * [1, 2, 5, 10].find((n) => n * ten >= x * (1 - 1e-6));
}

// A name among other words, whichever way it is written: isolated, so that it turns nothing around it.
const isolated = (name) => `\u2068${name}\u2069`;

const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// A weight with so many digits.
function written(weight, digits = 3) {
  if (weight === 0) return "0";
  return Math.abs(weight) < 0.001 ? weight.toExponential(digits - 1) : String(Number(weight.toPrecision(digits)));
}
