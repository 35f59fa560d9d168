// The drawer beside every page: the findings of the runs, or the heads with the largest weights from a query to a key.

const RANKED = 12; // heads in the list of a pair, before all are shown

class Drawer {
  constructor(app) {
    this.app = app, this.shown = null;
    this.panels = { findings: new FindingsPanel(app), pair: new PairPanel(app) };
    this.content = make("div", { class: "drawer-content" });
    this.title = make("h2", {});
    this.element = make("section", { class: "drawer", hidden: true, "aria-label": "findings and heads" },
      make("div", { class: "drawer-head" }, this.title, make("button", { type: "button", class: "dismiss", "aria-label": "close", onclick: () => this.toggle(this.shown) }, "×")), this.content);
    this.buttons = {
      findings: button("findings", "findings", "weights that stand out, as sentences (f)", () => this.toggle("findings")),
      pair: button("pair", "which heads", "the heads that attend most from a token to another (w)", () => this.toggle("pair")),
    };
  }

  // Open a panel, or close the drawer if the panel is open.
  toggle(name) {
    this.shown = this.shown === name ? null : name;
    this.element.hidden = !this.shown;
    for (const [each, element] of Object.entries(this.buttons)) element.setAttribute("aria-pressed", each === this.shown);
    if (!this.shown) return;
    this.title.textContent = this.panels[this.shown].title;
    this.content.replaceChildren(this.panels[this.shown].element);
    this.update();
  }

  // Close the drawer; return false if it isn't open.
  close() {
    const opener = this.buttons[this.shown];
    if (!opener) return false;
    this.toggle(this.shown);
    (opener.offsetParent ? opener : this.app.settings).focus(); // on a phone the opener may be hidden
    return true;
  }

  // Show the state, which may have changed.
  update() {
    if (this.shown) this.panels[this.shown].update().catch((error) => this.app.showError(error));
  }
}

class FindingsPanel {
  constructor(app) {
    this.app = app, this.title = "Findings";
    this.element = make("div", { class: "findings" });
  }

  async update() {
    const { runs } = this.app.info, { batch } = this.app.state;
    if (batch !== this.batch) {
      this.batch = batch, this.cards = [];
      this.element.replaceChildren(make("p", { class: "muted", role: "status" }, "Searching for weights that stand out …"));
      const found = await this.request(batch).catch((error) => this.showFailure(batch, error));
      if (!found || batch !== this.batch) return;
      this.element.replaceChildren(...found.flatMap((response, run) => [runs.length > 1 ? make("h3", {}, runs[run].title) : "", ...this.write(run, response)]));
    }
    const { page, run, layer, head, pin } = this.app.state;
    for (const [card, finding] of this.cards) {
      const isShown = page === "head" && run === finding.run && layer === finding.layer && head === finding.head && String(pin) === `${finding.query},${finding.key}`;
      card.setAttribute("aria-current", isShown);
    }
  }

  // Request the findings of all runs.
  request(batch) {
    return Promise.all(this.app.info.runs.map(({ layers }, run) => {
      const last = Math.max(...layers.map(({ shape }) => shape[0])) - 1;
      return this.app.load(`findings/${run}/${Math.min(batch, last)}`);
    }));
  }

  // Say why there are no findings, with a button that requests them again.
  showFailure(batch, error) {
    if (batch !== this.batch || error.name === "AbortError") return;
    const retry = () => {
      this.batch = null;
      this.app.drawer.update();
    };
    this.element.replaceChildren(make("p", { role: "alert" }, error.message), make("button", { type: "button", onclick: retry }, "try again"));
  }

  // Return the elements of a run's findings.
  write(run, { findings, searched, tokens }) {
    if (!tokens) return [make("p", { class: "muted" }, "Findings need self-attention over a text with tokens, which this run doesn't have.")];
    const note = searched < tokens ? [make("p", { class: "muted" }, `Among the first ${count(searched)} of ${plural(tokens, "token")}.`)] : [];
    if (!findings.length) return [make("p", { class: "muted" }, "No weight stands out: each is close to what its head gives for other queries."), ...note];
    return [...findings.map((finding) => this.writeCard({ run, ...finding })), ...note];
  }

  writeCard(finding) {
    const [, head, sentence] = finding.sentence.match(/^(.*?): ([^]*)$/) ?? [null, "", finding.sentence];
    const card = make("button", { type: "button", class: "finding", onclick: () => this.open(finding) }, make("strong", {}, head), make("span", { dir: "ltr" }, ...isolateQuotes(sentence)));
    this.cards.push([card, finding]);
    return card;
  }

  // Open the head of a finding, and move to its weight.
  open({ run, layer, head, query, key }) {
    this.app.change({ page: "head", run, layer, head, second: null, view: null, ...pinning([query, key]) });
    this.app.page.flyTo([query, key]);
  }
}

// Return an English sentence with each quoted text as an element of its own, so that right-to-left text doesn't reorder it.
function isolateQuotes(sentence) {
  return sentence.split(/("[^"]+"|(?<=^|\s)'[^]+?'(?=[\s,.]|$))/).map((part, n) => (n % 2 ? make("bdi", {}, part) : part));
}

class PairPanel {
  constructor(app) {
    this.app = app, this.title = "Which heads?", this.isLong = false;
    this.list = make("ol", { class: "ranked" });
    this.element = make("div", { class: "pair-panel" });
  }

  async update() {
    const { app } = this, { state } = app, { run, layer, head } = state, place = { run, layer, head, batch: app.batchOf(state) };
    const update = (this.updating = {}), tokens = await app.tokens(place), cell = state.pin ?? (await deriveCell(app, place, tokens));
    if (update !== this.updating) return; // the state has changed, and is shown by another update
    const { shape: [, , t, s] } = app.layer(place), pair = cell && cell[0] < t && cell[1] < s ? cell : null;
    const key = JSON.stringify([run, layer, place.batch, pair]);
    if (key === this.key) return;
    this.key = key;
    if (!pair) {
      this.element.replaceChildren(make("p", { class: "muted" }, "Pin a weight on the page Head, or select a token in Text or Lines: then the heads with the largest weights from this query to its key are listed here."));
      return;
    }
    const shown = app.layer(place);
    if (shown.finest) return this.element.replaceChildren(make("p", { class: "muted" }, pooledFile(shown)));
    const response = await app.load(`heads/${run}/${layer}/${pair.join("/")}/${place.batch}`);
    if (key === this.key) this.write(place, tokens, pair, response);
  }

  write(place, tokens, [query, key], { layers }) {
    const { app } = this, { shape: [, , t, s], has_weights } = app.layer(place);
    const choose = (label, value, size, named, position, change) => {
      const input = make("input", { type: "number", min: 0, max: size - 1, value, "aria-label": label, onchange: () => change(Math.max(0, Math.min(size - 1, Math.floor(Number(input.value)) || 0))) });
      const name = position === null ? "" : named.nameElement(position, 24);
      return make("label", { class: "pair-token" }, make("span", { class: "muted" }, label), input, make("b", {}, name));
    };
    const pin = (cell) => app.change(pinning(cell));
    const heads = layers.flatMap((weights, layer) => (weights ?? []).map((weight, head) => ({ layer, head, weight })));
    const visible = heads.filter(({ weight }) => weight !== null).sort((a, b) => b.weight - a.weight);
    const rows = visible.slice(0, this.isLong ? visible.length : RANKED).map((each) => this.writeHead(place.run, each, [query, key]));
    const all = () => {
      this.isLong = true;
      this.write(place, tokens, [query, key], { layers });
    };
    this.element.replaceChildren(
      choose("from query", query, t, tokens.ofQueries, tokens.queries ? query + tokens.queryOffset : null, (i) => pin([i, key])),
      choose("to key", key, s, tokens, tokens.keys ? key : null, (j) => pin([query, j])),
      visible.length ? make("ol", { class: "ranked" }, ...rows) : make("p", { class: "muted" }, has_weights ? "In every head, this key is masked for this query, or its weight is NaN." : "This layer has statistics only."),
      rows.length < visible.length ? make("button", { type: "button", onclick: all }, `show all ${count(visible.length)} heads`) : "");
  }

  // A head of the list: a button that opens it at the pair.
  writeHead(run, { layer, head, weight }, pair) {
    const { app } = this, bar = make("i", { class: "bar" });
    bar.style.width = `${100 * Math.sqrt(weight)}%`;
    const open = () => app.change({ page: "head", run, layer, head, ...pinning(pair) });
    return make("li", {}, make("button", { type: "button", "data-place": `${layer}/${head}`, onclick: open },
      make("span", { class: "name" }, app.short({ run, layer, head })), bar, make("span", { class: "value", "data-weight": weight }, format(weight, 4))));
  }
}
