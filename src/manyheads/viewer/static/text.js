// The text page. For the token under the pointer, it shows which tokens it attends to (by their background, and by lines to those
// with the largest weights), and which tokens attend to it (underlined).

const PAGE = 2000; // tokens per page

// Shorten a name to a number of characters.
const short = (name, length) => ([...name].length > length ? `${[...name].slice(0, length - 1).join("")}…` : name);

class TextPage {
  constructor(root, app) {
    this.app = app;
    this.heads = make("fieldset", { class: "tools heads" });
    this.pages = make("div", { class: "tools" });
    this.lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.lines.setAttribute("class", "lines");
    this.words = make("div", { class: "words", onpointerover: (event) => this.hover(event), onclick: (event) => this.pin(event) });
    this.sheet = make("div", { class: "sheet" }, this.words, this.lines);
    this.aside = make("aside", { class: "beside", "aria-live": "polite" });
    this.element = make("main", { class: "text" }, this.heads, this.pages, make("div", { class: "columns" }, this.sheet, this.aside));
    root.append(this.element);
  }

  async open() {
    const { state } = this.app, place = (this.place = { ...state, batch: this.app.batchOf(state) });
    const layer = (this.layer = this.app.layer(place));
    this.tokens = await this.app.tokens(place);
    if (this.place !== place) return;
    const [, , , s] = layer.shape;
    this.names = this.tokens.keys ?? Array.from({ length: s }, (_, n) => count(n));
    const chosen = state.heads === "all" ? null : state.heads.split(",").map(Number);
    const box = (label, checked, choose) => {
      const input = make("input", { type: "checkbox", onchange: choose });
      input.checked = checked;
      return make("label", {}, input, label);
    };
    const toggle = (head) => {
      const set = new Set(chosen ?? []);
      if (!set.delete(head)) set.add(head);
      this.app.change({ heads: set.size ? [...set].sort((a, b) => a - b).join(",") : "all" });
    };
    this.heads.replaceChildren(
      make("legend", {}, `${this.app.layerName(place)}: averaged over`),
      box("all heads", !chosen, () => this.app.change({ heads: "all" })),
      ...layer.heads.map((name, head) => box(String(name), !!chosen?.includes(head), () => toggle(head))));
    this.first = Math.min(Math.floor((state.token ?? 0) / PAGE), Math.floor((s - 1) / PAGE)) * PAGE;
    this.writePage();
    await this.select(state.token ?? this.first);
  }

  remove() {
    this.request?.abort(), this.element.remove();
  }

  writePage() {
    const s = this.names.length, last = Math.min(s, this.first + PAGE);
    const trained = this.app.info.runs[this.place.run].extrapolated_from;
    this.spans = [];
    const parts = [];
    for (let n = this.first; n < last; n++) {
      if (n === trained) parts.push(make("span", { class: "mark" }, `extrapolated from token ${count(n)} on`));
      const span = make("span", { class: "token", "data-token": n, title: count(n), dir: "auto" }, short(this.names[n].replaceAll("\n", "⏎"), 80));
      this.spans.push(span), parts.push(span);
      if (/[\n⏎↵]/.test(this.names[n])) parts.push(make("br"));
    }
    this.words.replaceChildren(...parts);
    const go = (first) => ((this.first = first), this.writePage(), this.select(first));
    const goTo = make("input", {
      type: "number", min: 0, max: s - 1, value: this.first, "aria-label": "token",
      onchange: () => this.app.change({ token: Math.max(0, Math.min(s - 1, Number(goTo.value) || 0)) }),
    });
    this.pages.replaceChildren(...(s > PAGE ? [
      make("button", { type: "button", disabled: this.first === 0, onclick: () => go(this.first - PAGE) }, "← previous"),
      make("span", {}, `tokens ${count(this.first)} to ${count(last - 1)} of ${count(s)}`),
      make("button", { type: "button", disabled: last === s, onclick: () => go(this.first + PAGE) }, "next →"),
      make("label", {}, "go to ", goTo)] : []));
  }

  hover(event) {
    const token = event.target.dataset?.token;
    if (token !== undefined && this.app.state.token === null) this.select(Number(token));
  }

  pin(event) {
    const token = event.target.dataset?.token, { state } = this.app;
    this.app.change({ token: token === undefined || Number(token) === state.token ? null : Number(token) });
  }

  // Request and show the weights of a token, as a query and as a key.
  async select(token) {
    this.request?.abort();
    const request = (this.request = new AbortController()), { run, layer, batch } = this.place, { heads } = this.app.state;
    const [, , t] = this.layer.shape, { first } = this.tokens, query = token - first;
    try {
      const fetchLine = (kind, n) => json(this.app.client, `${kind}/${run}/${layer}/${heads}/${n}/${batch}`, request.signal);
      const [row, column] = await Promise.all([
        first !== null && query >= 0 && query < t ? fetchLine("row", query) : null, fetchLine("column", token)]);
      if (request === this.request) this.show(token, row, column, first);
    } catch (error) {
      if (error.name !== "AbortError") this.app.showError(error);
    }
  }

  // Show the weights of a token. offset: the index of the key at the position of query 0, or null in cross-attention.
  show(token, row, column, offset) {
    const weightAt = (line, n) => line?.weights[n - line.first] ?? 0, largest = (line) => Math.max(1e-9, line?.top[0]?.[1] ?? 0);
    for (const [n, span] of this.spans.entries()) {
      const key = this.first + n, out = weightAt(row, key) / largest(row);
      const into = offset === null ? 0 : weightAt(column, key - offset) / largest(column);
      span.style.setProperty("--out", out.toFixed(3)), span.style.setProperty("--in", into.toFixed(3));
      span.classList.toggle("selected", key === token);
    }
    this.connect(token, row);
    const list = (title, line, offset, emptyText) => {
      const items = (line?.top ?? []).map(([n, weight]) => make("li", {},
        offset === null ? make("b", {}, `query ${count(n)}`)
          : make("button", { type: "button", onclick: () => this.app.change({ token: n + offset }) }, make("bdi", {}, short(this.names[n + offset], 24)), ` ${count(n + offset)}`),
        make("span", { class: "value", "data-weight": weight }, format(weight, 4))));
      return [make("h3", {}, title), items.length ? make("ol", {}, ...items) : make("p", { class: "muted" }, emptyText)];
    };
    this.aside.replaceChildren(
      make("h2", {}, make("bdi", {}, short(this.names[token], 60)), ` ${count(token)}`),
      ...list("attends to", row, 0, offset === null ? "In cross-attention, this token is a key only." : row ? "All keys are masked." : "This token is not a query."),
      ...list("attended to by", column, offset, "No query attends to this token."));
    this.aside.dataset.token = token;
  }

  // Draw lines from a token to the keys with its largest weights.
  connect(token, row) {
    const from = this.spans[token - this.first];
    this.lines.replaceChildren();
    if (!from || !row) return;
    const sheet = this.sheet.getBoundingClientRect();
    const middle = (span) => {
      const box = span.getBoundingClientRect();
      return [box.left - sheet.left + box.width / 2, box.top - sheet.top + box.height / 2 + this.sheet.scrollTop];
    };
    this.lines.setAttribute("height", this.words.offsetHeight), this.lines.setAttribute("width", this.words.offsetWidth);
    const [x0, y0] = middle(from);
    for (const [key, weight] of row.top) {
      const to = this.spans[key - this.first];
      if (!to || key === token || weight < 0.02 * row.top[0][1]) continue;
      const [x1, y1] = middle(to), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      const bend = Math.min(60, 12 + Math.hypot(x1 - x0, y1 - y0) / 4);
      path.setAttribute("d", `M${x0} ${y0 - 8}Q${(x0 + x1) / 2} ${Math.min(y0, y1) - bend} ${x1} ${y1 - 8}`);
      path.setAttribute("stroke-width", String(0.5 + 3.5 * (weight / row.top[0][1])));
      this.lines.append(path);
    }
  }
}
