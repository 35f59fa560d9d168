// Clients of the API (see api.py). They get its responses over HTTP, from an exported page, or from a notebook's kernel. Each has
// a method `bytes(address, signal)`, which returns a response as an ArrayBuffer.

// An error whose message is meant for the user.
class ViewerError extends Error {}

class HttpClient {
  constructor(base) {
    this.base = base;
  }

  async bytes(address, signal) {
    let response;
    try {
      response = await fetch(this.base + address, { signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ViewerError("The viewer doesn't respond. Is its command still running?");
    }
    if (!response.ok) throw new ViewerError((await response.text()).trim() || `No answer (${response.status}).`);
    return response.arrayBuffer();
  }
}

// Reads an exported page. `responses` has responses in base64 by address; "=" and an address refers to an equal one. Further tiles are in a folder next to the page, each as a
// script that calls `manyheadsLoaded`, because a page that is opened from a disk may load scripts but no data. Rows and columns
// are computed from tiles.
class PageClient {
  constructor(responses, folder) {
    this.responses = responses, this.folder = folder, this.waiting = new Map(), this.loading = new Map();
    globalThis.manyheadsLoaded = (address, data) => this.waiting.get(address)?.(data);
  }

  async bytes(address) {
    const [kind, ...parts] = address.split("/");
    const computed = {
      row: () => this.line(true, ...parts), column: () => this.line(false, ...parts), heads: () => this.heads(...parts), block: () => this.block(...parts),
      profile: () => this.profile(...parts), weight: () => this.weight(...parts), image: () => this.image(...parts),
    }[kind];
    if (computed) {
      const response = await computed();
      return response instanceof ArrayBuffer ? response : new TextEncoder().encode(JSON.stringify(response));
    }
    const data = this.stored(address) ?? (this.folder && kind === "tiles" ? await this.load(address) : undefined);
    if (data === undefined) throw new ViewerError("This page was exported without these weights.");
    return Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)).buffer;
  }

  stored(address) {
    const data = this.responses[address];
    return data?.startsWith("=") ? this.responses[data.slice(1)] : data;
  }

  load(address) {
    if (this.loading.has(address)) return this.loading.get(address); // the same request is under way
    const loaded = new Promise((resolve, reject) => {
      this.waiting.set(address, resolve);
      const script = make("script", { src: `${this.folder}/${address.replaceAll("/", "-")}.js` });
      script.onload = () => script.remove();
      script.onerror = () => reject(new ViewerError(`A tile is missing. Put the folder ${this.folder} beside this page.`));
      document.head.append(script);
    });
    this.loading.set(address, loaded.finally(() => (this.waiting.delete(address), this.loading.delete(address))));
    return this.loading.get(address);
  }

  // The weights of a row (of a query) or a column (of a key), averaged over heads, as in the API's response.
  async line(isRow, run, layer, heads, index, batch) {
    const { runs, side } = await this.info(), { shape, heads: names, finest } = runs[run].layers[layer];
    if (finest) throw new ViewerError(pooledFile(runs[run].layers[layer]));
    const chosen = heads === "all" ? names.map((_, n) => n) : heads.split(","), size = isRow ? shape[3] : shape[2];
    const weights = new Array(size).fill(0), across = Math.floor(index / side);
    for (const head of chosen) {
      for (let n = 0; n * side < size; n++) {
        const tile = await this.tile(run, layer, head, isRow ? n : across, isRow ? across : n, batch);
        for (let m = 0; m < (isRow ? tile.cols : tile.rows); m++) {
          const weight = tile.max[isRow ? (index % side) * tile.cols + m : m * tile.cols + (index % side)];
          if (weight > 0) weights[n * side + m] += weight / chosen.length;
        }
      }
    }
    const top = weights.map((weight, n) => [n, weight]).filter(([, weight]) => weight).sort((a, b) => b[1] - a[1]).slice(0, 12);
    return { first: 0, weights, top };
  }

  // A query's weights on the patches of a picture, as in the API's response.
  async image(run, layer, head, query, batch) {
    const { keys } = await json(this, `patches/${run}/${layer}/${batch}`), { weights } = await this.line(true, run, layer, head, query, batch);
    return keys.map((key) => weights[key]);
  }

  // A single weight, as in the API's response, and whether it is exact: tiles in a folder are rounded.
  async weight(run, layer, head, i, j, batch) {
    const { side } = await this.info(), tile = await this.tile(run, layer, head, Math.floor(j / side), Math.floor(i / side), batch);
    const weight = tile.max[(i % side) * tile.cols + (j % side)];
    return { weight: weight === weight ? weight : null, exact: tile.exact };
  }

  // A block of weights of some heads, as in the API's response.
  async block(run, layer, heads, ...numbers) {
    const { runs, side } = await this.info(), [i0, i1, j0, j1, batch] = numbers.map(Number), { finest } = runs[run].layers[layer];
    if (finest) throw new ViewerError(pooledFile(runs[run].layers[layer]));
    const chosen = heads.split(","), rows = i1 - i0, cols = j1 - j0;
    const buffer = new ArrayBuffer(16 + 4 * chosen.length * rows * cols), weights = new Float32Array(buffer, 16);
    new Uint32Array(buffer, 0, 4).set([1, chosen.length, rows, cols]);
    for (const [n, head] of chosen.entries()) {
      for (let y = Math.floor(i0 / side); y * side < i1; y++) {
        for (let x = Math.floor(j0 / side); x * side < j1; x++) {
          const tile = await this.tile(run, layer, head, x, y, batch);
          for (let i = Math.max(i0, y * side); i < Math.min(i1, (y + 1) * side); i++) {
            for (let j = Math.max(j0, x * side); j < Math.min(j1, (x + 1) * side); j++) {
              weights[(n * rows + i - i0) * cols + j - j0] = tile.max[(i - y * side) * tile.cols + j - x * side];
            }
          }
        }
      }
    }
    return buffer;
  }

  // The weight of every head from a query to a key, as in the API's response.
  async heads(run, number, i, j, batch) {
    const { runs, side } = await this.info(), tokensOf = (layer) => this.stored(`tokens/${run}/${layer}/${batch}`);
    const [x, y] = [j, i].map((n) => Math.floor(n / side)), { shape, finest } = runs[run].layers[number], layers = [];
    if (finest) throw new ViewerError(pooledFile(runs[run].layers[number]));
    for (const [layer, { shape: [, , t, s], heads, has_weights, finest: isPooled }] of runs[run].layers.entries()) {
      const isSame = has_weights && !isPooled && t === shape[2] && s === shape[3] && tokensOf(layer) === tokensOf(number);
      const tiles = isSame ? await Promise.all(heads.map((_, head) => this.tile(run, layer, head, x, y, batch))) : null;
      const weights = tiles?.map((tile) => tile.max[(i % side) * tile.cols + (j % side)]);
      layers.push(weights?.map((weight) => (weight === weight ? weight : null)) ?? null);
    }
    return { layers };
  }

  // A query's weights pooled to a chart, as in the API's response.
  async profile(run, layer, head, query, batch) {
    const { weights, top } = await this.line(true, run, layer, head, query, batch), width = Math.ceil(weights.length / 512);
    const starts = Array.from({ length: Math.ceil(weights.length / width) }, (_, n) => n * width);
    return { width, weights: starts.map((start) => Math.max(...weights.slice(start, start + width))), top, sink_weight: null };
  }

  info() {
    return (this.known ??= json(this, "runs"));
  }

  async tile(run, layer, head, x, y, batch) {
    return decode(await this.bytes(`tiles/${run}/${layer}/${head}/0/${x}/${y}/${batch}`));
  }
}

// Sends requests to a notebook's kernel over the widget's connection. Every view of a widget, in all windows, receives every response,
// so requests and responses carry the name of their view.
class WidgetClient {
  constructor(model) {
    this.model = model, this.view = Math.random().toString(36).slice(2), this.waiting = new Map(), this.next = 0;
    this.listen = (message, buffers) => message.view === this.view && this.receive(message, buffers);
    model.on("msg:custom", this.listen);
  }

  receive({ number, error }, [data]) {
    const { resolve, reject } = this.waiting.get(number) ?? {};
    this.waiting.delete(number);
    if (error) reject?.(new ViewerError(error));
    else resolve?.(data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength));
  }

  send(message) {
    this.model.send({ view: this.view, ...message });
  }

  bytes(address, signal) {
    const number = this.next++;
    return new Promise((resolve, reject) => {
      this.waiting.set(number, { resolve, reject });
      this.send({ number, address });
      signal?.addEventListener("abort", () => {
        if (!this.waiting.delete(number)) return;
        this.send({ number, cancelled: true });
        reject(new DOMException("cancelled", "AbortError"));
      });
    });
  }

  close() {
    this.model.off("msg:custom", this.listen);
    this.send({ closed: true });
  }
}

const json = async (client, address, signal) => JSON.parse(new TextDecoder().decode(await client.bytes(address, signal)));

// Create an element. Children that are strings become text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Why an exported page has no single weights.
const pooledFile = (layer) => {
  const [rows, cols] = cellSize(layer, layer.finest).map(count);
  return `This file has cells of at least ${rows} × ${cols} weights, not single weights. To include them, export with --full.`;
};
