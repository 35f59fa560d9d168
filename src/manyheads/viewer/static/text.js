// The text page. For the token under the pointer, it shows which tokens it attends to (by their background, and by lines to those
// with the largest weights), and which tokens attend to it (underlined).

const PAGE = 2000; // tokens per page

class TextPage {
  constructor(root, app, tools) {
    this.app = app;
    this.chips = new HeadChips(app, "mean of heads", false);
    this.pages = make("div", { class: "tools" });
    this.lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.lines.setAttribute("class", "lines");
    this.words = make("div", {
      class: "words", onpointerover: (event) => this.hover(event), onpointerleave: () => this.leave(), onclick: (event) => this.pin(event),
    });
    this.sheet = make("div", { class: "sheet" }, this.words, this.lines);
    this.aside = make("aside", { class: "beside", "aria-live": "polite" });
    this.element = make("div", { class: "text" }, this.pages, make("div", { class: "columns" }, this.sheet, this.aside));
    tools.append(this.chips.element, make("span", { class: "legend muted" }, make("i", { class: "attended" }), "it attends to", make("i", { class: "attending" }), "attends to it"));
    root.append(this.element);
    this.resizing = new ResizeObserver(() => this.reconnect());
    this.resizing.observe(this.words);
  }

  async open() {
    const { state } = this.app, place = (this.opening = { ...state, batch: this.app.batchOf(state) });
    const tokens = await this.app.tokens(place), layer = this.app.layer(place);
    if (this.opening !== place) return; // another place was opened, or the page was removed
    Object.assign(this, { place, layer, tokens });
    const [, , , s] = layer.shape;
    this.names = this.tokens.keys ?? Array.from({ length: s }, (_, n) => count(n));
    deriveToken(state, this.tokens);
    this.chips.update(layer);
    const { selected } = this, wanted = selected ?? (this.first === undefined ? this.lastToShow() : null);
    this.first = this.firstToShow(wanted);
    this.writePage();
    if (wanted !== null && wanted !== this.revealed) this.spans[wanted - this.first]?.scrollIntoView({ block: "nearest" });
    this.revealed = wanted;
    const isOn = this.shown >= this.first && this.shown < this.first + this.spans.length;
    await this.select(wanted ?? (isOn ? this.shown : this.first));
  }

  // The token to show if none is selected. The first token of a causal model attends to itself only.
  lastToShow() {
    const { tokens, layer: { shape: [, , t, s] } } = this;
    return tokens.lastOfText(tokens.first === null ? s : Math.min(s, tokens.first + t));
  }

  // The first token of the page: that of the page before, unless a token is selected since then that isn't on it. Then the page has
  // the token in its middle, and begins with a word.
  firstToShow(selected) {
    const s = this.layer.shape[3], before = this.first ?? 0, isOn = selected >= before && selected < before + PAGE;
    if (selected === null || selected === this.revealed || isOn) return before < s ? before : 0;
    let first = Math.max(0, Math.min(selected - PAGE / 2, s - PAGE));
    while (first > 0 && first < selected && (this.tokens.shared.has(first) || this.tokens.joined.has(first))) first++;
    return first;
  }

  // The position of the selected key, or null. In cross-attention, a selected query isn't a token of this text; the key of a pinned
  // weight is.
  get selected() {
    if (!this.tokens) return null;
    const { token, side, pin } = this.app.state, isKey = this.tokens.first !== null || side === "key";
    const position = isKey ? token : pin?.[1] ?? null;
    return position !== null && position < this.layer.shape[3] ? position : null;
  }

  remove() {
    this.opening = null;
    this.resizing.disconnect();
    this.cancel(), this.element.remove();
  }

  // Cancel the request. Its response may still arrive: an exported page reads its own data to the end.
  cancel() {
    this.request?.abort();
    this.request = null;
  }

  pressKey({ key }) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by) this.move(by);
    else if (key === "Escape") this.app.change(selecting(null));
    else return false;
    return true;
  }

  // Select the next or previous token, or the one that is shown if none is selected.
  move(by) {
    if (!this.tokens) return;
    const token = this.selected;
    this.choose(token === null ? Number(this.aside.dataset.token ?? 0) : Math.max(0, Math.min(this.names.length - 1, token + by)));
  }

  writePage() {
    const s = this.names.length, last = Math.min(s, this.first + PAGE);
    const trained = this.app.info.runs[this.place.run].extrapolated_from;
    this.spans = []; // by token; the tokens of one character have one
    const parts = [];
    for (let n = this.first; n < last; ) {
      const [start, stop] = this.tokens.unit(n), isFound = this.app.search.marked.has(n);
      const span = make("span", { class: isFound ? "token found" : "token", "data-token": n, title: stop > start + 1 ? `${count(start)} to ${count(stop - 1)}` : count(n) });
      if (trained !== null && trained >= start && trained < stop) parts.push(make("span", { class: "mark", "data-note": `extrapolated from token ${count(trained)} on` }));
      parts.push(...(this.tokens.pieces ? this.writeText(span, start, stop) : this.writeLabel(span, n)));
      while (n < Math.min(stop, last)) this.spans.push(span), n++;
    }
    this.words.classList.toggle("prose", this.tokens.pieces !== null);
    this.words.replaceChildren(...parts);
    const go = (first) => ((this.first = first), this.writePage(), this.select(first));
    const goTo = make("input", {
      type: "number", min: 0, max: s - 1, value: this.first, "aria-label": "token",
      onchange: () => this.choose(Math.max(0, Math.min(s - 1, Number(goTo.value) || 0))),
    });
    this.pages.replaceChildren(...(s > PAGE ? [
      make("button", { type: "button", disabled: this.first === 0, onclick: () => go(Math.max(0, this.first - PAGE)) }, "← previous"),
      make("span", {}, `tokens ${count(this.first)} to ${count(last - 1)} of ${count(s)}`),
      make("button", { type: "button", disabled: last === s, onclick: () => go(this.first + PAGE) }, "next →"),
      make("label", {}, "go to ", goTo)] : []));
  }

  // Return the elements of a token without a text, which is shown by its label.
  writeLabel(span, n) {
    span.dir = "auto", span.append(short(this.names[n].replaceAll("\n", "⏎"), 80));
    return [span, /[\n⏎↵]/.test(this.names[n]) ? make("br") : ""];
  }

  // Return the elements of the tokens of some characters. Their text, joined, is the original: what isn't in it is written by the
  // style sheet, and the blanks around a word are outside of its span.
  writeText(span, start, stop) {
    const text = this.tokens.text(start, stop), [, before, word, after] = text.match(/^(\s*)([^]*?)(\s*)$/);
    if (this.tokens.special.has(start)) {
      span.dataset.mark = text, span.classList.add("special");
      return [span];
    }
    span.classList.toggle("joined", this.tokens.joined.has(start) && start > this.first);
    span.classList.toggle("rtl", /^\P{L}*[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Adlam}]/u.test(word));
    span.append(word || text);
    if (!word && text.includes("\n")) span.dataset.mark = "⏎", span.classList.add("blank");
    return word ? [before, span, after] : [span];
  }

  hover(event) {
    const token = event.target.dataset?.token;
    if (token !== undefined) this.select(Number(token));
  }

  // Show the selected token again, if there is one.
  leave() {
    if (this.selected !== null) this.select(this.selected);
  }

  // Select the token of a click, or none if it is selected. With shift, it becomes the key of the selected token's pair.
  pin(event) {
    const { state } = this.app, { selected } = this, token = event.target.dataset?.token;
    if (token === undefined) return this.app.change(selecting(null));
    const query = selectedQuery(state, this.tokens, this.layer.shape[2]);
    if (event.shiftKey && query !== null) return this.app.change({ pin: [query, Number(token)] });
    const isPinned = selected !== null && this.spans[selected - this.first] === event.target;
    this.app.change(selecting(isPinned ? null : Number(token), this.tokens.first === null ? "key" : "query"));
  }

  choose(token) {
    this.app.change(selecting(token, this.tokens.first === null ? "key" : "query"));
  }

  // Request and show the weights of a token, as a query and as a key.
  async select(token) {
    this.cancel();
    this.shown = token;
    if (this.place !== this.opening) return; // another place is loading, or the page was removed: events of its elements may follow
    if (this.layer.finest) return this.showPooled(token);
    if (this.aside.dataset.token === undefined) this.aside.replaceChildren(make("p", { class: "muted" }, "Loading …"));
    const request = (this.request = new AbortController()), { run, layer, batch, heads } = this.place;
    const [, , t] = this.layer.shape, { first } = this.tokens, query = token - first;
    try {
      const fetchLine = (kind, n) => heads === "none" ? { first: 0, weights: [], top: [] } : json(this.app.client, `${kind}/${run}/${layer}/${heads}/${n}/${batch}`, request.signal);
      const [row, column] = await Promise.all([
        first !== null && query >= 0 && query < t ? fetchLine("row", query) : null, fetchLine("column", token)]);
      if (request === this.request) this.show(token, row, column, first);
    } catch (error) {
      this.app.showError(error);
    }
  }

  // Show a token of an exported page that has no single weights.
  showPooled(token) {
    for (const span of this.spans) span.classList.toggle("selected", span === this.spans[token - this.first]);
    this.aside.replaceChildren(make("h2", {}, ...this.tokens.titled(token, 60)), make("p", { class: "muted" }, pooledFile(this.layer)));
    this.aside.dataset.token = token;
  }

  // Show the weights of a token. offset: the index of the key at the position of query 0, or null in cross-attention.
  show(token, row, column, offset) {
    const weightAt = (line, n) => line?.weights[n - line.first] ?? 0, largest = (line) => Math.max(1e-9, line?.top[0]?.[1] ?? 0);
    const shares = new Map(); // by span: the largest share of its tokens
    for (const [n, span] of this.spans.entries()) {
      const key = this.first + n, out = weightAt(row, key) / largest(row);
      const into = offset === null ? 0 : weightAt(column, key - offset) / largest(column), [most, mostInto] = shares.get(span) ?? [0, 0];
      shares.set(span, [Math.max(out, most), Math.max(into, mostInto)]);
    }
    for (const [span, [out, into]] of shares) {
      span.style.setProperty("--out", out.toFixed(3)), span.style.setProperty("--in", into.toFixed(3));
      span.classList.toggle("selected", span === this.spans[token - this.first]);
    }
    this.connect(token, row);
    const hasNaN = (line) => line?.weights.includes(null), nanText = "Weights here aren't numbers (NaN).";
    const list = (title, line, offset, emptyText) => {
      const items = (line?.top ?? []).map(([n, weight]) => make("li", {},
        offset === null ? make("b", {}, ...this.tokens.titledQuery(n, 24))
          : make("button", { type: "button", onclick: () => this.choose(n + offset) }, ...this.tokens.titled(n + offset, 24)),
        make("span", { class: "value", "data-weight": weight }, format(weight, 4))));
      return [make("h3", {}, title), items.length ? make("ol", {}, ...items) : make("p", { class: "muted" }, hasNaN(line) ? nanText : emptyText)];
    };
    const [start, stop] = this.tokens.unit(token);
    const others = Array.from({ length: stop - start }, (_, n) => make("button", { type: "button", "aria-pressed": start + n === token, onclick: () => this.choose(start + n) }, count(start + n)));
    const lists = this.place.heads === "none" ? [make("p", { class: "muted" }, "No head is chosen.")] : [
      ...list("attends to", row, 0, offset === null ? "In cross-attention, this token is a key only." : row ? "No key has a weight above 0." : "This token is not a query."),
      ...list("attended to by", column, offset, "No query attends to this token.")];
    this.aside.replaceChildren(
      make("h2", {}, ...this.tokens.titled(token, 60)),
      ...(others.length > 1 ? [make("p", { class: "shared" }, "one character in several tokens: ", ...others)] : []),
      ...lists);
    this.aside.dataset.token = token;
  }

  // Draw the lines again, because the words have moved, such as beside an open drawer.
  reconnect() {
    if (this.connected) this.connect(this.connected.token, this.connected.row);
  }

  // Draw lines from a token to the keys with its largest weights.
  connect(token, row) {
    const from = this.spans[token - this.first];
    this.connected = { token, row };
    this.lines.replaceChildren();
    if (!from || !row) return;
    const sheet = this.sheet.getBoundingClientRect();
    const middle = (span) => {
      const [box] = span.getClientRects(); // of its first line
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
