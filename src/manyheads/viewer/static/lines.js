// The page of lines: the tokens of a span in two columns, queries at the left and keys at the right, and a line for each weight of
// the chosen heads, in the colour and dashes of its head. The token under the pointer, else the selected one, shows only its own lines.

const SPANS = [25, 50, 100, 200, 300, 400]; // numbers of tokens to choose from
const SPAN = 50; // the default
const LEAST_WEIGHTS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]; // the weights to choose from, of which lines are drawn
const STRENGTHS = 10; // lines of about the same weight are drawn together, with one opacity and width
const LISTED = 12; // weights in the list beside the lines

class LinesPage {
  constructor(root, app, tools) {
    this.app = app, this.hovered = null, this.blocks = new Map(), this.total = 0; // lines of all tokens
    this.chips = new HeadChips(app, "heads", true);
    this.tools = make("div", { class: "tools" });
    this.queries = this.makeColumn("query", "queries");
    this.keys = this.makeColumn("key", "keys");
    this.all = make("canvas", { class: "all-lines", role: "img" }), this.own = make("canvas", { class: "own-lines", "aria-hidden": "true" });
    this.between = make("div", { class: "between" }, this.all, this.own);
    this.board = make("div", { class: "board", onpointerleave: () => this.hover(null) },
      make("h2", {}, "queries"), make("p", { class: "note", role: "status" }), make("h2", {}, "keys"), this.queries, this.between, this.keys);
    this.note = this.board.querySelector(".note");
    this.aside = make("aside", { class: "beside", "aria-live": "polite", "aria-label": "weights of a token" });
    this.element = make("div", { class: "lines-page" }, this.tools, make("div", { class: "columns" }, this.board, this.aside));
    tools.append(this.chips.element);
    root.append(this.element);
    this.resizing = new ResizeObserver(() => this.draw());
    this.resizing.observe(this.between);
  }

  remove() {
    this.opening = null;
    this.cancel(), this.resizing.disconnect(), this.element.remove();
    cancelAnimationFrame(this.drawing);
  }

  // Cancel the request. Its response may still arrive: an exported page reads its own data to the end.
  cancel() {
    this.request?.abort();
    this.request = null;
  }

  async open() {
    const { state } = this.app, place = (this.opening = { ...state, batch: this.app.batchOf(state) });
    const tokens = await this.app.tokens(place);
    if (this.opening !== place) return; // another place was opened, or the page was removed
    Object.assign(this, { place, tokens, layer: this.app.layer(place) });
    deriveToken(state, tokens);
    this.chips.update(this.layer);
    this.choose();
    this.writeTools();
    this.writeColumns();
    this.app.saveState();
    this.markFound();
    this.showSelected();
    this.reveal();
    await this.load();
  }

  // -- the span ---------------------------------------------------------------------------------

  // Choose the queries and keys to show: those of the state, else some around the selected token.
  choose() {
    const { state } = this.app, [, , t, s] = this.layer.shape, { first } = this.tokens, { run, layer, batch } = this.place;
    const place = `${run}/${layer}/${batch}`, length = (this.length = Math.max(1, Math.min(state.length ?? SPAN, SPANS.at(-1))));
    const around = (token, size, before) => {
      const isShown = before && place === this.shownPlace && before.length === Math.min(length, size) && token >= before.start && token < before.stop;
      return isShown ? before.start : Math.max(0, token - Math.floor(0.6 * length));
    };
    const range = (start, size) => {
      const from = Math.max(0, Math.min(start, size - length)), stop = Math.min(size, from + length);
      return { start: from, stop, length: stop - from };
    };
    const isQuery = first === null && state.side === "query", token = isQuery ? null : state.token;
    this.cols = range(state.start ?? around(token ?? this.cols?.start ?? 0, s, this.cols), s);
    const query = first !== null ? this.cols.start - first : state.queries ?? around((isQuery ? state.token : this.rows?.start) ?? 0, t, this.rows);
    this.rows = range(query, t);
    this.shownPlace = place;
    const key = [place, this.rows.start, this.rows.stop, this.cols.start, this.cols.stop].join("/");
    if (key !== this.key) this.key = key, this.blocks.clear(), (this.hovered = null), (this.written = false);
  }

  writeTools() {
    const [, , t, s] = this.layer.shape, { length, cols, rows } = this, { first } = this.tokens;
    const go = (changes) => this.app.change(changes);
    const number = (label, value, size, change) => {
      const input = make("input", { type: "number", min: 0, max: size - 1, value, "aria-label": label, onchange: () => change(Math.max(0, Math.min(size - 1, Math.floor(Number(input.value)) || 0))) });
      return input;
    };
    const select = (label, values, value, write, change) => {
      const box = make("select", { "aria-label": label, onchange: () => change(Number(box.value)) }, ...values.map((each) => make("option", { value: each }, write(each))));
      box.value = value;
      return box;
    };
    const most = Math.max(t, s), lengths = [...new Set([...SPANS.filter((n) => n < most), length, ...(most <= SPANS.at(-1) ? [most] : [])])].sort((a, b) => a - b);
    const shown = lengths.find((n) => n >= Math.min(length, most)) ?? lengths.at(-1);
    const write = (n) => (n >= most ? `all ${count(most)}` : count(n));
    const moves = s > length ? [
      make("button", { type: "button", "aria-label": "previous tokens", disabled: cols.start === 0, onclick: () => go({ start: Math.max(0, cols.start - length) }) }, "←"),
      make("label", {}, "from token ", number("first token", cols.start, s, (start) => go({ start }))),
      make("button", { type: "button", "aria-label": "next tokens", disabled: cols.stop === s, onclick: () => go({ start: cols.stop }) }, "→")] : [];
    const others = first === null && t > length ? [make("label", {}, "queries from ", number("first query", rows.start, t, (queries) => go({ queries })))] : [];
    this.tools.replaceChildren(
      ...(most > SPANS[0] ? [make("label", {}, "show ", select("number of tokens", lengths, shown, write, (n) => go({ length: n })), " tokens")] : []),
      ...moves, ...others,
      make("label", {}, "lines for weights of at least ", select("least weight", LEAST_WEIGHTS, this.app.state.least, String, (least) => go({ least }))));
  }

  // -- tokens -----------------------------------------------------------------------------------

  makeColumn(side, label) {
    return make("ul", {
      class: `column ${side}`, role: "listbox", "aria-label": label, "data-side": side,
      onpointerover: (event) => this.hover(this.tokenOf(event)),
      onfocusin: (event) => this.hover(this.tokenOf(event)),
      onfocusout: () => this.hover(null),
      onclick: (event) => this.pin(this.tokenOf(event), event.shiftKey),
      onkeydown: (event) => this.moveFocus(event),
    });
  }

  // The side and index of the token of an event, or null.
  tokenOf({ target }) {
    const item = target.closest("li");
    return item && { side: item.parentElement.dataset.side, n: Number(item.dataset.n) };
  }

  writeColumns() {
    if (this.written) return;
    this.written = true;
    const size = Math.max(this.rows.length, this.cols.length), row = (this.row = size <= 60 ? 22 : size <= 150 ? 18 : 15);
    this.board.style.setProperty("--row", `${row}px`), this.board.style.setProperty("--size", `${row < 18 ? 11 : row < 22 ? 12 : 14}px`);
    const { queries, ofQueries, queryOffset } = this.tokens, labels = this.tokens.keys;
    this.writeColumn(this.queries, this.rows, queries && ((n) => queries[n]), ofQueries, queries && queryOffset);
    this.writeColumn(this.keys, this.cols, labels && ((n) => labels[n]), this.tokens, labels && 0);
    this.items = { query: [...this.queries.children], key: [...this.keys.children] };
    this.queries.tabIndex = this.keys.tabIndex = -1;
  }

  // Write the tokens of a column. name: returns the label of an index, or null. offset: the position of index 0 in the text of
  // `tokens`, or null.
  writeColumn(list, range, name, tokens, offset) {
    list.replaceChildren(...Array.from({ length: range.length }, (_, row) => {
      const n = range.start + row, position = offset === null ? null : n + offset;
      const item = make("li", { role: "option", "data-n": n, tabindex: row ? -1 : 0, "aria-selected": "false" });
      const label = make("bdi", { class: "label" }, name ? name(n).replaceAll("\n", "⏎") : `${list.dataset.side} ${count(n)}`);
      item.append(label, make("small", {}, count(position ?? n)));
      if (position === null || tokens.pieces === null) return item;
      const word = tokens.whole(position);
      item.title = word === null ? "" : `a piece of “${word}”`;
      item.classList.toggle("special", tokens.special.has(position));
      item.classList.toggle("joined", row > 0 && (tokens.joined.has(position) || tokens.shared.has(position)));
      if (tokens.shared.has(position)) this.markPart(item, label, tokens, position, row);
      return item;
    }));
  }

  // Mark a token that continues the characters of the one before: they are written once, at the first token in the column.
  markPart(item, label, tokens, position, row) {
    const [start, stop] = tokens.unit(position), part = `part ${position - start + 1} of ${stop - start}`;
    item.classList.add("shared");
    item.title = `${part} of “${label.textContent}”`;
    item.setAttribute("aria-label", `${label.textContent}, ${part}, ${count(position)}`);
    label.textContent = row ? part : `${label.textContent} ${part}`;
  }

  // Mark the words that were searched for.
  markFound() {
    const { marked } = this.app.search, { first } = this.tokens;
    for (const [n, item] of this.items.query.entries()) item.classList.toggle("found", first !== null && marked.has(this.rows.start + n + first));
    for (const [n, item] of this.items.key.entries()) item.classList.toggle("found", marked.has(this.cols.start + n));
  }

  hover(token) {
    if (token?.n === this.hovered?.n && token?.side === this.hovered?.side) return;
    this.hovered = token;
    this.showSelected();
  }

  // Select a token. With shift, select the key (or the query) of a pair.
  pin(token, second) {
    if (!token) return;
    const { state } = this.app, { first } = this.tokens, selected = this.selected(), { start } = this.cols;
    if (second && selected && selected.side !== token.side) {
      const [query, key] = token.side === "key" ? [selected, token] : [token, selected];
      return this.app.change({ pin: [query.n, key.n] });
    }
    const position = token.side === "query" ? token.n + (first ?? 0) : token.n, isSame = state.token === position && state.side === token.side;
    this.app.change({ ...selecting(isSame ? null : position, token.side), start, queries: first === null ? this.rows.start : null });
  }

  // Scroll to the selected token if it was selected since.
  reveal() {
    const { token, side } = this.app.state, selected = this.selected(), key = `${this.key} ${side} ${token}`;
    if (key === this.revealed) return;
    this.revealed = key;
    if (selected) this.itemOf(selected)?.scrollIntoView({ block: "nearest" });
  }

  itemOf({ side, n }) {
    return this.items[side][n - (side === "query" ? this.rows : this.cols).start];
  }

  // The side and index of the selected token in the span, or null.
  selected() {
    const { state } = this.app, range = state.side === "key" ? this.cols : this.rows, [, , t] = this.layer.shape;
    const n = state.side === "key" ? state.token : selectedQuery(state, this.tokens, t);
    if (n !== null && n >= range.start && n < range.stop) return { side: state.side, n };
    // A token that isn't a query is shown as a key.
    const isKey = state.token !== null && n === null && state.token >= this.cols.start && state.token < this.cols.stop;
    return isKey ? { side: "key", n: state.token } : null;
  }

  moveFocus(event) {
    const token = this.tokenOf(event), items = token && this.items[token.side];
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const range = token.side === "query" ? this.rows : this.cols, row = token.n - range.start;
    const move = (by) => items[Math.max(0, Math.min(items.length - 1, row + by))];
    const other = token.side === "query" ? this.items.key : this.items.query;
    const target = {
      ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(10), PageUp: () => move(-10), Home: () => items[0], End: () => items.at(-1),
      ArrowLeft: () => token.side === "key" && other[Math.min(row, other.length - 1)], ArrowRight: () => token.side === "query" && other[Math.min(row, other.length - 1)],
    }[event.key]?.();
    if (target === undefined && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault(), event.stopPropagation();
    if (target) for (const item of target.parentElement.children) item.tabIndex = item === target ? 0 : -1;
    if (target) target.focus();
    else if (target === undefined) this.pin(token, event.shiftKey);
  }

  // Handle a key outside of the columns.
  pressKey({ key }) {
    if (key === "Escape") this.app.change(selecting(null));
    return key === "Escape";
  }

  // -- weights ----------------------------------------------------------------------------------

  get heads() {
    return chosenHeads(this.app.state.heads, this.layer.heads.length);
  }

  // Request the blocks of the chosen heads that aren't loaded, several heads at a time, and draw them as they arrive.
  async load() {
    this.cancel();
    if (this.layer.finest) return (this.note.textContent = pooledFile(this.layer));
    const request = (this.request = new AbortController()), { run, layer, batch } = this.place, { rows, cols, key } = this;
    const missing = this.heads.filter((head) => !this.blocks.has(head));
    this.draw(); // without the lines of another span
    const together = Math.max(1, Math.floor(this.app.info.block_weights / (rows.length * cols.length)));
    try {
      for (let n = 0; n < missing.length; n += together) {
        const heads = missing.slice(n, n + together);
        const address = `block/${run}/${layer}/${heads}/${rows.start}/${rows.stop}/${cols.start}/${cols.stop}/${batch}`;
        const buffer = await this.app.client.bytes(address, request.signal);
        if (request !== this.request || key !== this.key) return;
        const numbers = new Float32Array(buffer, 16), size = rows.length * cols.length;
        for (const [m, head] of heads.entries()) this.blocks.set(head, numbers.subarray(m * size, (m + 1) * size));
        this.draw();
      }
    } catch (error) {
      this.app.showError(error);
    }
  }

  // The weights of a token in a head, by the tokens of the other column.
  weightsOf({ side, n }, block) {
    const width = this.cols.length;
    if (side === "query") return block.subarray((n - this.rows.start) * width, (n - this.rows.start + 1) * width);
    return Float32Array.from({ length: this.rows.length }, (_, row) => block[row * width + n - this.cols.start]);
  }

  // -- drawing ----------------------------------------------------------------------------------

  draw() {
    if (this.drawing || !this.rows) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (this.layer.finest) return; // an exported page without single weights
      this.drawAll();
      this.showSelected();
    });
  }

  // Prepare a canvas of the size of the columns; return its context in CSS pixels.
  prepare(canvas) {
    const wide = this.between.clientWidth, high = this.row * Math.max(this.rows.length, this.cols.length);
    const ratio = Math.min(window.devicePixelRatio || 1, Math.sqrt(2 ** 25 / Math.max(1, wide * high)));
    canvas.style.height = `${high}px`;
    canvas.width = Math.round(wide * ratio), canvas.height = Math.round(high * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  }

  drawAll() {
    const { least } = this.app.state, width = this.cols.length;
    this.total = 0;
    const all = this.heads.filter((head) => this.blocks.has(head)).map((head) => {
      const block = this.blocks.get(head), found = [];
      for (let n = 0; n < block.length; n++) if (block[n] >= least) found.push([Math.floor(n / width), n % width, block[n]]);
      this.total += found.length;
      return [head, found];
    });
    this.drawLines(this.prepare(this.all), all);
    this.all.setAttribute("aria-label", this.describeLines(null));
  }

  get isLoading() {
    return this.heads.some((head) => !this.blocks.has(head));
  }

  // Say how many lines are drawn. shown: those of a token, null if the lines of all tokens are drawn.
  describeLines(shown) {
    const { least } = this.app.state, lines = plural(this.total, "line");
    if (this.isLoading) return "loading …";
    if (!this.heads.length) return "no head is chosen";
    if (!this.total) return `no weight here is at least ${least}`;
    return `${shown === null ? lines : `${count(shown)} of ${lines}`}: weights of at least ${least}`;
  }

  writeNote(shown) {
    this.note.textContent = this.describeLines(shown);
    this.note.dataset.lines = this.isLoading ? "" : this.total;
  }

  // Draw lines. byHead: for each head its lines, as [row of the query, row of the key, weight]. The lines of several heads between
  // two tokens are side by side.
  drawLines(context, byHead) {
    const wide = this.between.clientWidth, { row } = this, theme = this.app.themeName(), apart = Math.min(3, (0.6 * row) / byHead.length);
    for (const [place, [head, lines]] of byHead.entries()) {
      const shift = 0.5 * row + (place - (byHead.length - 1) / 2) * apart;
      const paths = Array.from({ length: STRENGTHS }, () => new Path2D());
      for (const [i, j, weight] of lines) {
        const path = paths[Math.min(STRENGTHS - 1, Math.floor(Math.sqrt(weight) * STRENGTHS))];
        path.moveTo(0, i * row + shift), path.lineTo(wide, j * row + shift);
      }
      context.strokeStyle = headColor(theme, head);
      context.setLineDash(headDashes(head));
      for (const [n, path] of paths.entries()) {
        const strength = ((n + 0.5) / STRENGTHS) ** 2; // the weight in the middle of these
        context.globalAlpha = 0.12 + 0.83 * Math.sqrt(strength), context.lineWidth = 0.6 + 2.6 * strength;
        context.stroke(path);
      }
    }
  }

  // Show the lines and weights of the token under the pointer, else of the selected one; without either, the lines of all tokens.
  showSelected() {
    if (!this.rows || !this.items) return;
    const selected = this.selected(), token = this.hovered ?? selected, { least } = this.app.state;
    this.all.classList.toggle("behind", !!token);
    for (const item of this.board.querySelectorAll("li.selected, li.pointed")) item.classList.remove("selected", "pointed"), item.setAttribute("aria-selected", "false");
    if (selected) this.itemOf(selected)?.classList.add("selected"), this.itemOf(selected)?.setAttribute("aria-selected", "true");
    if (token) this.itemOf(token)?.classList.add("pointed");
    const heads = token ? this.heads.filter((head) => this.blocks.has(head)) : [], targets = token ? this.items[token.side === "query" ? "key" : "query"] : [];
    const all = [], shares = new Float32Array(targets.length);
    const byHead = heads.map((head) => {
      const found = [];
      for (const [m, weight] of this.weightsOf(token, this.blocks.get(head)).entries()) {
        if (!(weight > 0)) continue;
        all.push([head, m, weight]), (shares[m] += weight / heads.length);
        const row = token.n - (token.side === "query" ? this.rows : this.cols).start;
        if (weight >= least) found.push(token.side === "query" ? [row, m, weight] : [m, row, weight]);
      }
      return [head, found];
    });
    this.drawLines(this.prepare(this.own), byHead);
    if (!this.layer.finest) this.writeNote(token ? byHead.reduce((sum, [, found]) => sum + found.length, 0) : null);
    for (const side of ["query", "key"]) for (const item of this.items[side]) item.style.removeProperty("--out");
    for (const [m, item] of targets.entries()) if (shares[m] > 0.004) item.style.setProperty("--out", Math.sqrt(shares[m]).toFixed(3));
    this.writeAside(token, all.sort((a, b) => b[2] - a[2]), shares);
  }

  // Why no weight of a token is listed.
  reasonForNoWeights() {
    if (this.layer.finest) return pooledFile(this.layer);
    if (!this.heads.length) return "No head is chosen.";
    return this.heads.some((head) => this.blocks.has(head)) ? "All weights here are masked, 0 or NaN." : "Loading …";
  }

  // List the largest weights of a token: [head, row of the other column, weight].
  writeAside(token, weights, shares) {
    const theme = this.app.themeName();
    this.aside.dataset.token = token ? `${token.side} ${token.n}` : "";
    if (!token) {
      this.aside.replaceChildren(
        make("p", {}, "Each line is a weight: from a query at the left to a key at the right, in the colour and dashes of its head. Wider and darker lines are larger weights."),
        make("p", { class: "muted" }, "Point at a token to see only its lines, click to keep them. Shift and click on a token of the other column selects a pair."));
      return;
    }
    const named = (side, n, length) => {
      if (side === "query") return this.tokens.titledQuery(n, length);
      return this.tokens.keys ? this.tokens.titled(n, length) : [`key ${count(n)}`];
    };
    const other = token.side === "query" ? "key" : "query", { start } = other === "key" ? this.cols : this.rows;
    const rows = weights.slice(0, LISTED).map(([head, m, weight]) => {
      const swatch = make("span", { class: "swatch" }, lineSample(head));
      swatch.style.color = headColor(theme, head);
      return make("li", {}, make("span", { class: "of-head", title: `head ${this.layer.heads[head]}` }, swatch, String(this.layer.heads[head])),
        make("span", { class: "name" }, ...named(other, start + m, 18)), make("span", { class: "value", "data-weight": weight, "data-head": head, "data-n": start + m }, format(weight, 4)));
    });
    const isBelow = weights.length > 0 && weights[0][2] < this.app.state.least;
    const size = other === "key" ? this.layer.shape[3] : this.layer.shape[2], within = shares.reduce((sum, share) => sum + share, 0);
    const isPartial = token.side === "query" && shares.length < size && weights.length > 0;
    this.aside.replaceChildren(
      make("h2", {}, ...named(token.side, token.n, 40)),
      make("h3", {}, token.side === "query" ? "attends to" : "attended to by"),
      rows.length ? make("ol", { class: "by-head" }, make("li", { class: "muted" }, make("span", {}, "head"), make("span", { class: "name" }, other), make("span", {}, "weight")), ...rows)
        : make("p", { class: "muted" }, this.reasonForNoWeights()),
      isBelow ? make("p", { class: "muted" }, `No line: these weights are below ${this.app.state.least}.`) : "",
      isPartial ? make("p", { class: "muted" }, `${Math.round(100 * Math.min(1, within))} % of its weight is on the keys shown here${this.heads.length > 1 ? " (mean of the heads)" : ""}.`) : "");
  }
}
