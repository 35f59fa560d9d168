// The tiles of a head: those in view are asked for, the nearest first; those that leave it before they come are not
// waited for.

const AT_ONCE = 4; // requests
const HELD = 240; // tiles that are kept
const AGAIN = 2000; // milliseconds after which what failed is asked for again

class Tiles {
  // head: {run, layer, head, batch}; side: cells of a tile; changed: called when there is something new to draw.
  constructor(source, head, shape, side, changed) {
    Object.assign(this, { source, head, side, changed });
    [, , this.t, this.s] = shape;
    this.top = Math.max(0, Math.ceil(Math.log2(Math.max(this.t, this.s) / side)));
    this.ready = new Map(); // by "level/x/y": a grid, with what is drawn of it
    this.loading = new Map(); // AbortControllers
    this.wanted = [];
    this.failed = null, this.resting = null;
  }

  address(place) {
    const { run, layer, head, batch } = this.head;
    return `tiles/${run}/${layer}/${head}/${place}/${batch}`;
  }

  get(level, x, y) {
    const place = `${level}/${x}/${y}`, grid = this.ready.get(place);
    if (grid) this.ready.delete(place), this.ready.set(place, grid); // the last one used
    return grid;
  }

  want(places) {
    this.wanted = places.filter((place) => !this.ready.has(place));
    for (const [place, loading] of this.loading) if (!this.wanted.includes(place)) loading.abort();
    this.load();
  }

  load() {
    if (this.resting) return;
    for (const place of this.wanted) {
      if (this.loading.size >= AT_ONCE) return;
      if (!this.loading.has(place)) this.fetch(place);
    }
  }

  async fetch(place) {
    const control = new AbortController();
    this.loading.set(place, control);
    try {
      const grid = decode(await this.source.bytes(this.address(place), control.signal));
      this.ready.set(place, grid), this.failed = null;
      while (this.ready.size > HELD) this.ready.delete(this.ready.keys().next().value);
    } catch (error) {
      if (error.name === "AbortError") return this.after(place);
      this.failed = error.message;
      this.resting ??= setTimeout(() => ((this.resting = null), this.load()), AGAIN);
    }
    this.after(place);
    this.changed();
  }

  after(place) {
    this.loading.delete(place);
    this.wanted = this.wanted.filter((one) => !this.ready.has(one));
    this.load();
  }

  // Forget what was read off a few queries, now that all were read.
  forgetSampled() {
    for (const [place, grid] of this.ready) if (grid.sampled > 1) this.ready.delete(place);
    this.changed();
  }

  close() {
    this.wanted = [];
    for (const loading of this.loading.values()) loading.abort();
  }

  // The outline of what may be seen, in cells of the tile: where a cell that may be borders on one that may not.
  static outline(grid) {
    if (grid.outline) return grid.outline;
    const path = new Path2D(), { rows, cols, max } = grid, clear = (n) => max[n] !== max[n];
    let pieces = 0;
    for (let r = 0; r < rows && pieces < 5000; r++) {
      for (let c = 0; c < cols; c++) {
        const n = r * cols + c;
        if (c + 1 < cols && clear(n) !== clear(n + 1)) path.moveTo(c + 1, r), path.lineTo(c + 1, r + 1), pieces++;
        if (r + 1 < rows && clear(n) !== clear(n + cols)) path.moveTo(c, r + 1), path.lineTo(c + 1, r + 1), pieces++;
      }
    }
    return (grid.outline = pieces < 5000 ? path : new Path2D()); // a mask of single cells has none to be seen
  }

  static most(grid, plane) {
    const key = `most ${plane}`;
    if (grid[key] === undefined) {
      grid[key] = 0;
      for (const weight of grid[plane]) if (weight > grid[key]) grid[key] = weight;
    }
    return grid[key];
  }
}
