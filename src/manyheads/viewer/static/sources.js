// Where answers come from: a server, or the page itself. Their addresses are the same: see api.py.

class Problem extends Error {}

// A server's, below an address of its own.
class Served {
  constructor(base) {
    this.base = base;
  }

  async bytes(address, signal) {
    let response;
    try {
      response = await fetch(this.base + address, { signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("the viewer doesn't answer any more: is its command still running?");
    }
    if (!response.ok) throw new Problem((await response.text()).trim() || `no answer (${response.status})`);
    return response.arrayBuffer();
  }
}

// Those that a page was written with, as base64 by address; what isn't among them lies in a folder beside it, each in a
// script that hands itself in, as a page from a disk may load nothing else. Rows and columns are put together from tiles.
class Written {
  constructor(answers, folder) {
    this.answers = answers, this.folder = folder, this.waiting = new Map(), this.loads = new Map();
    globalThis.manyheadsTake = (address, found) => this.waiting.get(address)?.(found);
  }

  async bytes(address) {
    const [word, ...parts] = address.split("/");
    if (word === "row" || word === "column") return new TextEncoder().encode(JSON.stringify(await this.line(word === "row", ...parts)));
    const found = this.answers[address] ?? (this.folder && word === "tiles" ? await this.load(address) : undefined);
    if (found === undefined) throw new Problem("this page was exported without that.");
    return Uint8Array.from(atob(found), (letter) => letter.charCodeAt(0)).buffer;
  }

  load(address) {
    if (this.loads.has(address)) return this.loads.get(address);  // two may want the same at once
    const loaded = new Promise((take, fail) => {
      this.waiting.set(address, take);
      const script = make("script", { src: `${this.folder}/${address.replaceAll("/", "-")}.js` });
      script.onload = () => script.remove();
      script.onerror = () => fail(new Problem(`a tile is missing: ${this.folder} must lie beside this page.`));
      document.head.append(script);
    });
    this.loads.set(address, loaded.finally(() => (this.waiting.delete(address), this.loads.delete(address))));
    return this.loads.get(address);
  }

  async line(row, run, layer, heads, place, batch) {
    const { runs, side } = await this.info(), { shape, heads: names } = runs[run].layers[layer];
    const chosen = heads === "all" ? names.map((_, n) => n) : heads.split(","), size = row ? shape[3] : shape[2];
    const weights = new Array(size).fill(0), own = Math.floor(place / side);
    for (const head of chosen) {
      for (let n = 0; n * side < size; n++) {
        const grid = await this.tile(run, layer, head, row ? n : own, row ? own : n, batch);
        for (let m = 0; m < (row ? grid.cols : grid.rows); m++) {
          const weight = grid.max[row ? (place % side) * grid.cols + m : m * grid.cols + (place % side)];
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

// A kernel's, over the channel that a notebook has to it. All views of a widget, in whatever window, hear every answer: each
// has a name of its own.
class Channel {
  constructor(model) {
    this.model = model, this.view = Math.random().toString(36).slice(2), this.waiting = new Map(), this.next = 0;
    this.listen = (message, buffers) => message.view === this.view && this.take(message, buffers);
    model.on("msg:custom", this.listen);
  }

  take({ number, error }, [found]) {
    const { take, fail } = this.waiting.get(number) ?? {};
    this.waiting.delete(number);
    if (error) fail?.(new Problem(error));
    else take?.(found.buffer.slice(found.byteOffset, found.byteOffset + found.byteLength));
  }

  send(message) {
    this.model.send({ view: this.view, ...message });
  }

  bytes(address, signal) {
    const number = this.next++;
    return new Promise((take, fail) => {
      this.waiting.set(number, { take, fail });
      this.send({ number, address });
      signal?.addEventListener("abort", () => {
        if (!this.waiting.delete(number)) return;
        this.send({ number, dropped: true });
        fail(new DOMException("not wanted", "AbortError"));
      });
    });
  }

  // Nobody looks any more.
  close() {
    this.model.off("msg:custom", this.listen);
    this.send({ left: true });
  }
}

const json = async (source, address, signal) => JSON.parse(new TextDecoder().decode(await source.bytes(address, signal)));

// An element; what is in it is text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
