// The text: over a token, where it looks (its ground) and who looks at it (a line under each), and lines to the largest.

const PAGE = 2000; // tokens at a time

// At most so many characters of a name.
const short = (name, most) => ([...name].length > most ? `${[...name].slice(0, most - 1).join("")}…` : name);

class TextPage {
  constructor(root, app) {
    this.app = app;
    this.heads = make("fieldset", { class: "tools heads" });
    this.pages = make("div", { class: "tools" });
    this.lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.lines.setAttribute("class", "lines");
    this.words = make("div", { class: "words", onpointerover: (event) => this.over(event), onclick: (event) => this.pin(event) });
    this.sheet = make("div", { class: "sheet" }, this.words, this.lines);
    this.aside = make("aside", { class: "beside", "aria-live": "polite" });
    this.element = make("main", { class: "text" }, this.heads, this.pages, make("div", { class: "columns" }, this.sheet, this.aside));
    root.append(this.element);
  }

  async open() {
    const { state } = this.app, place = (this.place = { ...state, batch: this.app.entry(state) });
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
    this.write();
    await this.look(state.token ?? this.first);
  }

  remove() {
    this.asking?.abort(), this.element.remove();
  }

  write() {
    const s = this.names.length, last = Math.min(s, this.first + PAGE);
    const beyond = this.app.info.runs[this.place.run].extrapolated_from;
    this.spans = [];
    const parts = [];
    for (let n = this.first; n < last; n++) {
      if (n === beyond) parts.push(make("span", { class: "mark" }, `extrapolated from token ${count(n)} on`));
      const span = make("span", { class: "token", "data-token": n, title: count(n), dir: "auto" }, short(this.names[n].replaceAll("\n", "⏎"), 80));
      this.spans.push(span), parts.push(span);
      if (/[\n⏎↵]/.test(this.names[n])) parts.push(make("br"));
    }
    this.words.replaceChildren(...parts);
    const go = (to) => ((this.first = to), this.write(), this.look(to));
    const place = make("input", {
      type: "number", min: 0, max: s - 1, value: this.first, "aria-label": "token",
      onchange: () => this.app.change({ token: Math.max(0, Math.min(s - 1, Number(place.value) || 0)) }),
    });
    this.pages.replaceChildren(...(s > PAGE ? [
      make("button", { type: "button", disabled: this.first === 0, onclick: () => go(this.first - PAGE) }, "← before"),
      make("span", {}, `tokens ${count(this.first)} to ${count(last - 1)} of ${count(s)}`),
      make("button", { type: "button", disabled: last === s, onclick: () => go(this.first + PAGE) }, "after →"),
      make("label", {}, "go to ", place)] : []));
  }

  over(event) {
    const token = event.target.dataset?.token;
    if (token !== undefined && this.app.state.token === null) this.look(Number(token));
  }

  pin(event) {
    const token = event.target.dataset?.token, { state } = this.app;
    this.app.change({ token: token === undefined || Number(token) === state.token ? null : Number(token) });
  }

  // Ask where a token looks and who looks at it, and show that.
  async look(token) {
    this.asking?.abort();
    const asking = (this.asking = new AbortController()), { run, layer, batch } = this.place, { heads } = this.app.state;
    const [, , t] = this.layer.shape, { first } = this.tokens, query = token - first;
    try {
      const line = (word, n) => json(this.app.source, `${word}/${run}/${layer}/${heads}/${n}/${batch}`, asking.signal);
      const [row, column] = await Promise.all([
        first !== null && query >= 0 && query < t ? line("row", query) : null, line("column", token)]);
      if (asking === this.asking) this.show(token, row, column, first);
    } catch (error) {
      if (error.name !== "AbortError") this.app.complain(error);
    }
  }

  // offset: the place of query 0 among the keys; null where queries are of another text.
  show(token, row, column, offset) {
    const at = (line, n) => line?.weights[n - line.first] ?? 0, most = (line) => Math.max(1e-9, line?.top[0]?.[1] ?? 0);
    for (const [n, span] of this.spans.entries()) {
      const key = this.first + n, out = at(row, key) / most(row);
      const into = offset === null ? 0 : at(column, key - offset) / most(column);
      span.style.setProperty("--out", out.toFixed(3)), span.style.setProperty("--in", into.toFixed(3));
      span.classList.toggle("here", key === token);
    }
    this.connect(token, row);
    const list = (title, line, place, note) => {
      const items = (line?.top ?? []).map(([n, weight]) => make("li", {},
        place === null ? make("b", {}, `query ${count(n)}`)
          : make("button", { type: "button", onclick: () => this.jump(n + place) }, make("bdi", {}, short(this.names[n + place], 24)), ` ${count(n + place)}`),
        make("span", { class: "value", "data-weight": weight }, written(weight, 4))));
      return [make("h3", {}, title), items.length ? make("ol", {}, ...items) : make("p", { class: "quiet" }, note)];
    };
    this.aside.replaceChildren(
      make("h2", {}, make("bdi", {}, short(this.names[token], 60)), ` ${count(token)}`),
      ...list("looks at", row, 0, offset === null ? "queries are of another text" : row ? "nothing: it may see no key" : "it is no query here"),
      ...list("is looked at by", column, offset, "nobody"));
    this.aside.dataset.token = token;
  }

  jump(token) {
    this.app.change({ token });
  }

  // Lines from a token to the keys that it looks at most.
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
