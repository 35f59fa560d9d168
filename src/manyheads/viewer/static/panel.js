// The side panel of the head page: the row of the query under the crosshair, its largest weights as text, and why a weight is what
// it is.

const PAUSE = 60; // milliseconds that the crosshair must rest before data are requested
const LETTERS = 20; // the largest number of characters before a key that are shown with it
const CHART = 96; // pixels: the height of the chart of a row
const AXIS = { left: 44, right: 12, above: 8, below: 20 }; // pixels around the chart
const HINT = "This is the last query, and its largest weight. Point at another weight to see it here, or pin it by a click or tap.";
const CHOSEN = "This is the query under the crosshair. Click a key below, or a bar of the chart, to move the crosshair there."; // as long, so that nothing moves

class SidePanel {
  // side: the element that has the panels. isLast: whether the last query is shown, because there is no crosshair.
  constructor(app, page, side) {
    Object.assign(this, { app, page, pane: null, profile: null, steps: null });
    this.name = make("h2", { class: "panel-name", hidden: true });
    this.query = make("h3", {});
    this.chart = make("canvas", { class: "profile", role: "img", title: "click to move the crosshair to a key" });
    this.chart.addEventListener("click", (event) => this.chooseKey(event.offsetX));
    this.top = make("ol", { class: "top-keys" });
    this.why = make("div", { class: "why" });
    this.hint = make("p", { class: "hint muted" }, HINT);
    this.row = make("section", {}, this.query, this.chart);
    this.parts = make("div", { class: "panel-parts" }, make("section", {}, make("h3", {}, "Largest weights of this query"), this.top), this.why);
    this.element = make("aside", { class: "side-panel" }, this.name, this.hint, this.row, this.parts);
    side.append(this.element);
  }

  // Show the weights of a head of a pane. isNamed: write which head it is, because another panel has another head.
  open(pane, place, isNamed) {
    Object.assign(this, { pane, place });
    this.name.hidden = !isNamed;
    this.name.replaceChildren(...pane.nameHead(place));
    this.element.setAttribute("aria-label", `weights of the query under the crosshair${isNamed ? `, ${this.name.textContent}` : ""}`);
    this.forget();
  }

  remove() {
    this.close();
    this.element.remove();
  }

  close() {
    clearTimeout(this.timer);
    this.control?.abort();
  }

  forget() {
    this.close();
    Object.assign(this, { profile: null, steps: null, rowAddress: null, pairAddress: null, isLast: false });
  }

  // The crosshair moved: request the row and the weight when it rests. Without a crosshair, they are those of the last query.
  update() {
    if (!this.pane?.tiles) return;
    const { pane: { cell }, place } = this, shown = this.app.layer(place), hasWeights = !shown.finest;
    this.hint.textContent = !hasWeights ? pooledFile(shown) : cell === null ? HINT : CHOSEN;
    this.row.hidden = this.parts.hidden = !hasWeights || (cell === null && !this.isLast);
    if (!hasWeights) return this.forget();
    const { run, layer, head, batch } = place, isLast = cell === null;
    const addressOf = (kind, indices) => `${kind}/${run}/${layer}/${head}/${indices}/${batch}`;
    const pairAddress = isLast ? "last" : addressOf("explain", cell.join("/"));
    if (pairAddress === this.pairAddress) return;
    const rowAddress = isLast ? null : addressOf("profile", cell[0]), isNewRow = isLast || rowAddress !== this.rowAddress;
    Object.assign(this, { rowAddress, pairAddress, isLast: false, shown: cell });
    if (isNewRow) this.profile = null;
    this.close();
    this.control = new AbortController();
    const { signal } = this.control, load = isLast ? () => this.loadLast(addressOf, signal) : () => this.load(isNewRow || !this.profile, signal);
    this.timer = setTimeout(() => this.report(load(), signal), PAUSE);
    this.row.hidden = this.parts.hidden = isLast;
    this.draw();
  }

  // Whether the run has the queries and keys that weights are computed from.
  get canExplain() {
    return !(this.app.client instanceof PageClient);
  }

  async load(isNewRow, signal) {
    const { client } = this.app, { rowAddress, pairAddress } = this;
    const [profile, steps] = await Promise.all([
      isNewRow ? json(client, rowAddress, signal) : this.profile,
      this.canExplain ? json(client, pairAddress, signal) : null,
      this.app.tokens(this.pane.place), // the pane has them too by now, so that keys and queries are named
    ]);
    if (!signal.aborted) this.write(profile, steps);
  }

  // Show the last query, and its largest weight.
  async loadLast(addressOf, signal) {
    const { client } = this.app, tokens = await this.app.tokens(this.pane.place), i = tokens.lastQuery(this.pane.geometry.t);
    const profile = await json(client, addressOf("profile", i), signal), [[j] = []] = profile.top;
    if (j === undefined) return; // all of its weights are 0
    const steps = this.canExplain ? await json(client, addressOf("explain", `${i}/${j}`), signal) : null;
    if (signal.aborted) return;
    Object.assign(this, { isLast: true, shown: [i, j] });
    this.row.hidden = this.parts.hidden = false;
    this.write(profile, steps);
  }

  write(profile, steps) {
    Object.assign(this, { profile, steps });
    this.writeTop();
    this.writeWhy();
    this.draw();
  }

  // Show the error if a request fails.
  async report(loading, signal) {
    try {
      await loading;
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      this.why.replaceChildren(make("p", { class: "muted" }, error.message));
      this.top.replaceChildren();
    }
  }

  // -- the chart of the row -----------------------------------------------------------------------

  // Draw the weights of the query over all keys.
  draw() {
    if (!this.pane?.tiles || !this.shown || this.row.hidden || !this.element.clientWidth) return;
    const { shown, pane, profile } = this, theme = this.app.theme(), ratio = window.devicePixelRatio || 1;
    this.query.replaceChildren("Query ", make("b", {}, pane.nameQuery(shown[0])), ` over ${plural(pane.geometry.s, "key")}`);
    const width = Math.max(120, this.row.clientWidth), height = AXIS.above + CHART + AXIS.below;
    Object.assign(this.chart.style, { width: `${width}px`, height: `${height}px` });
    this.chart.width = width * ratio;
    this.chart.height = height * ratio;
    const context = this.chart.getContext("2d");
    context.scale(ratio, ratio);
    if (!profile) return;
    const chart = { left: AXIS.left, wide: width - AXIS.left - AXIS.right, above: AXIS.above, high: CHART };
    const largest = roundUp(Math.max(...profile.weights.map((weight) => weight ?? 0)));
    this.drawAxes(context, chart, theme, largest);
    this.drawRow(context, chart, theme, largest);
    const way = profile.width > 1 ? `; each bar is the largest of ${plural(profile.width, "weight")}` : "";
    this.chart.setAttribute("aria-label", `weights of the query over ${plural(pane.geometry.s, "key")}, up to ${format(largest, 2)}${way}`);
  }

  drawAxes(context, { left, wide, above, high }, theme, largest) {
    const { s } = this.pane.geometry;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(above + high * (1 - share));
      context.fillStyle = theme.line;
      context.fillRect(left, y, wide, 1);
      context.fillStyle = theme.muted;
      context.fillText(format(share * largest, 2), left - 5, y);
    }
    context.textBaseline = "top";
    const step = roundUp((s * 70) / wide), name = "key";
    for (let key = 0; key < s; key += Math.max(1, step)) {
      const x = left + ((key + 0.5) / s) * wide, text = key ? count(key) : `${name} 0`;
      context.textAlign = x + 20 > left + wide ? "right" : "center";
      context.fillText(text, x, above + high + 5);
    }
  }

  drawRow(context, { left, wide, above, high }, theme, largest) {
    const { weights, width } = this.profile, { s } = this.pane.geometry, [, j] = this.shown;
    const at = (key) => left + (Math.min(key, s) / s) * wide, gap = (width * wide) / s > 4 ? 1 : 0;
    for (const [n, weight] of weights.entries()) {
      const x = at(n * width), size = Math.max(1, at((n + 1) * width) - x - gap);
      const bar = weight === null ? high : (weight / largest) * high;
      context.fillStyle = weight === null ? this.app.hatch(context) : theme.bars;
      context.fillRect(x, above + high - bar, size + (weight === null ? gap : 0), bar);
    }
    const x = (at(j) + at(j + 1)) / 2;
    context.fillStyle = theme.accent;
    context.beginPath();
    context.moveTo(x - 4, above + high + 6);
    context.lineTo(x + 4, above + high + 6);
    context.lineTo(x, above + high + 1);
    context.fill();
  }

  chooseKey(x) {
    const { s } = this.pane.geometry, wide = this.chart.clientWidth - AXIS.left - AXIS.right;
    const key = Math.floor(((x - AXIS.left) / wide) * s);
    if (key >= 0 && key < s) this.page.moveTo([this.shown[0], key]);
  }

  // -- the largest weights ------------------------------------------------------------------------

  writeTop() {
    const { top, sink_weight: sink } = this.profile, most = top[0]?.[1] ?? 1;
    const items = top.map(([key, weight]) => {
      const bar = make("i", { class: "share" });
      bar.style.width = `${(100 * weight) / most}%`;
      const choose = () => this.page.moveTo([this.shown[0], key]);
      return make("li", {}, make("button", { type: "button", onclick: choose, "data-key": key, "aria-label": `key ${this.pane.nameKey(key)}, weight ${format(weight, 4)}` },
        make("span", { class: "value", "data-weight": weight }, format(weight, 4)), make("span", { class: "bar" }, bar), this.describeKey(key)));
    });
    if (sink !== null) items.push(make("li", { class: "muted" }, `The sink takes ${format(sink, 3)} of this query's weight.`));
    this.top.replaceChildren(...(items.length ? items : [make("li", { class: "muted" }, "No key has a weight above 0.")]));
  }

  // A key with the text before it.
  describeKey(key) {
    const { tokens } = this.pane, element = make("span", { class: "token-text", dir: "ltr" });
    if (!tokens.keys) {
      element.append(`key ${count(key)}`);
      return element;
    }
    const [start, stop] = tokens.unit(key), [first] = tokens.unit(Math.max(0, start - 2 * LETTERS));
    const text = (from, to) => (tokens.pieces ? tokens.text(from, to) : tokens.keys.slice(from, to).join(" ") + (to === start ? " " : ""));
    const written = tokens.pieces ? text(start, stop) : "", isBlank = !/\S/.test(written) || written.includes("\n");
    const name = isBlank ? tokens.keys[key] : written; // labels mark blanks and the ends of lines
    const before = text(first, start).replaceAll(/\s+/g, " "), end = lastWords(before, this.name.hidden ? LETTERS : LETTERS / 2); // two panels are narrow
    const context = make("span", { class: "muted" }, first > 0 || end.length < before.trimStart().length ? `…${end}` : end);
    element.append(make("bdi", {}, context, make("mark", {}, name)), make("span", { class: "muted" }, ` ${count(key)}`));
    return element;
  }

  // -- why this weight ----------------------------------------------------------------------------

  writeWhy() {
    const title = make("h3", {}, "Why this weight");
    if (!this.canExplain) {
      this.why.replaceChildren(title, make("p", { class: "muted" },
        "An exported page has weights, but not the queries and keys that they are computed from. Open the run with manyheads view to see them."));
      return;
    }
    const pair = make("p", { class: "pair" }, "query ", make("b", {}, this.pane.nameQuery(this.shown[0])), " → key ", make("b", {}, this.pane.nameKey(this.shown[1])));
    this.why.replaceChildren(title, pair, ...explainSteps(this.steps, this.app));
  }
}
