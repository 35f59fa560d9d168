// The viewer's app: state (also stored in the URL, so that a link restores it), buttons, keyboard shortcuts, themes, images.

// The initial state. The URL omits values that are equal to these.
const DEFAULTS = {
  page: "overview", run: 0, layer: 0, head: 0, batch: 0, pooling: "max", scale: "linear", theme: null, view: null, pin: null,
  second: null, heads: "all", token: null, sort: "", score: "", minimum: 0,
};
const PAGES = { overview: "Overview", head: "Head", text: "Text" };
const CHOICES = { page: Object.keys(PAGES), pooling: ["max", "mean"], scale: ["linear", "log"] }; // the first is the default
const THEMES = {
  light: { background: "#ffffff", loading: "#f3f5f7", text: "#1b1f24", muted: "#5b6570", line: "#c9d1d9", outline: "#00000088", accent: "#b3261e", bars: "#4a6fa5", hatch: ["#eef0f2", "#d5dade"] },
  dark: { background: "#14171a", loading: "#1b1f23", text: "#e8eaed", muted: "#9aa4af", line: "#3a4149", outline: "#ffffff88", accent: "#ff9e80", bars: "#8ab4f8", hatch: ["#24282d", "#343a41"] },
};
const KEYS = [
  ["arrows", "move"], ["shift + arrows", "move the crosshair by one weight"], ["+  −", "zoom"], ["0", "fit the matrix"],
  ["1", "single weights"], ["[  ]", "previous, next head"], ["{  }", "previous, next layer"], ["m", "mean or maximum"],
  ["l", "linear or logarithmic"], ["c", "compare with another head"], ["o  h  x", "overview, head, text"],
  ["p", "save as PNG"], ["k", "copy the link"], ["t", "light or dark theme"], ["esc", "unpin the crosshair"], ["?", "show these keys"],
];

class App {
  // root: the element to fill. client: see clients.js. linked: store the state in the URL.
  constructor(root, client, linked) {
    Object.assign(this, { root, client, linked, panes: [], labels: new Map(), hovered: null, hatches: {} });
    this.state = { ...DEFAULTS, ...(linked ? this.fromHash() : {}) };
    this.abortController = new AbortController();
  }

  async start() {
    this.root.classList.add("manyheads");
    this.root.dataset.theme = this.themeName();
    this.root.replaceChildren(make("p", { class: "muted opening" }, "Loading …"));
    const info = await json(this.client, "runs"), { signal } = this.abortController;
    if (signal.aborted) return;
    this.info = info, this.colors = new ColorScale(info.colors);
    this.build();
    if (this.linked) {
      this.state = { ...DEFAULTS, ...this.fromHash() }; // it may have changed while loading
      window.addEventListener("hashchange", () => {
        if (location.hash.slice(1) !== this.toHash()) this.state = { ...DEFAULTS, ...this.fromHash() }, this.show();
      }, { signal });
    } else {
      this.root.tabIndex = -1; // so that a click anywhere in the viewer gives it the keyboard focus
    }
    (this.linked ? document : this.root).addEventListener("keydown", (event) => this.pressKey(event), { signal });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(), { signal });
    this.show();
  }

  remove() {
    this.abortController.abort();
    this.shown?.remove(), this.panes.forEach((pane) => pane.remove());
    this.shown = null, this.panes = [];
    clearTimeout(this.saving), clearTimeout(this.hiding);
    this.root.replaceChildren();
  }

  // -- state ------------------------------------------------------------------------------------

  fromHash() {
    const params = new URLSearchParams(location.hash.slice(1)), state = {};
    for (const name of ["page", "pooling", "scale", "theme", "heads", "sort", "score"]) if (params.has(name)) state[name] = params.get(name);
    for (const name of ["run", "layer", "head", "batch", "token", "minimum"]) if (params.has(name)) state[name] = Number(params.get(name)) || 0;
    const numbers = (name, size) => {
      const parts = params.get(name)?.split(",").map(Number);
      return parts?.length === size && parts.every(Number.isFinite) ? parts : null;
    };
    const view = numbers("view", 3), pin = numbers("pin", 2), second = numbers("second", 3);
    if (view && view[2] > 0) state.view = { x: view[0], y: view[1], k: view[2] };
    if (pin && Math.min(...pin) >= 0) state.pin = pin.map(Math.floor);
    if (second) state.second = { run: second[0], layer: second[1], head: second[2] };
    return state;
  }

  toHash() {
    const params = new URLSearchParams(), { view, pin, second } = this.state;
    for (const [name, value] of Object.entries(this.state)) {
      if (value === null || typeof value === "object" || value === DEFAULTS[name]) continue;
      params.set(name, value);
    }
    if (view) params.set("view", [view.x.toFixed(6), view.y.toFixed(6), view.k.toPrecision(12)].join(","));
    if (pin) params.set("pin", pin.join(","));
    if (second) params.set("second", [second.run, second.layer, second.head].join(","));
    return params.toString().replaceAll("%2C", ",");
  }

  saveState() {
    if (this.linked) history.replaceState(null, "", `#${this.toHash()}`);
  }

  // Replace invalid values, which the URL may contain if it was edited by hand.
  sanitizeState() {
    const { runs } = this.info, clampIndex = (n, size) => Math.max(0, Math.min(Math.floor(n) || 0, size - 1));
    const clampPlace = (place) => {
      place.run = clampIndex(place.run, runs.length);
      place.layer = clampIndex(place.layer, runs[place.run].layers.length);
      place.head = clampIndex(place.head, runs[place.run].layers[place.layer].heads.length);
    };
    const { state } = this;
    for (const [name, values] of Object.entries(CHOICES)) if (!values.includes(state[name])) state[name] = values[0];
    if (!Object.hasOwn(THEMES, state.theme)) state.theme = null;
    for (const name of ["sort", "score"]) if (!Object.hasOwn(this.info.scores, state[name])) state[name] = "";
    if (!Number.isFinite(state.minimum)) state.minimum = 0;
    clampPlace(state);
    if (state.second) clampPlace((state.second = { ...state.second }));
    const [, h, , s] = this.layer(state).shape;
    state.batch = clampIndex(state.batch, Math.max(...runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0]))));
    if (state.token !== null) state.token = clampIndex(state.token, s);
    if (state.heads !== "all" && !state.heads.split(",").every((head) => /^\d{1,5}$/.test(head) && Number(head) < h)) state.heads = "all";
  }

  // Change the state. A change of page or head adds an entry to the browser's history.
  change(changes) {
    const isNavigation = ["page", "run", "layer", "head", "second"].some((name) => name in changes);
    if (this.linked && isNavigation) history.pushState(null, "", location.href);
    Object.assign(this.state, changes);
    if (this.banner.classList.contains("bad")) this.banner.hidden = true;
    this.show();
  }

  // The index of the sequence to show for a layer: the selected one, or the last if the layer has fewer sequences.
  batchOf(place) {
    return Math.min(this.state.batch, this.layer(place).shape[0] - 1);
  }

  layer({ run, layer }) {
    return this.info.runs[run].layers[layer];
  }

  layerName({ run, layer }) {
    const title = this.info.runs.length > 1 ? `${this.info.runs[run].title}, ` : "";
    const { number, name } = this.layer({ run, layer });
    return `${title}layer ${number}: ${name}`;
  }

  name(place) {
    return `${this.layerName(place)}, head ${this.layer(place).heads[place.head]}`;
  }

  short(place) {
    return `layer ${this.layer(place).number} · head ${this.layer(place).heads[place.head]}`;
  }

  tokens({ run, layer, batch }) {
    const address = `tokens/${run}/${layer}/${batch}`;
    if (!this.labels.has(address)) this.labels.set(address, json(this.client, address));
    return this.labels.get(address).catch((error) => (this.showError(error), { queries: null, keys: null, first: null }));
  }

  // -- the page ---------------------------------------------------------------------------------

  build() {
    const button = (id, text, title, onclick) => make("button", { type: "button", id, title, onclick }, text);
    const pages = Object.entries(PAGES).map(([page, text]) => button(`page-${page}`, text, "", () => this.change({ page })));
    this.choices = make("span", { class: "choices" });
    this.options = make("span", { class: "options" },
      button("pooling", "", "mean or maximum of pooled cells (m)", () => this.toggle("pooling")),
      button("scale", "", "linear or logarithmic colours (l)", () => this.toggle("scale")),
      button("compare", "compare", "compare with another head; both zoom together (c)", () => this.compare()),
      button("fit", "fit", "fit the matrix (0)", () => this.fit()),
      button("png", "PNG", "save as PNG (p)", () => this.savePng()));
    this.banner = make("div", { class: "banner", role: "alert", hidden: true });
    this.keys = make("dialog", { class: "keys" }, make("h2", {}, "Keys"),
      make("dl", {}, ...KEYS.filter(([key]) => this.linked || key !== "k").flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)])),
      make("form", { method: "dialog" }, make("button", {}, "close")));
    this.body = make("div", { class: "body" });
    this.root.replaceChildren(
      make("header", {}, make("nav", {}, ...pages), this.choices, this.options,
        make("span", { class: "tail" },
          this.linked ? button("link", "link", "copy a link to this view (k)", () => this.copyLink()) : "",
          button("theme", "theme", "light or dark theme (t)", () => this.toggleTheme()),
          button("help", "?", "keys (?)", () => this.keys.showModal()))),
      this.banner, this.body, this.keys);
  }

  show() {
    // In a notebook, keep the keyboard focus in the viewer when the focused element is replaced.
    const refocus = !this.linked && this.root.matches(":focus-within") && (() => this.root.matches(":focus-within") || this.root.focus({ preventScroll: true }));
    if (refocus) requestAnimationFrame(refocus);
    this.sanitizeState();
    const { state } = this;
    this.root.dataset.theme = this.themeName();
    for (const page of CHOICES.page) this.root.querySelector(`#page-${page}`).setAttribute("aria-pressed", state.page === page);
    this.root.querySelector("#pooling").textContent = state.pooling === "max" ? "maximum" : "mean";
    this.root.querySelector("#scale").textContent = state.scale === "log" ? "logarithmic" : "linear";
    this.root.querySelector("#compare").setAttribute("aria-pressed", !!state.second);
    this.options.className = `options for-${state.page}`;
    if (this.linked) document.title = `${state.page === "overview" ? this.info.runs[0].title : this.name(state)} · manyheads`;
    this.buildChoices();
    this.saveState();
    if (this.page !== state.page) this.shown?.remove(), this.panes.forEach((pane) => pane.remove()), (this.panes = []), (this.shown = null), this.body.replaceChildren();
    this.page = state.page;
    if (state.page === "head") return this.showHeads();
    const key = state.page === "overview" ? `${state.pooling} ${state.scale} ${state.batch}` : "text";
    if (state.page === "overview" && this.shown?.key === key) return this.shown.arrange();
    if (!this.shown || state.page === "overview") {
      this.shown?.remove();
      this.shown = state.page === "overview" ? new Overview(this.body, this) : new TextPage(this.body, this);
      this.shown.key = key;
    }
    this.shown.open();
  }

  showHeads() {
    const { state } = this, places = [state, ...(state.second ? [state.second] : [])];
    while (this.panes.length > places.length) this.panes.pop().remove();
    for (const [n, { run, layer, head }] of places.entries()) {
      const place = { run, layer, head, batch: this.batchOf({ run, layer }) }, pane = (this.panes[n] ??= new HeadPane(this.body, this));
      if (JSON.stringify(pane.place) !== JSON.stringify(place)) pane.open(place);
      else if (state.view && !same(state.view, pane.view)) pane.setView(state.view);
      pane.update();
    }
    this.body.classList.toggle("two", places.length > 1);
  }

  // Build the <select> elements for run, layer, head and sequence.
  buildChoices() {
    const { state, info } = this, parts = [];
    const select = (label, options, value, choose) => {
      if (options.length < 2) return "";
      const box = make("select", { "aria-label": label, title: label, class: `choose-${label.replaceAll(" ", "-")}`, onchange: () => choose(Number(box.value)) },
        ...options.map((text, n) => make("option", { value: n }, text)));
      box.value = value;
      return box;
    };
    if (state.page !== "overview") {
      const group = (place, change, suffix) => make("span", { class: "place" },
        select(`run${suffix}`, info.runs.map(({ title }) => title), place.run, (run) => change({ run, layer: 0, head: 0 })),
        select(`layer${suffix}`, info.runs[place.run].layers.map(({ number, name }) => `${number}: ${name}`), place.layer, (layer) => change({ layer })),
        state.page === "head" ? select(`head${suffix}`, this.layer(place).heads.map((name) => `head ${name}`), place.head, (head) => change({ head })) : "");
      parts.push(group(state, (changes) => this.change({ ...changes, ...this.resetView(changes) }), ""));
      if (state.page === "head" && state.second) parts.push(group(state.second, (changes) => this.change({ second: { ...state.second, ...changes } }), " beside"));
    }
    const maxBatch = Math.max(...info.runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0])));
    const labels = Array.from({ length: maxBatch }, (_, n) => `sequence ${n}`);
    parts.push(select("sequence", labels, state.batch, (batch) => this.change({ batch })));
    this.choices.replaceChildren(...parts);
  }

  // Return the changes that reset view and pin, or none if the new layer has the same shape.
  resetView(changes) {
    const before = this.layer(this.state).shape, run = changes.run ?? this.state.run, layer = changes.layer ?? this.state.layer;
    const after = this.info.runs[run].layers[layer].shape;
    return before[2] === after[2] && before[3] === after[3] ? {} : { view: null, pin: null };
  }

  // -- state shared by panes --------------------------------------------------------------------

  // The cell of the crosshair: the one under the pointer, else the pinned one.
  cell() {
    return this.hovered ?? this.state.pin;
  }

  hover(cell) {
    if (String(cell) === String(this.hovered)) return;
    this.hovered = cell;
    for (const pane of this.panes) pane.update();
  }

  pin(cell) {
    this.state.pin = cell && String(cell) === String(this.state.pin) ? null : cell;
    this.saveState();
    for (const pane of this.panes) pane.update();
  }

  viewChanged(from, view = from.view) {
    this.state.view = { ...view };
    for (const pane of this.panes) if (pane !== from && pane.tiles) pane.setView(view);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.saveState(), 150);
  }

  fit() {
    this.state.view = null;
    this.saveState();
    for (const pane of this.panes) pane.setView(pane.fit, true);
  }

  compare() {
    const { run, layer, head } = this.state, { length } = this.layer(this.state).heads;
    const other = this.info.runs.length > 1 ? { run: (run + 1) % this.info.runs.length, layer, head } : { run, layer, head: (head + 1) % length };
    this.change({ page: "head", second: this.state.second ? null : other });
  }

  // -- theme ------------------------------------------------------------------------------------

  themeName() {
    return this.state.theme ?? this.notebookTheme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  // Adopt the notebook's theme: dark if its text colour, such as "rgb(230, 230, 230)", is light.
  adaptTo(color) {
    const parts = String(color).match(/[\d.]+/g)?.slice(0, 3).map(Number);
    const theme = parts?.length === 3 ? (parts[0] + parts[1] + parts[2] > 383 ? "dark" : "light") : this.notebookTheme;
    if (theme === this.notebookTheme) return;
    this.notebookTheme = theme, this.root.dataset.theme = this.themeName();
    if (this.info) this.show();
  }

  theme() {
    return THEMES[this.themeName()];
  }

  toggleTheme() {
    this.change({ theme: this.themeName() === "dark" ? "light" : "dark" });
  }

  toggle(name) {
    this.change({ [name]: CHOICES[name].find((value) => value !== this.state[name]) });
  }

  // The pattern that fills masked cells.
  hatch(context) {
    const name = this.themeName();
    if (!this.hatches[name]) {
      const tile = document.createElement("canvas"), [background, line] = THEMES[name].hatch;
      tile.width = tile.height = 8;
      const pattern = tile.getContext("2d");
      pattern.fillStyle = background, pattern.fillRect(0, 0, 8, 8);
      pattern.strokeStyle = line, pattern.lineWidth = 1.5;
      pattern.beginPath();
      for (const shift of [-8, 0, 8]) pattern.moveTo(shift, 8), pattern.lineTo(shift + 8, 0);
      pattern.stroke();
      this.hatches[name] = context.createPattern(tile, "repeat");
    }
    return this.hatches[name];
  }

  // -- images, links and messages ---------------------------------------------------------------

  savePng() {
    if (!this.panes.length) return;
    const images = this.panes.map((pane) => pane.toImage()), canvas = document.createElement("canvas");
    canvas.width = images.reduce((sum, { width }) => sum + width, 0), canvas.height = Math.max(...images.map(({ height }) => height));
    const context = canvas.getContext("2d");
    let x = 0;
    for (const image of images) context.drawImage(image, x, 0), (x += image.width);
    canvas.toBlob((blob) => {
      const url = URL.createObjectURL(blob), name = this.short(this.state).replaceAll(/[^a-z0-9]+/g, "-");
      make("a", { href: url, download: `${name}.png` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    });
  }

  async copyLink() {
    this.saveState();
    try {
      await navigator.clipboard.writeText(location.href);
      this.showMessage("Link copied. It restores this view in this browser.");
    } catch {
      this.showMessage(location.href);
    }
  }

  showMessage(text) {
    this.banner.textContent = text, this.banner.hidden = false, this.banner.classList.remove("bad");
    clearTimeout(this.hiding);
    this.hiding = setTimeout(() => (this.banner.hidden = true), 4000);
  }

  showError(error) {
    if (!(error instanceof ViewerError)) console.error(error);
    clearTimeout(this.hiding);
    this.banner.textContent = error.message, this.banner.hidden = false, this.banner.classList.add("bad");
  }

  // -- keys -------------------------------------------------------------------------------------

  pressKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.linked) event.stopPropagation(); // otherwise the notebook would handle the key too
    if (this.keys.open) return;
    if (event.target.closest?.("input, select, textarea") && event.key !== "Escape") return;
    const { state } = this, pane = this.panes[0], { heads } = this.layer(state), { layers } = this.info.runs[state.run];
    const cycle = (n, by, size) => (n + by + size) % size;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const action = {
      "+": () => pane && this.zoomBy(2), "=": () => pane && this.zoomBy(2), "-": () => pane && this.zoomBy(0.5),
      "0": () => pane && this.fit(), "1": () => pane && this.zoomBy(48 / Math.min(pane.at.k, pane.at.v)),
      "[": () => this.change({ head: cycle(state.head, -1, heads.length) }),
      "]": () => this.change({ head: cycle(state.head, 1, heads.length) }),
      "{": () => this.changeLayer(cycle(state.layer, -1, layers.length)),
      "}": () => this.changeLayer(cycle(state.layer, 1, layers.length)),
      m: () => this.toggle("pooling"), l: () => this.toggle("scale"), c: () => this.compare(),
      o: () => this.change({ page: "overview" }), h: () => this.change({ page: "head" }), x: () => this.change({ page: "text" }),
      p: () => this.savePng(), k: () => this.linked && this.copyLink(), t: () => this.toggleTheme(), "?": () => this.keys.showModal(),
      Escape: () => (state.page === "text" ? this.change({ token: null }) : this.pin(null)),
    }[event.key];
    if (arrows && pane) {
      event.preventDefault();
      if (event.shiftKey) this.moveCrosshair(pane, arrows);
      else pane.setView({ x: pane.view.x + (arrows[0] * 80) / pane.at.k, y: pane.view.y + (arrows[1] * 80) / pane.at.v, k: pane.at.k }), this.viewChanged(pane);
    } else if (action) {
      event.preventDefault();
      action();
    }
  }

  changeLayer(layer) {
    this.change({ layer, ...this.resetView({ layer }) });
  }

  // Zoom in or out around the pinned crosshair, or around the middle if none is pinned.
  zoomBy(factor) {
    const pane = this.panes[0], cell = this.state.pin, { x, y, k } = pane.view, [min, max] = pane.zoom.scaleExtent();
    const newK = Math.max(min, Math.min(max, k * factor));
    pane.setView(cell ? { x: cell[1] + 0.5, y: cell[0] + 0.5, k: newK } : { x, y, k: newK });
    this.viewChanged(pane);
  }

  // Move the crosshair by one weight, and the view if the crosshair would leave it.
  moveCrosshair(pane, [dx, dy]) {
    const [i, j] = this.state.pin ?? [Math.floor(pane.view.y), Math.floor(pane.view.x)];
    this.hovered = null;
    this.state.pin = [Math.max(0, Math.min(pane.t - 1, i + dy)), Math.max(0, Math.min(pane.s - 1, j + dx))];
    this.saveState();
    const [y, x] = this.state.pin, { k, v } = pane.at;
    if (Math.abs(x - pane.view.x) > pane.wide / k / 2 - 1 || Math.abs(y - pane.view.y) > pane.high / v / 2 - 1) pane.setView({ x, y, k: pane.at.k }), this.viewChanged(pane);
    for (const other of this.panes) other.update();
  }
}

const same = (a, b) => b && Math.abs(a.x - b.x) < 1e-4 && Math.abs(a.y - b.y) < 1e-4 && Math.abs(a.k / b.k - 1) < 1e-6;

// Start the viewer in an element. linked: store the state in the URL.
function show(root, client, linked = true) {
  const app = new App(root, client, linked);
  app.start().catch((error) => {
    root.replaceChildren(make("p", { class: "opening", role: "alert" }, error.message));
    if (!(error instanceof ViewerError)) console.error(error);
  });
  return app;
}
