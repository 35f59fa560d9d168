// Thumbnails of heads: the whole matrix of a head in few cells. They are requested a few at a time, and cached for all pages.

const THUMBNAIL_SIZES = [32, 64, 128, 256]; // cells along a side
const THUMBNAIL_FLOATS = 2 ** 24; // numbers in the cache, 64 MB
const STEPS = Array.from({ length: 37 }, (_, n) => [1, 0.5, 0.2][n % 3] / 10 ** Math.floor(n / 3)); // 1, 0.5, 0.2, 0.1, … 1e-12

class Thumbnails {
  // client: see clients.js. side: cells along each side of a tile.
  constructor(client, side) {
    Object.assign(this, { client, side, ready: new Map(), pending: new Map(), floats: 0, queue: [], running: 0 });
  }

  // Return a promise of a thumbnail for a number of pixels along its side. It rejects with an AbortError after `cancel`.
  get(place, shape, pixels) {
    const level = this.level(shape, pixels), cells = Math.ceil(Math.max(shape[2], shape[3]) / 2 ** level);
    const size = THUMBNAIL_SIZES.find((most) => most >= Math.min(cells, pixels)) ?? THUMBNAIL_SIZES.at(-1);
    const { run, layer, head, batch } = place, address = `tiles/${run}/${layer}/${head}/${level}/0/0/${batch}`, key = `${address} ${size}`;
    if (this.ready.has(key)) return Promise.resolve(this.reuse(key));
    if (!this.pending.has(key)) this.pending.set(key, this.enqueue({ address, key, size, level }));
    return this.pending.get(key);
  }

  // The level of the tile to request: one with up to 64 cells along a side, or the finest that has the whole matrix.
  level([, , t, s], pixels) {
    const most = Math.max(t, s), cells = pixels <= 64 ? 64 : this.side;
    return most <= this.side ? 0 : Math.ceil(Math.log2(most / cells));
  }

  // Return a thumbnail, and mark it as the most recently used.
  reuse(key) {
    const thumbnail = this.ready.get(key);
    this.ready.delete(key);
    this.ready.set(key, thumbnail);
    return thumbnail;
  }

  enqueue(request) {
    const { signal } = (this.control ??= new AbortController());
    return new Promise((resolve, reject) => {
      this.queue.push({ ...request, signal, resolve, reject });
      this.next();
    });
  }

  next() {
    while (this.running < PARALLEL && this.queue.length) {
      this.running++;
      this.fetch(this.queue.shift()).finally(() => {
        this.running--;
        this.next();
      });
    }
  }

  async fetch({ address, key, size, level, signal, resolve, reject }) {
    try {
      if (signal.aborted) throw new DOMException("cancelled", "AbortError");
      const tile = decode(await this.client.bytes(address, signal));
      const thumbnail = { ...poolTile(tile, size), sampled: tile.sampled, level };
      this.store(key, thumbnail);
      resolve(thumbnail);
    } catch (error) {
      reject(error);
    } finally {
      this.pending.delete(key);
    }
  }

  store(key, thumbnail) {
    this.ready.set(key, thumbnail);
    this.floats += 2 * thumbnail.rows * thumbnail.cols;
    while (this.floats > THUMBNAIL_FLOATS && this.ready.size > 1) {
      const [oldest, { rows, cols }] = this.ready.entries().next().value;
      this.ready.delete(oldest);
      this.floats -= 2 * rows * cols;
    }
  }

  // Cancel all requests, because their page was left.
  cancel() {
    this.control?.abort();
    this.control = null;
    this.pending.clear();
  }
}

// Pool a tile to at most `size` cells along each side: maxima of its maxima, and means of its means. A cell is masked (NaN) if all
// of its cells are.
function poolTile(tile, size) {
  const rows = Math.min(tile.rows, size), cols = Math.min(tile.cols, size);
  if (rows === tile.rows && cols === tile.cols) return { rows, cols, max: tile.max, mean: tile.mean };
  const max = new Float32Array(rows * cols).fill(NaN), mean = new Float32Array(rows * cols), counts = new Uint32Array(rows * cols);
  for (let r = 0; r < tile.rows; r++) {
    const row = Math.floor((r * rows) / tile.rows) * cols;
    for (let c = 0; c < tile.cols; c++) {
      const cell = row + Math.floor((c * cols) / tile.cols), from = r * tile.cols + c;
      counts[cell]++;
      if (tile.max[from] !== tile.max[from]) continue;
      if (!(max[cell] >= tile.max[from])) max[cell] = tile.max[from];
      mean[cell] += tile.mean[from];
    }
  }
  for (let cell = 0; cell < mean.length; cell++) mean[cell] = max[cell] === max[cell] ? mean[cell] / counts[cell] : NaN;
  return { rows, cols, max, mean };
}

// Count the visible cells of a thumbnail by size: those of at most STEPS[n] and more than STEPS[n + 1], for each n.
function countSteps(thumbnail, pooling) {
  const name = `steps ${pooling}`;
  if (!thumbnail[name]) {
    const counts = new Uint32Array(STEPS.length);
    for (const weight of thumbnail[pooling]) {
      if (weight !== weight) continue;
      let n = 0;
      while (n < STEPS.length - 1 && weight <= STEPS[n + 1]) n++;
      counts[n]++;
    }
    thumbnail[name] = counts;
  }
  return thumbnail[name];
}

// Return the end of a scale that thumbnails share: the smallest step that at most 1 % of their cells exceed, and whether any does.
function sharedScale(thumbnails, pooling) {
  const counts = new Uint32Array(STEPS.length); // counts[n]: cells of at most STEPS[n], and of more than STEPS[n + 1]
  for (const thumbnail of thumbnails) countSteps(thumbnail, pooling).forEach((count, n) => (counts[n] += count));
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return { top: 1, isSaturated: false }; // no cells are known yet
  let n = 0, above = 0; // cells of more than STEPS[n]
  while (n < STEPS.length - 1 && above + counts[n] <= total / 100) above += counts[n++];
  return { top: STEPS[n], isSaturated: above > 0 };
}
