// Every layer and head as a small picture with its measures, to sort, filter and enter.

const MEASURES = {
  previous_token: "previous token", first_token: "sink (first key)", induction: "induction", entropy: "entropy, nats",
  current_token: "own token", duplicate_token: "same token", distance: "distance",
};
const SHOWN = ["previous_token", "first_token", "induction", "entropy"];

class Overview {
  constructor(root, app) {
    this.app = app, this.cards = [], this.control = new AbortController(), this.queue = [], this.running = 0;
    this.element = make("main", { class: "overview" });
    root.append(this.element);
    this.seeing = new IntersectionObserver((entries) => entries.forEach((entry) => {
      const card = this.cards.find((one) => one.element === entry.target);
      if (entry.isIntersecting && card && !card.asked) card.asked = true, this.queue.push(card), this.next();
    }), { rootMargin: "200px" });
    const options = [["", "layer and head"], ...Object.entries(MEASURES)].map(([value, text]) => make("option", { value }, text));
    this.sort = make("select", { id: "sort", onchange: () => app.change({ sort: this.sort.value }) }, ...options);
    this.measure = make("select", { id: "measure", onchange: () => app.change({ measure: this.measure.value }) },
      ...options.map((one, n) => (n ? one.cloneNode(true) : make("option", { value: "" }, "all heads"))));
    this.least = make("input", { id: "least", type: "number", min: 0, step: 0.05, value: app.state.least, oninput: () => app.change({ least: Number(this.least.value) || 0 }) });
    this.told = make("span", { class: "quiet" });
    this.list = make("div", { class: "cards" });
    this.element.append(
      make("form", { class: "tools", onsubmit: (event) => event.preventDefault() },
        make("label", {}, "sort by ", this.sort), make("label", {}, "show ", this.measure),
        make("label", {}, " of at least ", this.least), this.told),
      this.list);
  }

  open() {
    for (const [run, { layers }] of this.app.info.runs.entries()) {
      for (const [layer, { heads }] of layers.entries()) heads.forEach((_, head) => this.card(run, layer, head));
    }
    this.arrange();
    this.askAll();
  }

  remove() {
    this.control.abort(), this.seeing.disconnect(), this.element.remove();
  }

  card(run, layer, head) {
    const place = { run, layer, head, batch: this.app.entry({ run, layer }) }, { runs } = this.app.info;
    const name = `${runs.length > 1 ? `${runs[run].title} · ` : ""}${this.app.short(place)}`;
    const canvas = make("canvas", { width: 8, height: 8 }), bars = make("dl", { class: "bars" });
    const element = make("button", {
      class: "card", type: "button", "data-place": `${run}/${layer}/${head}`, title: this.app.name(place),
      disabled: !this.app.layer(place).weights,
      onclick: () => this.app.change({ run, layer, head, page: "head", view: null, pin: null }),
    }, canvas, make("span", { class: "card-name" }, name), bars);
    this.cards.push({ place, element, canvas, bars, measures: {} });
  }

  // Pictures, a few at a time.
  next() {
    while (this.running < AT_ONCE && this.queue.length) {
      this.running++;
      this.picture(this.queue.shift()).finally(() => (this.running--, this.next()));
    }
  }

  async picture(card) {
    const { run, layer, head, batch } = card.place, { shape, weights } = this.app.layer(card.place);
    if (!weights) return card.canvas.replaceWith(make("span", { class: "quiet nothing" }, "statistics alone"));
    const size = Math.max(shape[2], shape[3]), { side } = this.app.info, { how, scale } = this.app.state;
    const level = size <= side ? 0 : Math.ceil(Math.log2(size / 64));
    try {
      const grid = decode(await this.app.source.bytes(`tiles/${run}/${layer}/${head}/${level}/0/0/${batch}`, this.control.signal));
      const painted = this.app.colours.paint(grid, how, Math.min(1, roundUp(Tiles.most(grid, how))), scale);
      Object.assign(card.canvas, { width: grid.cols, height: grid.rows });
      card.canvas.getContext("2d").drawImage(painted, 0, 0);
      card.element.dataset.sampled = grid.sampled, card.canvas.classList.add("drawn");
      if (grid.sampled > 1) card.element.title = `${this.app.name(card.place)}: of one query in ${count(grid.sampled)}`;
    } catch (error) {
      if (error.name !== "AbortError") this.app.complain(error);
    }
  }

  // Measures, a layer at a time: a browser has six connections to a server, which pictures need too.
  async askAll() {
    for (const [run, { layers }] of this.app.info.runs.entries()) {
      for (const layer of layers.keys()) await this.ask(run, layer);
    }
  }

  async ask(run, layer) {
    try {
      const where = `measures/${run}/${layer}/${this.app.entry({ run, layer })}`;
      const { measures, sampled } = await json(this.app.source, where, this.control.signal);
      for (const card of this.cards.filter(({ place }) => place.run === run && place.layer === layer)) {
        card.measures = Object.fromEntries(Object.entries(measures).map(([name, column]) => [name, column[card.place.head]]));
        card.bars.replaceChildren(...SHOWN.filter((name) => card.measures[name] != null).flatMap((name) => {
          const value = card.measures[name], bar = make("i");
          const most = name === "entropy" ? Math.log(Math.max(2, this.app.layer(card.place).shape[3])) : 1;
          bar.style.width = `calc(${Math.min(1, value / most)} * (100% - 2.7rem))`;
          return [make("dt", {}, MEASURES[name]), make("dd", { "data-measure": name, "data-value": value }, bar, value.toFixed(2))];
        }));
        if (sampled > 1) card.bars.title = `of one query in ${count(sampled)}`;
      }
      this.arrange();
    } catch (error) {
      if (error.name !== "AbortError") this.app.complain(error);
    }
  }

  // Cards in their order, those that are filtered away left out.
  arrange() {
    const { sort, measure, least } = this.app.state, value = (card, name) => card.measures[name] ?? -Infinity;
    this.sort.value = sort, this.measure.value = measure, this.least.disabled = !measure;
    if (Number(this.least.value) !== least) this.least.value = least; // else what is being typed would go
    let cards = measure ? this.cards.filter((card) => value(card, measure) >= least) : [...this.cards];
    if (sort) cards.sort((a, b) => value(b, sort) - value(a, sort));
    const pooled = this.app.info.runs.some(({ layers }) => layers.some(({ shape }) => Math.max(shape[2], shape[3]) > this.app.info.side));
    const how = pooled ? ` · larger pictures are pooled: ${this.app.state.how === "max" ? "the largest" : "the mean"} of each cell` : "";
    this.told.textContent = cards.length < this.cards.length ? `${count(cards.length)} of ${plural(this.cards.length, "head")}${how}` : plural(cards.length, "head") + how;
    const rows = [];
    let before = "";
    for (const card of cards) {
      const { run, layer } = card.place, row = `${run}/${layer}`;
      if (!sort && row !== before) rows.push(make("h2", {}, this.app.layerName(card.place)));
      before = row;
      rows.push(card.element);
    }
    const order = [sort, ...cards.map((card) => card.element.dataset.place)].join(" ");
    if (order === this.order) return; // else a card that is being clicked would be taken out under the pointer
    this.order = order;
    this.list.replaceChildren(...rows);
    for (const card of cards) if (!card.asked) this.seeing.observe(card.element);
  }
}
