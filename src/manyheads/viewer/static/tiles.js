// A cache of the tiles of a head. It loads requested tiles in order, and cancels requests for tiles that are no longer needed.

const PARALLEL = 4; // requests at a time
const CACHED = 240; // tiles
const RETRY = 2000; // milliseconds after a failed request

class Tiles {
  // head: {run, layer, head, batch}. grid: its TileGrid. changed: called when there is something new to draw.
  constructor(client, head, grid, changed) {
    Object.assign(this, { client, head, grid, changed });
    this.ready = new Map(); // decoded tiles by "level/x/y", the most recently used last
    this.loading = new Map(); // the AbortControllers of requests, by "level/x/y"
    this.wanted = [];
    this.failed = null;
    this.retrying = null;
    this.isScanned = false;
  }

  address(place) {
    const { run, layer, head, batch } = this.head;
    return `tiles/${run}/${layer}/${head}/${place}/${batch}`;
  }

  // Return a loaded tile, and mark it as the most recently used.
  get(level, x, y) {
    const place = `${level}/${x}/${y}`, tile = this.ready.get(place);
    if (tile) {
      this.ready.delete(place);
      this.ready.set(place, tile);
    }
    return tile;
  }

  // Load these tiles, given as "level/x/y", the first ones first. Requests for other tiles are cancelled.
  request(places) {
    this.wanted = places.filter((place) => !this.ready.has(place));
    for (const [place, loading] of this.loading) if (!this.wanted.includes(place)) loading.abort();
    this.load();
  }

  load() {
    if (this.retrying) return;
    for (const place of this.wanted) {
      if (this.loading.size >= PARALLEL) return;
      if (!this.loading.has(place)) this.fetch(place);
    }
  }

  async fetch(place) {
    const control = new AbortController(), { isScanned } = this;
    this.loading.set(place, control);
    try {
      const tile = decode(await this.client.bytes(this.address(place), control.signal));
      const isOutdated = tile.sampled > 1 && isScanned !== this.isScanned; // it is requested again
      if (!isOutdated) this.ready.set(place, tile);
      this.failed = null;
      while (this.ready.size > CACHED) this.ready.delete(this.ready.keys().next().value);
    } catch (error) {
      if (error.name === "AbortError") return this.finish(place);
      this.failed = error.message;
      this.retrying ??= setTimeout(() => ((this.retrying = null), this.load()), RETRY);
    }
    this.finish(place);
    this.changed();
  }

  finish(place) {
    this.loading.delete(place);
    this.wanted = this.wanted.filter((other) => !this.ready.has(other));
    this.load();
  }

  // Remove the tiles that were estimated before the scan was complete.
  removeSampled() {
    this.isScanned = true; // also those that are being loaded are of no use
    for (const [place, tile] of this.ready) if (tile.sampled > 1) this.ready.delete(place);
    this.changed();
  }

  close() {
    this.wanted = [];
    clearTimeout(this.retrying);
    for (const loading of this.loading.values()) loading.abort();
  }

  static largest(tile, pooling) {
    const key = `largest ${pooling}`;
    if (tile[key] === undefined) {
      tile[key] = 0;
      for (const weight of tile[pooling]) if (weight > tile[key]) tile[key] = weight;
    }
    return tile[key];
  }
}

// The differences between the tiles of two heads, with the methods of Tiles that a pane uses.
class DifferenceTiles {
  constructor(first, second) {
    this.both = [first, second];
    this.made = new WeakMap(); // by the tile of the first head: the second's tile, and the difference
  }

  get failed() {
    return this.both[0].failed ?? this.both[1].failed;
  }

  get(level, x, y) {
    const [first, second] = this.both.map((tiles) => tiles.get(level, x, y));
    if (!first || !second) return undefined;
    const known = this.made.get(first);
    if (known?.second === second) return known.difference;
    const minus = (a, b) => a.map((weight, n) => subtract(weight, b[n]));
    const mean = minus(first.mean, second.mean), max = first.mean === first.max ? mean : minus(first.max, second.max);
    const { rows, cols } = first, sampled = Math.max(first.sampled, second.sampled);
    const difference = { rows, cols, sampled, exact: first.exact && second.exact, mean, max };
    this.made.set(first, { second, difference });
    return difference;
  }

  request(places) {
    for (const tiles of this.both) tiles.request(places);
  }

  removeSampled() {
    for (const tiles of this.both) tiles.removeSampled();
  }

  close() {
    for (const tiles of this.both) tiles.close();
  }
}

// The numbers of queries and keys in a cell of a level (see `level_shifts` in pyramid.py).
const cellSize = ({ shifts }, level) => shifts.map((shift) => 2 ** Math.max(0, level - shift));

// Where the tiles of a matrix are. A tile has side × side cells; a cell of a level has `cell(level)` queries and keys.
class TileGrid {
  // layer: of the API's "runs".
  constructor({ shape, shifts, finest }, side) {
    Object.assign(this, { shifts, finest, side });
    [, , this.t, this.s] = shape;
    this.top = Math.max(0, Math.ceil(Math.log2(Math.max(this.t, this.s) / side))); // the level of a single tile
  }

  // The numbers of queries and keys in a cell.
  cell(level) {
    return cellSize(this, level);
  }

  // The level whose cells are one or two pixels large. pixels: the sizes of a query and of a key.
  levelFor(pixels) {
    for (let level = this.finest; level < this.top; level++) {
      if (this.cell(level).every((tokens, axis) => tokens * pixels[axis] > 0.99)) return level;
    }
    return this.top;
  }

  // Whether tiles of a level are computed on request, and not by the scan.
  isFine(level, most) {
    const [rows, cols] = this.cell(level);
    return Math.min(this.t, this.side * rows) * Math.min(this.s, this.side * cols) <= most;
  }

  // The tile with a weight, as [x, y], and the weight's row and column among the tile's cells.
  find(level, [i, j]) {
    const [rows, cols] = this.cell(level), r = Math.floor(i / rows), c = Math.floor(j / cols);
    return { x: Math.floor(c / this.side), y: Math.floor(r / this.side), row: r % this.side, col: c % this.side };
  }

  // The tiles with cells in these ranges of queries and keys, as [x, y].
  inView(level, queries, keys) {
    const [rows, cols] = this.cell(level);
    const range = ([from, to], size) => {
      const first = Math.floor(from / (size * this.side)), last = Math.ceil(to / (size * this.side));
      return Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
    };
    return range(queries, rows).flatMap((y) => range(keys, cols).map((x) => [x, y]));
  }

  // The largest number, disregarding signs, of a tile's cells that are in these ranges.
  largest(tile, weights, level, [x, y], queries, keys) {
    const [rows, cols] = this.cell(level);
    const within = ([from, to], size, tileIndex, count) => [
      Math.max(0, Math.floor(from / size) - tileIndex * this.side),
      Math.min(count, Math.ceil(to / size) - tileIndex * this.side),
    ];
    const [r0, r1] = within(queries, rows, y, tile.rows), [c0, c1] = within(keys, cols, x, tile.cols);
    let largest = 0;
    for (let r = r0; r < r1; r++) {
      for (let n = r * tile.cols + c0, end = r * tile.cols + c1; n < end; n++) {
        const weight = Math.abs(weights[n]);
        if (weight > largest) largest = weight;
      }
    }
    return largest;
  }
}

// Return true if a tile has masked cells.
function hasMasked(tile) {
  if (tile) tile.hasMasked ??= tile.max.some((weight) => weight !== weight);
  return Boolean(tile?.hasMasked);
}

// Return the outline of a tile's mask in units of cells: the edges between visible and masked cells.
function outlineOf(tile) {
  if (tile.outline) return tile.outline;
  const path = new Path2D(), { rows, cols, max } = tile, isMasked = (n) => max[n] !== max[n];
  let edges = 0;
  for (let r = 0; r < rows && edges < 5000; r++) {
    for (let c = 0; c < cols; c++) {
      const n = r * cols + c;
      if (c + 1 < cols && isMasked(n) !== isMasked(n + 1)) {
        path.moveTo(c + 1, r);
        path.lineTo(c + 1, r + 1);
        edges++;
      }
      if (r + 1 < rows && isMasked(n) !== isMasked(n + cols)) {
        path.moveTo(c, r + 1);
        path.lineTo(c + 1, r + 1);
        edges++;
      }
    }
  }
  tile.outline = edges < 5000 ? path : new Path2D(); // a mask of scattered cells has no legible outline
  return tile.outline;
}
