// Clients of the API (see api.py). They get its answers over HTTP, from an exported page, or from a notebook's kernel. Each has
// a method `bytes(address, signal)`, which returns an answer as an ArrayBuffer.

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

// Reads an exported page. `answers` has answers in base64 by address. Further tiles are in a folder next to the page, each as a
// script that calls `manyheadsLoaded`, because a page that is opened from a disk may load scripts but no data. Rows and columns
// are computed from tiles.
class PageClient {
  constructor(answers, folder) {
    this.answers = answers, this.folder = folder, this.waiting = new Map(), this.loading = new Map();
    globalThis.manyheadsLoaded = (address, data) => this.waiting.get(address)?.(data);
  }

  async bytes(address) {
    const [kind, ...parts] = address.split("/");
    if (kind === "row" || kind === "column") return new TextEncoder().encode(JSON.stringify(await this.line(kind === "row", ...parts)));
    const data = this.answers[address] ?? (this.folder && kind === "tiles" ? await this.load(address) : undefined);
    if (data === undefined) throw new ViewerError("This page was exported without these weights.");
    return Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)).buffer;
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

  // The weights of a row (of a query) or a column (of a key), averaged over heads, in the form of the API's answer.
  async line(isRow, run, layer, heads, index, batch) {
    const { runs, side } = await this.info(), { shape, heads: names } = runs[run].layers[layer];
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

  info() {
    return (this.known ??= json(this, "runs"));
  }

  async tile(run, layer, head, x, y, batch) {
    return decode(await this.bytes(`tiles/${run}/${layer}/${head}/0/${x}/${y}/${batch}`));
  }
}

// Sends requests to a notebook's kernel over the widget's channel. Every view of a widget, in all windows, receives every answer,
// so requests and answers carry the name of their view.
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
