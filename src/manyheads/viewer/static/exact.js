// The exact weights of a head, in float32. Tiles have weights in float16, whose digits would be rounded a second time when they are
// written.

const BLOCK = 64; // queries and keys of a block, which is loaded at a time
const BLOCKS = 100; // in the cache

class ExactWeights {
  // head: {run, layer, head, batch}. size: the numbers of queries and keys. changed: called when a block is loaded.
  constructor(client, { run, layer, head, batch }, size, changed, failed) {
    Object.assign(this, { client, place: `${run}/${layer}/${head}`, batch, size, changed, failed });
    this.blocks = new Map(); // weights by the first query and key; null while they are loading
    this.control = new AbortController();
  }

  // Return a weight, NaN if it is masked, undefined until it is loaded.
  get([i, j]) {
    const [i0, j0] = [i - (i % BLOCK), j - (j % BLOCK)];
    return this.blocks.get(`${i0},${j0}`)?.[(i - i0) * (Math.min(this.size[1], j0 + BLOCK) - j0) + j - j0];
  }

  // Load the weights of ranges of queries and keys.
  request(queries, keys) {
    for (let i = queries[0] - (queries[0] % BLOCK); i < queries[1]; i += BLOCK) {
      for (let j = keys[0] - (keys[0] % BLOCK); j < keys[1]; j += BLOCK) if (!this.blocks.has(`${i},${j}`)) this.load(i, j);
    }
  }

  async load(i, j) {
    const name = `${i},${j}`, [i1, j1] = [Math.min(this.size[0], i + BLOCK), Math.min(this.size[1], j + BLOCK)];
    this.blocks.set(name, null);
    try {
      const bytes = await this.client.bytes(`block/${this.place}/${i}/${i1}/${j}/${j1}/${this.batch}`, this.control.signal);
      this.blocks.set(name, new Float32Array(bytes, 16));
      while (this.blocks.size > BLOCKS) this.blocks.delete(this.blocks.keys().next().value);
      this.changed();
    } catch (error) {
      this.failed(error);
    }
  }

  close() {
    this.control.abort();
  }
}
