// The overview: a matrix of thumbnails with a row for each layer and a column for each head, all in the colours of one scale. The
// cells can show a head score, and be sorted by it.
const NARROW = 760; // pixels: a narrower viewer is that of a phone

class Overview {
  constructor(body, app, tools) {
    this.app = app;
    this.cells = new Map(); // by "run/layer/head"
    this.thumbnails = app.thumbnails ??= new Thumbnails(app.client, app.info.side);
    this.scores = new HeadScores(app, () => this.scoresArrived());
    this.preview = new Preview(app, this.scores, this.thumbnails);
    this.list = make("div", { class: "matrices" });
    this.element = make("div", { class: "overview" }, this.list, this.preview.element);
    body.append(this.element);
    this.addTools(tools);
    this.visible = new IntersectionObserver((entries) => this.cellsVisible(entries), { rootMargin: "100px" });
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.list);
    this.list.addEventListener("pointerover", ({ target }) => this.point(target));
    this.list.addEventListener("pointerleave", () => this.showPreview(this.focused));
    this.list.addEventListener("focusin", ({ target }) => this.focus(target));
  }

  // Add the controls: which score to show, how to order heads, and the progress of the scores.
  addTools(tools) {
    const { app } = this, names = Object.keys(app.info.scores), label = (name) => [scoreName(name), app.info.scores[name]].filter(Boolean).join(", ");
    this.hasWeights = app.info.runs.some(({ layers }) => layers.some((layer) => layer.has_weights));
    this.select = make("select", { id: "score", onchange: () => app.change({ score: this.select.value }) },
      this.hasWeights ? make("option", { value: "" }, "none") : "", ...names.map((value) => make("option", { value }, label(value))));
    this.order = app.choice("order", "order", { layer: "layer and head", score: "by score" }, "order of the heads");
    this.progress = make("span", { class: "muted progress", role: "status" });
    tools.append(make("label", { class: "field" }, make("span", {}, "score"), this.select), this.order, this.progress);
  }

  // The score that cells show, "" for none.
  get score() {
    return this.app.state.score || (this.hasWeights ? "" : this.select.value);
  }

  get isSorted() {
    return this.app.state.order === "score" && this.score !== "" && this.scores.isComplete;
  }

  open() {
    const { state } = this.app;
    if (state.score || this.hasWeights) this.select.value = state.score;
    this.focused = { run: state.run, layer: state.layer, head: state.head };
    if (this.scores.batch !== state.batch) {
      this.cells.clear();
      this.laidOut = null;
      this.scores.request();
    }
    this.showProgress();
    this.layOut();
    this.redraw();
  }

  remove() {
    this.scores.close();
    this.thumbnails.cancel();
    this.visible.disconnect();
    this.resizing.disconnect();
    cancelAnimationFrame(this.drawing);
  }

  // -- layout -----------------------------------------------------------------------------------

  resize() {
    this.layOut();
    this.redraw();
  }

  // Arrange the cells in matrices or, sorted by a score, in a list, as large as they fit.
  layOut() {
    const { clientWidth, clientHeight } = this.list, width = clientWidth - 24;
    const isPhone = this.app.root.clientWidth < NARROW, height = isPhone ? Infinity : clientHeight - 20; // a phone scrolls
    if (width <= 0) return;
    const extra = this.score ? STRIP_HEIGHT : 0;
    const layout = this.isSorted ? this.planList(width, height) : this.planMatrices(width, height, extra);
    const key = JSON.stringify([layout.key, layout.cell, layout.across, extra]);
    if (key === this.laidOut) return;
    this.laidOut = key;
    this.cell = layout.cell;
    this.isTinted = extra > 0 && layout.cell < STRIPPED;
    this.list.style.setProperty("--cell", `${layout.cell}px`);
    this.list.style.setProperty("--gap", `${gapOf(layout.cell)}px`);
    this.list.classList.toggle("tinted", this.isTinted);
    this.list.classList.toggle("stripped", extra > 0 && !this.isTinted);
    this.list.classList.toggle("sorted", this.isSorted);
    this.visible.disconnect();
    this.build(layout);
    for (const cell of this.cells.values()) this.visible.observe(cell.element);
  }

  planMatrices(width, height, extra) {
    const { runs } = this.app.info, groups = runs.flatMap(({ layers }, run) => groupLayers(run, layers));
    const sizes = groups.map(({ run, layers }) => ({
      rows: layers.length, columns: Math.max(...layers.map((layer) => runs[run].layers[layer].heads.length)),
    }));
    return { key: "layers", groups, ...fitMatrices(sizes, width, height, extra, groups.length > 1) };
  }

  planList(width, height) {
    const { score, scores } = this, places = this.places();
    const rank = (place) => scores.value(place, score) ?? -Infinity;
    places.sort((a, b) => rank(b) - rank(a));
    const { cell, columns } = fitList(places.length, width, height, STRIP_HEIGHT);
    return { key: `${score} ${columns}`, places, columns, cell, across: 1 };
  }

  // All heads, in order.
  places() {
    return this.app.info.runs.flatMap(({ layers }, run) => layers.flatMap(({ heads }, layer) => heads.map((_, head) => ({ run, layer, head }))));
  }

  // Fill the page with rows of cells, and remember them for the arrow keys.
  build({ groups, places, columns, across }) {
    const hadFocus = this.list.matches(":focus-within");
    this.rows = [];
    const sections = groups?.map((group) => this.buildMatrix(group, groups.length > 1)) ?? [];
    const lines = []; // of matrices beside each other, which have columns of their own
    for (let n = 0; n < sections.length; n += across) lines.push(make("div", { class: "matrix-line" }, ...sections.slice(n, n + across)));
    if (groups) this.list.replaceChildren(...lines);
    else this.list.replaceChildren(this.buildList(places, columns));
    this.setTabStop(hadFocus);
  }

  buildMatrix({ run, title, layers }, hasTitle) {
    const { runs } = this.app.info, all = layers.map((layer) => runs[run].layers[layer]);
    const longest = all.reduce((most, { heads }) => (heads.length > most.length ? heads : most), []);
    const areAlike = all.every(({ heads }) => heads.every((name, n) => name === longest[n]));
    const name = [runs.length > 1 ? runs[run].title : "", title].filter(Boolean).join(" · ");
    const header = make("div", { class: "row heads", role: "row" }, make("span", { class: "row-head", role: "columnheader" }, "layer"),
      ...longest.map((head, n) => make("span", { class: "column-head", role: "columnheader" }, areAlike ? this.headLabel(head, n) : "")));
    const rows = layers.map((layer) => {
      const { number, heads, name } = runs[run].layers[layer], cells = heads.map((_, head) => this.cellOf({ run, layer, head }));
      this.rows.push(cells);
      return make("div", { class: "row", role: "row" },
        make("span", { class: "row-head", role: "rowheader", title: `layer ${number}: ${name}` }, String(number)), ...cells.map(({ box }) => box));
    });
    const heading = hasTitle ? make("h2", { title: name }, name || runs[run].title, ...(runs.length > 1 && !title ? this.describeRun(run) : [])) : "";
    return make("section", {}, heading, make("div", { class: "matrix", role: "grid", "aria-label": `heads of ${name || runs[run].title}` }, header, ...rows));
  }

  // The text of a run and its number of tokens, as elements.
  describeRun(run) {
    return [this.app.excerptOf(run), make("span", { class: "muted" }, describeSize(this.app.info.runs[run]))];
  }

  // The number of a head; the first one says what is counted.
  headLabel(head, n) {
    return n === 0 && this.cell >= 48 ? `head ${head}` : String(head);
  }

  buildList(places, columns) {
    const rows = [], { runs } = this.app.info;
    for (const place of places) {
      const title = runs.length > 1 ? `${runs[place.run].title} · ` : "", { number, heads } = this.app.layer(place);
      this.cellOf(place).name.textContent = title + (this.cell >= 120 ? this.app.short(place) : `${number}·${heads[place.head]}`);
    }
    for (let n = 0; n < places.length; n += columns) {
      const cells = places.slice(n, n + columns).map((place) => this.cellOf(place));
      this.rows.push(cells);
      rows.push(make("div", { class: "row", role: "row" }, ...cells.map(({ box }) => box)));
    }
    return make("div", { class: "matrix", role: "grid", "aria-label": `heads, sorted by ${scoreName(this.score)}` }, ...rows);
  }

  // The cell of a head, which is made once.
  cellOf(place) {
    const key = `${place.run}/${place.layer}/${place.head}`;
    if (!this.cells.has(key)) this.cells.set(key, this.makeCell(place, key));
    return this.cells.get(key);
  }

  makeCell({ run, layer, head }, key) {
    const place = { run, layer, head, batch: this.app.batchOf({ run, layer }) }, { has_weights } = this.app.layer(place);
    const canvas = make("canvas", { class: "thumbnail", width: 1, height: 1 }), number = make("b"), bar = make("i"), name = make("span", { class: "name" });
    const element = make("button", {
      class: `card${has_weights ? "" : " no-weights"}`, type: "button", tabindex: -1, "data-place": key, "aria-disabled": !has_weights && "true",
      onclick: () => this.preview.open(place),
    }, canvas, make("span", { class: "strip", "aria-hidden": "true" }, bar, name, number));
    return { place, element, canvas, number, bar, name, box: make("span", { class: "cell-box", role: "gridcell" }, element) };
  }

  // -- thumbnails and scores --------------------------------------------------------------------

  cellsVisible(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.requestThumbnail(this.cells.get(target.dataset.place));
    }
  }

  async requestThumbnail(cell) {
    const layer = this.app.layer(cell.place), pixels = Math.round(this.cell * (window.devicePixelRatio || 1));
    if (!layer.has_weights || cell.pixels >= pixels) return;
    cell.pixels = pixels;
    try {
      const thumbnail = await this.thumbnails.get(cell.place, layer.shape, pixels);
      if (cell.pixels !== pixels) return; // a larger one was requested meanwhile
      cell.thumbnail = thumbnail;
      this.redraw();
    } catch (error) {
      if (cell.pixels === pixels) cell.pixels = 0;
      this.app.showError(error);
    }
  }

  scoresArrived() {
    this.showProgress();
    this.layOut();
    this.redraw();
  }

  showProgress() {
    const { layers, count: all, isComplete } = this.scores, done = layers.size, radio = this.order.querySelector("[value=score]");
    const isEstimated = [...layers.values()].some(({ sampled }) => sampled > 1);
    radio.disabled = !this.score || !isComplete;
    this.order.title = !this.score ? "choose a score to sort by it" : isComplete ? "order of the heads; by score: the highest first" : "available when all scores are computed";
    const hint = "choose a score to sort by, highest first";
    this.progress.textContent = !isComplete ? `scores: ${done} of ${plural(all, "layer")}`
      : !this.score ? hint : isEstimated ? "≈ estimated from some of the queries" : "";
    if (isComplete) for (const option of this.select.options) option.disabled = option.value !== "" && !this.scores.values(option.value).length;
  }

  // Draw all cells in the next frame.
  redraw() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = null;
      this.draw();
    });
  }

  draw() {
    const { pooling } = this.app.state, drawn = [...this.cells.values()].filter(({ thumbnail }) => thumbnail);
    this.scale = sharedScale(drawn.map(({ thumbnail }) => thumbnail), pooling);
    const key = `${pooling} ${this.app.state.scale} ${this.scale.top} ${this.cell}`;
    for (const cell of drawn) {
      if (cell.drawn === key + cell.thumbnail.cols) continue;
      cell.drawn = key + cell.thumbnail.cols;
      drawThumbnail(cell.canvas, cell.thumbnail, this.cell, this.app, this.scale.top);
      cell.element.dataset.sampled = cell.thumbnail.sampled;
    }
    this.drawScores();
    this.preview.showScoreScale(this.score, this.isTinted);
    this.showPreview(this.pointed ?? this.focused);
  }

  drawScores() {
    const { scores, score } = this, threshold = score ? scores.threshold(score) : Infinity, top = score ? scores.top(score) : 1;
    for (const { place, element, bar, number } of this.cells.values()) {
      const value = score ? scores.value(place, score) : null, share = Math.max(0, Math.min(1, (value ?? 0) / top));
      number.textContent = value === undefined ? "…" : this.isTinted ? shortScore(value) : formatScore(value);
      bar.style.width = `${100 * share}%`;
      element.style.setProperty("--score", `${(100 * share).toFixed(1)}%`);
      element.classList.toggle("marked", value !== null && value >= threshold);
      element.dataset.value = value ?? "";
      const words = score && value !== undefined ? `, ${scoreName(score)} ${formatScore(value)}` : "";
      element.setAttribute("aria-label", `${this.app.name(place)}${words}`);
    }
  }

  // -- pointer and keyboard ---------------------------------------------------------------------

  point(target) {
    const key = target.closest?.(".card")?.dataset.place;
    if (key) this.showPreview((this.pointed = this.cells.get(key).place));
  }

  showPreview(place) {
    if (place === this.focused) this.pointed = null;
    if (place && this.scale) this.preview.show(this.cellOf(place).place, this.scale);
  }

  // The focused head is the one that other pages show.
  focus(target) {
    const key = target.closest?.(".card")?.dataset.place;
    if (!key) return;
    const { run, layer, head } = this.cells.get(key).place, { app } = this;
    Object.assign(app.state, app.resetView({ run, layer }), { run, layer, head });
    app.saveState();
    this.focused = { run, layer, head };
    this.setTabStop(false);
    this.showPreview(this.focused);
  }

  // Let the tab key reach one cell, the focused one; arrow keys reach the others.
  setTabStop(takesFocus) {
    const chosen = this.cellOf(this.focused);
    for (const { element } of this.cells.values()) {
      element.tabIndex = element === chosen.element ? 0 : -1;
      element.classList.toggle("selected", element === chosen.element);
    }
    if (takesFocus) chosen.element.focus({ preventScroll: true });
  }

  pressKey({ key, shiftKey }) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };
    if (shiftKey || !moves[key] || !this.rows) return false;
    const current = this.cellOf(this.focused), [down, across] = moves[key];
    const row = this.rows.findIndex((cells) => cells.includes(current)), column = this.rows[row].indexOf(current);
    const cells = this.rows[Math.max(0, Math.min(this.rows.length - 1, row + down))];
    cells[Math.max(0, Math.min(cells.length - 1, column + across))].element.focus();
    return true;
  }
}
