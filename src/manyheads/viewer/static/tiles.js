// A cache of the tiles of a head. It loads requested tiles in order and cancels requests for tiles that are no longer wanted.

const PARALLEL = 4; // requests at a time
const CACHED = 240; // tiles
const RETRY = 2000; // milliseconds after a failed request

class Tiles {
  // head: {run, layer, head, batch}. side: cells along each side of a tile. changed: called when there is something new to draw.
  constructor(client, head, shape, side, changed) {
    Object.assign(this, { client, head, side, changed });
    [, , this.t, this.s] = shape;
    this.top = Math.max(0, Math.ceil(Math.log2(Math.max(this.t, this.s) / side)));
    this.ready = new Map(); // decoded tiles by "level/x/y", the most recently used last
    this.loading = new Map(); // the AbortControllers of requests, by "level/x/y"
    this.wanted = [];
    this.failed = null, this.retrying = null;
  }

  address(place) {
    const { run, layer, head, batch } = this.head;
    return `tiles/${run}/${layer}/${head}/${place}/${batch}`;
  }

  // Return a loaded tile, and mark it as the most recently used.
  get(level, x, y) {
    const place = `${level}/${x}/${y}`, tile = this.ready.get(place);
    if (tile) this.ready.delete(place), this.ready.set(place, tile);
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
    const control = new AbortController();
    this.loading.set(place, control);
    try {
      this.ready.set(place, decode(await this.client.bytes(this.address(place), control.signal))), this.failed = null;
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
    for (const [place, tile] of this.ready) if (tile.sampled > 1) this.ready.delete(place);
    this.changed();
  }

  close() {
    this.wanted = [];
    for (const loading of this.loading.values()) loading.abort();
  }

  // The outline of the mask in units of cells: the edges between visible and masked cells.
  static outline(tile) {
    if (tile.outline) return tile.outline;
    const path = new Path2D(), { rows, cols, max } = tile, masked = (n) => max[n] !== max[n];
    let edges = 0;
    for (let r = 0; r < rows && edges < 5000; r++) {
      for (let c = 0; c < cols; c++) {
        const n = r * cols + c;
        if (c + 1 < cols && masked(n) !== masked(n + 1)) path.moveTo(c + 1, r), path.lineTo(c + 1, r + 1), edges++;
        if (r + 1 < rows && masked(n) !== masked(n + cols)) path.moveTo(c, r + 1), path.lineTo(c + 1, r + 1), edges++;
      }
    }
    return (tile.outline = edges < 5000 ? path : new Path2D()); // a mask of scattered cells has no legible outline
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
