// The overview: a card for every head of every layer, with a thumbnail and head scores. Cards can be sorted, filtered and opened.

class Overview {
  constructor(root, app) {
    this.app = app, this.cards = [], this.control = new AbortController(), this.queue = [], this.running = 0;
    this.element = make("main", { class: "overview" });
    root.append(this.element);
    this.visible = new IntersectionObserver((entries) => entries.forEach((entry) => {
      const card = this.cards.find(({ element }) => element === entry.target);
      if (entry.isIntersecting && card && !card.requested) card.requested = true, this.queue.push(card), this.drawNext();
    }), { rootMargin: "200px" });
    const select = (name, defaultLabel) => make("select", { id: name, onchange: (event) => app.change({ [name]: event.target.value }) },
      make("option", { value: "" }, defaultLabel), ...Object.keys(app.info.scores).map((value) => make("option", { value }, this.label(value))));
    this.sort = select("sort", "layer and head"), this.score = select("score", "all heads");
    this.minimum = make("input", { id: "minimum", type: "number", min: 0, step: 0.05, value: app.state.minimum, oninput: () => app.change({ minimum: Number(this.minimum.value) || 0 }) });
    this.summary = make("span", { class: "muted" });
    this.list = make("div", { class: "cards" });
    this.element.append(
      make("form", { class: "tools", onsubmit: (event) => event.preventDefault() },
        make("label", {}, "sort by ", this.sort), make("label", {}, "show ", this.score),
        make("label", {}, " of at least ", this.minimum), this.summary),
      this.list);
  }

  // The name of a head score, with its unit.
  label(score) {
    return [score.replaceAll("_", " "), this.app.info.scores[score]].filter(Boolean).join(", ");
  }

  open() {
    for (const [run, { layers }] of this.app.info.runs.entries()) {
      for (const [layer, { heads }] of layers.entries()) heads.forEach((_, head) => this.addCard(run, layer, head));
    }
    this.arrange();
    this.requestScores();
  }

  remove() {
    this.control.abort(), this.visible.disconnect(), this.element.remove();
  }

  addCard(run, layer, head) {
    const place = { run, layer, head, batch: this.app.batchOf({ run, layer }) }, { runs } = this.app.info;
    const name = `${runs.length > 1 ? `${runs[run].title} · ` : ""}${this.app.short(place)}`;
    const canvas = make("canvas", { width: 8, height: 8 }), bars = make("dl", { class: "bars" });
    const element = make("button", {
      class: "card", type: "button", "data-place": `${run}/${layer}/${head}`, title: this.app.name(place),
      disabled: !this.app.layer(place).has_weights,
      onclick: () => this.app.change({ run, layer, head, page: "head", view: null, pin: null }),
    }, canvas, make("span", { class: "card-name" }, name), bars);
    this.cards.push({ place, element, canvas, bars, scores: {} });
  }

  // Draw thumbnails, a few at a time.
  drawNext() {
    while (this.running < PARALLEL && this.queue.length) {
      this.running++;
      this.drawThumbnail(this.queue.shift()).finally(() => (this.running--, this.drawNext()));
    }
  }

  async drawThumbnail(card) {
    const { run, layer, head, batch } = card.place, { shape, has_weights } = this.app.layer(card.place);
    if (!has_weights) return card.canvas.replaceWith(make("span", { class: "muted nothing" }, "statistics only"));
    const size = Math.max(shape[2], shape[3]), { side } = this.app.info, { pooling, scale } = this.app.state;
    const level = size <= side ? 0 : Math.ceil(Math.log2(size / 64));
    try {
      const tile = decode(await this.app.client.bytes(`tiles/${run}/${layer}/${head}/${level}/0/0/${batch}`, this.control.signal));
      const image = this.app.colors.paint(tile, pooling, Math.min(1, roundUp(Tiles.largest(tile, pooling))), scale);
      Object.assign(card.canvas, { width: tile.cols, height: tile.rows });
      card.canvas.getContext("2d").drawImage(image, 0, 0);
      card.element.dataset.sampled = tile.sampled, card.canvas.classList.add("drawn");
      if (tile.sampled > 1) card.element.title = `${this.app.name(card.place)}: estimated from 1 query in ${count(tile.sampled)}`;
    } catch (error) {
      if (error.name !== "AbortError") this.app.showError(error);
    }
  }

  // Request head scores one layer at a time: a browser opens at most six connections to a server, and thumbnails need some.
  async requestScores() {
    for (const [run, { layers }] of this.app.info.runs.entries()) {
      for (const layer of layers.keys()) await this.showScores(run, layer);
    }
  }

  async showScores(run, layer) {
    try {
      const address = `scores/${run}/${layer}/${this.app.batchOf({ run, layer })}`;
      const { scores, sampled } = await json(this.app.client, address, this.control.signal);
      for (const card of this.cards.filter(({ place }) => place.run === run && place.layer === layer)) {
        card.scores = Object.fromEntries(Object.entries(scores).map(([name, column]) => [name, column[card.place.head]]));
        card.bars.replaceChildren(...this.app.info.bars.filter((name) => card.scores[name] != null).flatMap((name) => {
          const value = card.scores[name], bar = make("i");
          const most = name === "entropy" ? Math.log(Math.max(2, this.app.layer(card.place).shape[3])) : 1;
          bar.style.width = `calc(${Math.min(1, value / most)} * (100% - 2.7rem))`;
          return [make("dt", {}, this.label(name)), make("dd", { "data-score": name, "data-value": value }, bar, value.toFixed(2))];
        }));
        if (sampled > 1) card.bars.title = `estimated from 1 query in ${count(sampled)}`;
      }
      this.arrange();
    } catch (error) {
      if (error.name !== "AbortError") this.app.showError(error);
    }
  }

  // Sort and filter the cards.
  arrange() {
    const { sort, score, minimum } = this.app.state, value = (card, name) => card.scores[name] ?? -Infinity;
    this.sort.value = sort, this.score.value = score, this.minimum.disabled = !score;
    if (Number(this.minimum.value) !== minimum) this.minimum.value = minimum; // if they are equal, keep the text, which may be being typed ("0.")
    let cards = score ? this.cards.filter((card) => value(card, score) >= minimum) : [...this.cards];
    if (sort) cards.sort((a, b) => value(b, sort) - value(a, sort));
    const pooled = this.app.info.runs.some(({ layers }) => layers.some(({ shape }) => Math.max(shape[2], shape[3]) > this.app.info.side));
    const note = pooled ? ` · large matrices are pooled: each cell shows the ${this.app.state.pooling === "max" ? "largest" : "mean"} weight` : "";
    this.summary.textContent = (cards.length < this.cards.length ? `${count(cards.length)} of ` : "") + plural(this.cards.length, "head") + note;
    const rows = [];
    let previous = "";
    for (const card of cards) {
      const { run, layer } = card.place, row = `${run}/${layer}`;
      if (!sort && row !== previous) rows.push(make("h2", {}, this.app.layerName(card.place)));
      previous = row;
      rows.push(card.element);
    }
    const order = [sort, ...cards.map((card) => card.element.dataset.place)].join(" ");
    if (order === this.order) return; // or a card that is being clicked would be replaced
    this.order = order;
    this.list.replaceChildren(...rows);
    for (const card of cards) if (!card.requested) this.visible.observe(card.element);
  }
}
