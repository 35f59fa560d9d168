// The picture beside the matrix of a head: what the query under the crosshair attends to in it. A patch under the pointer is the query.

const TALLEST = 300; // pixels: the height of the picture
const OPACITY = 0.68; // of the weights over the picture

class PicturePanel {
  // side: the element that has the panels.
  constructor(app, page, side) {
    Object.assign(this, { app, page, patches: null, image: null, weights: null });
    this.title = make("h3", {});
    this.canvas = make("canvas", { class: "picture", role: "img" });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.app.hover(null));
    this.canvas.addEventListener("click", (event) => this.pin(event));
    this.note = make("p", { class: "muted" });
    this.element = make("aside", { class: "picture-panel", "aria-label": "what the query attends to in the picture" }, this.title, this.canvas, this.note);
    side.prepend(this.element);
  }

  // Show the picture of a head of a pane, or draw it again if it is shown.
  async open(pane, place) {
    if (this.pane === pane && JSON.stringify(this.place) === JSON.stringify(place)) return this.draw(), this.update();
    this.close();
    Object.assign(this, { pane, place, patches: null, image: null, weights: null, query: null, address: undefined });
    const { run, layer, batch } = place;
    try {
      const patches = await this.app.load(`patches/${run}/${layer}/${batch}`);
      if (this.place !== place) return;
      this.element.hidden = !patches;
      if (!patches) return;
      const image = patches.src ? new Image() : null;
      if (image) {
        image.src = patches.src;
        await image.decode();
      }
      if (this.place !== place) return;
      const places = new Map(patches.keys.map((key, n) => [key, n])); // the number of the patch of each key
      Object.assign(this, { patches, image, places });
      this.update();
    } catch (error) {
      if (this.place === place && error.name !== "AbortError") this.app.showError(error);
    }
  }

  remove() {
    this.close();
    this.place = null;
    this.element.remove();
  }

  close() {
    clearTimeout(this.timer);
    this.control?.abort();
  }

  // The crosshair moved: request the weights of its query.
  update() {
    if (!this.patches) return;
    const { run, layer, head, batch } = this.place, { cell } = this.pane;
    const isPooled = this.app.layer(this.place).finest; // an exported page without single weights, which never requests any
    const address = cell && !isPooled ? `image/${run}/${layer}/${head}/${cell[0]}/${batch}` : null;
    if (address === this.address && !isPooled) return;
    this.close();
    Object.assign(this, { address, weights: cell ? this.weights : null, query: cell?.[0] ?? null });
    this.draw();
    if (!address) return;
    const { signal } = (this.control = new AbortController());
    this.timer = setTimeout(() => this.load(address, signal), PAUSE / 2);
  }

  async load(address, signal) {
    try {
      const weights = await json(this.app.client, address, signal);
      if (signal.aborted || address !== this.address) return;
      this.weights = weights, this.loaded = this.query;
      this.draw();
    } catch (error) {
      if (!signal.aborted && error.name !== "AbortError") this.app.showError(error);
    }
  }

  // -- drawing ------------------------------------------------------------------------------------

  // Draw the picture, in grey below the weights, and mark the patch of the query.
  draw() {
    if (!this.patches || !this.element.clientWidth) return;
    const { grid: [rows, cols] } = this.patches, ratio = window.devicePixelRatio || 1, aspect = this.image ? this.image.height / this.image.width : rows / cols;
    const width = Math.min(this.element.clientWidth - 32, TALLEST / aspect), height = width * aspect, { canvas } = this;
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    canvas.width = width * ratio, canvas.height = height * ratio;
    const context = canvas.getContext("2d"), theme = this.app.theme(), isLoaded = this.weights && this.loaded === this.query;
    context.scale(ratio, ratio);
    context.fillStyle = theme.line;
    context.fillRect(0, 0, width, height);
    if (this.image) {
      context.filter = isLoaded ? "grayscale(1)" : "none";
      context.drawImage(this.image, 0, 0, width, height);
      context.filter = "none";
    }
    const top = isLoaded ? roundUp(Math.max(...this.weights)) : 1;
    if (isLoaded) {
      const tile = { rows, cols, max: this.weights };
      context.imageSmoothingEnabled = false;
      context.globalAlpha = this.image ? OPACITY : 1;
      context.drawImage(this.pane.colors.paint(tile, "max", top, this.app.state.scale), 0, 0, width, height);
      context.globalAlpha = 1;
    }
    this.mark(context, [width / cols, height / rows]);
    this.write(isLoaded ? top : null);
  }

  mark(context, [wide, high]) {
    const n = this.patchOf(this.query);
    if (n === undefined) return;
    const { grid: [, cols] } = this.patches, x = wide * (n % cols), y = high * Math.floor(n / cols);
    for (const [style, line] of [["#000", 3], ["#fff", 1.4]]) {
      context.strokeStyle = style;
      context.lineWidth = line;
      context.beginPath();
      if (Math.min(wide, high) > 9) context.rect(x, y, wide, high);
      else context.arc(x + wide / 2, y + high / 2, 6, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  // The number of the patch that a query is, undefined if it isn't a patch.
  patchOf(query) {
    const { first } = this.patches;
    return query === null || first === null ? undefined : this.places.get(query + first);
  }

  // The name of a query: its patch, or the class token.
  nameOf(query) {
    const { grid: [, cols], first, special } = this.patches, n = this.patchOf(query);
    if (n !== undefined) return `patch ${Math.floor(n / cols)}, ${n % cols}`;
    return (first !== null && special[query + first]) || `query ${this.pane.nameQuery(query)}`;
  }

  // top: the largest weight on the scale, null until the weights are loaded.
  write(top) {
    const { grid: [rows, cols] } = this.patches, { query, weights } = this, isLoaded = top !== null;
    this.title.textContent = query === null ? "Picture" : `What ${this.nameOf(query)} attends to`;
    const sum = isLoaded ? weights.reduce((total, weight) => total + weight, 0) : 0, parts = [`${rows} × ${cols} patches`];
    if (isLoaded) parts.push(`colours to ${format(top, 2)}`, `${format(sum, 3)} of the weight is on patches`);
    else if (this.app.layer(this.place).finest) parts.push(pooledFile(this.app.layer(this.place)));
    else if (query === null) parts.push("hover over a patch or a query");
    this.note.textContent = parts.join(" · ");
    this.canvas.setAttribute("aria-label", `${this.title.textContent}: ${this.note.textContent}`);
    const largest = isLoaded ? weights.indexOf(Math.max(...weights)) : "";
    Object.assign(this.canvas.dataset, { query: isLoaded ? query : "", largest, sum });
  }

  // -- pointer ------------------------------------------------------------------------------------

  // The cell of the patch under the pointer, as a query and as a key; null if the patch is no query.
  cellAt({ offsetX, offsetY }) {
    if (!this.patches || this.patches.first === null) return null;
    const { grid: [rows, cols], keys, first } = this.patches, within = (n, size) => Math.max(0, Math.min(size - 1, Math.floor(n)));
    const row = within((offsetY / this.canvas.clientHeight) * rows, rows), col = within((offsetX / this.canvas.clientWidth) * cols, cols);
    const key = keys[row * cols + col], query = key - first;
    return query >= 0 && query < this.pane.geometry.t ? [query, key] : null;
  }

  hover(event) {
    this.app.hover(this.cellAt(event));
  }

  pin(event) {
    const cell = this.cellAt(event);
    if (cell) this.page.moveTo(cell);
  }
}
