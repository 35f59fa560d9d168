// What is shown, kept in the address of the page so that a link restores it; buttons, keys, themes and pictures.

const START = {
  page: "overview", run: 0, layer: 0, head: 0, batch: 0, how: "max", scale: "linear", theme: null, view: null, pin: null,
  second: null, heads: "all", token: null, sort: "", measure: "", least: 0,
};
const THEMES = {
  light: { ground: "#ffffff", unknown: "#f3f5f7", ink: "#1b1f24", quiet: "#5b6570", line: "#c9d1d9", outline: "#00000088", accent: "#b3261e", bars: "#4a6fa5", hatch: ["#eef0f2", "#d5dade"] },
  dark: { ground: "#14171a", unknown: "#1b1f23", ink: "#e8eaed", quiet: "#9aa4af", line: "#3a4149", outline: "#ffffff88", accent: "#ff9e80", bars: "#8ab4f8", hatch: ["#24282d", "#343a41"] },
};
const KEYS = [
  ["arrows", "move"], ["shift + arrows", "move the crosshair by one weight"], ["+  −", "zoom"], ["0", "all of it"],
  ["1", "single weights"], ["[  ]", "the head before, the next"], ["{  }", "the layer before, the next"], ["m", "mean or maximum"],
  ["l", "linear or logarithmic"], ["c", "compare with another head"], ["o  h  x", "overview, head, text"],
  ["p", "PNG"], ["k", "copy the link"], ["t", "light or dark"], ["esc", "let the crosshair go"], ["?", "these keys"],
];

class App {
  // linked: is the state kept in the address of the page?
  constructor(root, source, linked) {
    Object.assign(this, { root, source, linked, panes: [], labels: new Map(), hovered: null, hatches: {} });
    this.state = { ...START, ...(linked ? this.read() : {}) };
    this.gone = new AbortController();
  }

  async start() {
    this.root.classList.add("manyheads");
    this.root.dataset.theme = this.themeName();
    this.root.replaceChildren(make("p", { class: "quiet opening" }, "opening …"));
    const info = await json(this.source, "runs"), { signal } = this.gone;
    if (signal.aborted) return;
    this.info = info, this.colours = new Colours(info.ramp);
    this.frame();
    if (this.linked) {
      this.state = { ...START, ...this.read() }; // it may have changed meanwhile
      window.addEventListener("hashchange", () => {
        if (location.hash.slice(1) !== this.written()) this.state = { ...START, ...this.read() }, this.show();
      }, { signal });
    } else {
      this.root.tabIndex = -1; // what is clicked anywhere in it, keys are for
    }
    (this.linked ? document : this.root).addEventListener("keydown", (event) => this.key(event), { signal });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(), { signal });
    this.show();
  }

  remove() {
    this.gone.abort();
    this.shown?.remove(), this.panes.forEach((pane) => pane.remove());
    this.shown = null, this.panes = [];
    clearTimeout(this.later), clearTimeout(this.telling);
    this.root.replaceChildren();
  }

  // -- state ------------------------------------------------------------------------------------

  read() {
    const given = new URLSearchParams(location.hash.slice(1)), state = {};
    for (const name of ["page", "how", "scale", "theme", "heads", "sort", "measure"]) if (given.has(name)) state[name] = given.get(name);
    for (const name of ["run", "layer", "head", "batch", "token", "least"]) if (given.has(name)) state[name] = Number(given.get(name)) || 0;
    const numbers = (name, size) => {
      const parts = given.get(name)?.split(",").map(Number);
      return parts?.length === size && parts.every(Number.isFinite) ? parts : null;
    };
    const view = numbers("view", 3), pin = numbers("pin", 2), second = numbers("second", 3);
    if (view && view[2] > 0) state.view = { x: view[0], y: view[1], k: view[2] };
    if (pin && Math.min(...pin) >= 0) state.pin = pin.map(Math.floor);
    if (second) state.second = { run: second[0], layer: second[1], head: second[2] };
    return state;
  }

  written() {
    const given = new URLSearchParams(), { view, pin, second } = this.state;
    for (const [name, value] of Object.entries(this.state)) {
      if (value === null || typeof value === "object" || value === START[name]) continue;
      given.set(name, value);
    }
    if (view) given.set("view", [view.x.toFixed(6), view.y.toFixed(6), view.k.toPrecision(12)].join(","));
    if (pin) given.set("pin", pin.join(","));
    if (second) given.set("second", [second.run, second.layer, second.head].join(","));
    return given.toString().replaceAll("%2C", ",");
  }

  remember() {
    if (this.linked) history.replaceState(null, "", `#${this.written()}`);
  }

  // What can't be, in a link of somebody's own making, becomes what can.
  correct() {
    const { runs } = this.info, within = (n, size) => Math.max(0, Math.min(Math.floor(n) || 0, size - 1));
    const place = (one) => {
      one.run = within(one.run, runs.length);
      one.layer = within(one.layer, runs[one.run].layers.length);
      one.head = within(one.head, runs[one.run].layers[one.layer].heads.length);
    };
    const { state } = this;
    if (!["overview", "head", "text"].includes(state.page)) state.page = "overview";
    if (!["mean", "max"].includes(state.how)) state.how = "max";
    if (!["linear", "log"].includes(state.scale)) state.scale = "linear";
    if (!Object.hasOwn(THEMES, state.theme)) state.theme = null;
    if (!Object.hasOwn(MEASURES, state.sort)) state.sort = "";
    if (!Object.hasOwn(MEASURES, state.measure)) state.measure = "";
    if (!Number.isFinite(state.least)) state.least = 0;
    place(state);
    if (state.second) place((state.second = { ...state.second }));
    const [, h, , s] = this.layer(state).shape;
    state.batch = within(state.batch, Math.max(...runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0]))));
    if (state.token !== null) state.token = within(state.token, s);
    if (state.heads !== "all" && !state.heads.split(",").every((one) => /^\d{1,5}$/.test(one) && Number(one) < h)) state.heads = "all";
  }

  // Another page or head is a step that the browser's back button takes back.
  change(some) {
    const step = ["page", "run", "layer", "head", "second"].some((name) => name in some);
    if (this.linked && step) history.pushState(null, "", location.href);
    Object.assign(this.state, some);
    if (this.banner.classList.contains("bad")) this.banner.hidden = true;
    this.show();
  }

  // The batch entry that is shown of a layer, which may have fewer.
  entry(place) {
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
    const where = `tokens/${run}/${layer}/${batch}`;
    if (!this.labels.has(where)) this.labels.set(where, json(this.source, where));
    return this.labels.get(where).catch((error) => (this.complain(error), { queries: null, keys: null, first: null }));
  }

  // -- the frame --------------------------------------------------------------------------------

  frame() {
    const button = (id, text, title, press) => make("button", { type: "button", id, title, onclick: press }, text);
    const pages = [["overview", "Overview"], ["head", "Head"], ["text", "Text"]].map(([page, text]) =>
      button(`page-${page}`, text, "", () => this.change({ page })));
    this.where = make("span", { class: "where" });
    this.options = make("span", { class: "options" },
      button("how", "", "mean or maximum of pooled cells (m)", () => this.flip("how", "max", "mean")),
      button("scale", "", "linear or logarithmic colours (l)", () => this.flip("scale", "linear", "log")),
      button("compare", "compare", "beside another head, with linked zoom (c)", () => this.compare()),
      button("fit", "fit", "all of the matrix (0)", () => this.fit()),
      button("png", "PNG", "save what is shown as a picture (p)", () => this.png()));
    this.banner = make("div", { class: "banner", role: "alert", hidden: true });
    this.keys = make("dialog", { class: "keys" }, make("h2", {}, "keys"),
      make("dl", {}, ...KEYS.filter(([key]) => this.linked || key !== "k").flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)])),
      make("form", { method: "dialog" }, make("button", {}, "close")));
    this.body = make("div", { class: "body" });
    this.root.replaceChildren(
      make("header", {}, make("nav", {}, ...pages), this.where, this.options,
        make("span", { class: "tail" },
          this.linked ? button("link", "link", "copy a link to what is shown (k)", () => this.link()) : "",
          button("theme", "theme", "light or dark (t)", () => this.darken()),
          button("help", "?", "keys (?)", () => this.keys.showModal()))),
      this.banner, this.body, this.keys);
  }

  show() {
    // In a notebook keys mustn't fall to it when what had the focus is replaced.
    const lost = !this.linked && this.root.matches(":focus-within") && (() => this.root.matches(":focus-within") || this.root.focus({ preventScroll: true }));
    if (lost) requestAnimationFrame(lost);
    this.correct();
    const { state } = this;
    this.root.dataset.theme = this.themeName();
    for (const page of ["overview", "head", "text"]) this.root.querySelector(`#page-${page}`).setAttribute("aria-pressed", state.page === page);
    this.root.querySelector("#how").textContent = state.how === "max" ? "maximum" : "mean";
    this.root.querySelector("#scale").textContent = state.scale === "log" ? "logarithmic" : "linear";
    this.root.querySelector("#compare").setAttribute("aria-pressed", !!state.second);
    this.options.className = `options for-${state.page}`;
    if (this.linked) document.title = `${state.page === "overview" ? this.info.runs[0].title : this.name(state)} · manyheads`;
    this.choose();
    this.remember();
    const fresh = this.page !== state.page;
    if (fresh) this.shown?.remove(), this.panes.forEach((pane) => pane.remove()), (this.panes = []), (this.shown = null), this.body.replaceChildren();
    this.page = state.page;
    if (state.page === "head") return this.showHeads();
    const key = state.page === "overview" ? `${state.how} ${state.scale} ${state.batch}` : "text";
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
      const place = { run, layer, head, batch: this.entry({ run, layer }) }, pane = (this.panes[n] ??= new HeadPane(this.body, this));
      if (JSON.stringify(pane.place) !== JSON.stringify(place)) pane.open(place);
      else if (state.view && !same(state.view, pane.view)) pane.look(state.view);
      pane.draw(), pane.read();
    }
    this.body.classList.toggle("two", places.length > 1);
  }

  // Which run, layer, head and batch entry: a choice for each pane.
  choose() {
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
      parts.push(group(state, (some) => this.change({ ...some, ...this.kept(some) }), ""));
      if (state.page === "head" && state.second) parts.push(group(state.second, (some) => this.change({ second: { ...state.second, ...some } }), " beside"));
    }
    const most = Math.max(...info.runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0])));
    const entries = Array.from({ length: most }, (_, n) => `sequence ${n}`);
    parts.push(select("sequence", entries, state.batch, (batch) => this.change({ batch })));
    this.where.replaceChildren(...parts);
  }

  // The view stays where another layer or head has the same shape.
  kept(some) {
    const before = this.layer(this.state).shape, run = some.run ?? this.state.run, layer = some.layer ?? this.state.layer;
    const after = this.info.runs[run].layers[layer].shape;
    return before[2] === after[2] && before[3] === after[3] ? {} : { view: null, pin: null };
  }

  // -- what panes share -------------------------------------------------------------------------

  cell() {
    return this.hovered ?? this.state.pin;
  }

  point(cell) {
    if (String(cell) === String(this.hovered)) return;
    this.hovered = cell;
    for (const pane of this.panes) pane.draw(), pane.read();
  }

  pin(cell) {
    this.state.pin = cell && String(cell) === String(this.state.pin) ? null : cell;
    this.remember();
    for (const pane of this.panes) pane.draw(), pane.read();
  }

  moved(from, view = from.view) {
    this.state.view = { ...view };
    for (const pane of this.panes) if (pane !== from && pane.tiles) pane.look(view);
    clearTimeout(this.later);
    this.later = setTimeout(() => this.remember(), 150);
  }

  fit() {
    this.state.view = null;
    this.remember();
    for (const pane of this.panes) pane.look(pane.fit, true);
  }

  compare() {
    const { run, layer, head } = this.state, { length } = this.layer(this.state).heads;
    const other = this.info.runs.length > 1 ? { run: (run + 1) % this.info.runs.length, layer, head } : { run, layer, head: (head + 1) % length };
    this.change({ page: "head", second: this.state.second ? null : other });
  }

  // -- light and dark ---------------------------------------------------------------------------

  themeName() {
    return this.state.theme ?? this.around ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  // As what is around it, by the colour of the ink there, "rgb(…)".
  follow(ink) {
    const parts = String(ink).match(/[\d.]+/g)?.slice(0, 3).map(Number);
    const around = parts?.length === 3 ? (parts[0] + parts[1] + parts[2] > 383 ? "dark" : "light") : this.around;
    if (around === this.around) return;
    this.around = around, this.root.dataset.theme = this.themeName();
    if (this.info) this.show();
  }

  theme() {
    return THEMES[this.themeName()];
  }

  darken() {
    this.change({ theme: this.themeName() === "dark" ? "light" : "dark" });
  }

  flip(name, one, other) {
    this.change({ [name]: this.state[name] === one ? other : one });
  }

  hatch(context) {
    const name = this.themeName();
    if (!this.hatches[name]) {
      const tile = document.createElement("canvas"), [ground, line] = THEMES[name].hatch;
      tile.width = tile.height = 8;
      const own = tile.getContext("2d");
      own.fillStyle = ground, own.fillRect(0, 0, 8, 8);
      own.strokeStyle = line, own.lineWidth = 1.5;
      own.beginPath();
      for (const shift of [-8, 0, 8]) own.moveTo(shift, 8), own.lineTo(shift + 8, 0);
      own.stroke();
      this.hatches[name] = context.createPattern(tile, "repeat");
    }
    return this.hatches[name];
  }

  // -- out of the page --------------------------------------------------------------------------

  png() {
    if (!this.panes.length) return;
    const pictures = this.panes.map((pane) => pane.picture()), canvas = document.createElement("canvas");
    canvas.width = pictures.reduce((sum, one) => sum + one.width, 0), canvas.height = Math.max(...pictures.map((one) => one.height));
    const context = canvas.getContext("2d");
    let x = 0;
    for (const one of pictures) context.drawImage(one, x, 0), (x += one.width);
    canvas.toBlob((blob) => {
      const url = URL.createObjectURL(blob), name = this.short(this.state).replaceAll(/[^a-z0-9]+/g, "-");
      make("a", { href: url, download: `${name}.png` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    });
  }

  async link() {
    this.remember();
    try {
      await navigator.clipboard.writeText(location.href);
      this.tell("the link is copied: opened in this browser it restores what is shown");
    } catch {
      this.tell(location.href);
    }
  }

  tell(words) {
    this.banner.textContent = words, this.banner.hidden = false, this.banner.classList.remove("bad");
    clearTimeout(this.telling);
    this.telling = setTimeout(() => (this.banner.hidden = true), 4000);
  }

  complain(error) {
    if (!(error instanceof Problem)) console.error(error);
    clearTimeout(this.telling);
    this.banner.textContent = error.message, this.banner.hidden = false, this.banner.classList.add("bad");
  }

  // -- keys -------------------------------------------------------------------------------------

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.linked) event.stopPropagation(); // the notebook has keys of its own
    if (this.keys.open) return;
    if (event.target.closest?.("input, select, textarea") && event.key !== "Escape") return;
    const { state } = this, pane = this.panes[0], { heads } = this.layer(state), { layers } = this.info.runs[state.run];
    const turn = (n, by, size) => (n + by + size) % size;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const act = {
      "+": () => pane && this.closer(2), "=": () => pane && this.closer(2), "-": () => pane && this.closer(0.5),
      "0": () => pane && this.fit(), "1": () => pane && this.closer(48 / Math.min(pane.at.k, pane.at.v)),
      "[": () => this.change({ head: turn(state.head, -1, heads.length) }),
      "]": () => this.change({ head: turn(state.head, 1, heads.length) }),
      "{": () => this.otherLayer(turn(state.layer, -1, layers.length)),
      "}": () => this.otherLayer(turn(state.layer, 1, layers.length)),
      m: () => this.flip("how", "max", "mean"), l: () => this.flip("scale", "linear", "log"), c: () => this.compare(),
      o: () => this.change({ page: "overview" }), h: () => this.change({ page: "head" }), x: () => this.change({ page: "text" }),
      p: () => this.png(), k: () => this.linked && this.link(), t: () => this.darken(), "?": () => this.keys.showModal(),
      Escape: () => (state.page === "text" ? this.change({ token: null }) : this.pin(null)),
    }[event.key];
    if (arrows && pane) {
      event.preventDefault();
      if (event.shiftKey) this.step(pane, arrows);
      else pane.look({ x: pane.view.x + (arrows[0] * 80) / pane.at.k, y: pane.view.y + (arrows[1] * 80) / pane.at.v, k: pane.at.k }), this.moved(pane);
    } else if (act) {
      event.preventDefault();
      act();
    }
  }

  otherLayer(layer) {
    this.change({ layer, ...this.kept({ layer }) });
  }

  // Zoom around the crosshair if there is one, else the middle.
  closer(by) {
    const pane = this.panes[0], cell = this.state.pin, { x, y, k } = pane.view, [least, most] = pane.zoom.scaleExtent();
    const to = Math.max(least, Math.min(most, k * by));
    pane.look(cell ? { x: cell[1] + 0.5, y: cell[0] + 0.5, k: to } : { x, y, k: to });
    this.moved(pane);
  }

  // The crosshair one weight on, in view.
  step(pane, [dx, dy]) {
    const [i, j] = this.state.pin ?? [Math.floor(pane.view.y), Math.floor(pane.view.x)];
    this.hovered = null;
    this.state.pin = [Math.max(0, Math.min(pane.t - 1, i + dy)), Math.max(0, Math.min(pane.s - 1, j + dx))];
    this.remember();
    const [y, x] = this.state.pin, { k, v } = pane.at;
    if (Math.abs(x - pane.view.x) > pane.wide / k / 2 - 1 || Math.abs(y - pane.view.y) > pane.high / v / 2 - 1) pane.look({ x, y, k: pane.at.k }), this.moved(pane);
    for (const one of this.panes) one.draw(), one.read();
  }
}

const same = (a, b) => b && Math.abs(a.x - b.x) < 1e-4 && Math.abs(a.y - b.y) < 1e-4 && Math.abs(a.k / b.k - 1) < 1e-6;

// Show a source in an element; linked: keep what is shown in the address of the page.
function show(root, source, linked = true) {
  const app = new App(root, source, linked);
  app.start().catch((error) => {
    root.replaceChildren(make("p", { class: "opening", role: "alert" }, error.message));
    if (!(error instanceof Problem)) console.error(error);
  });
  return app;
}
