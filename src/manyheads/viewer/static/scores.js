// Head scores on the overview: their names, units and scales.

const MARKED = 3; // heads with the highest scores that are marked

class HeadScores {
  // app: the App. changed: called when the scores of a layer have arrived.
  constructor(app, changed) {
    Object.assign(this, { app, changed, layers: new Map() });
  }

  // Request the scores of all layers, one at a time: a browser has few connections to a server, and thumbnails need some. They are
  // computed once, and then kept by the app.
  async request() {
    const { app } = this, { batch } = app.state, places = [];
    this.batch = batch;
    this.layers = new Map();
    app.info.runs.forEach(({ layers }, run) => layers.forEach((_, layer) => places.push({ run, layer })));
    this.count = places.length;
    for (const { run, layer } of places) {
      try {
        const found = await app.load(`scores/${run}/${layer}/${app.batchOf({ run, layer })}`);
        if (this.isClosed || this.batch !== batch) return;
        this.layers.set(`${run}/${layer}`, found);
      } catch (error) {
        if (this.isClosed || error.name === "AbortError") return;
        app.showError(error);
        this.layers.set(`${run}/${layer}`, { scores: {}, sampled: 1 });
      }
      this.changed();
    }
  }

  close() {
    this.isClosed = true;
  }

  get isComplete() {
    return this.layers.size === this.count;
  }

  // The score of a head: a number, null if the head doesn't have it, undefined if it isn't computed yet.
  value({ run, layer, head }, name) {
    const found = this.layers.get(`${run}/${layer}`);
    return found && (found.scores[name]?.[head] ?? null);
  }

  // What a head attends to, in words; "" if no score stands out or none is computed yet.
  habit({ run, layer, head }) {
    return this.layers.get(`${run}/${layer}`)?.patterns?.[head] ?? "";
  }

  // From one query in how many the scores of a layer are estimated.
  sampled({ run, layer }) {
    return this.layers.get(`${run}/${layer}`)?.sampled ?? 1;
  }

  values(name) {
    return [...this.layers.values()].flatMap(({ scores }) => scores[name] ?? []).filter((value) => value !== null);
  }

  // The largest number that a score can have: 1 for weights, the logarithm of the number of keys for the entropy. Others have the
  // largest one, rounded up.
  limit(name) {
    if (!this.unit(name)) return 1;
    const keys = Math.max(...this.app.info.runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[3])));
    return name === "entropy" ? Math.log(Math.max(2, keys)) : roundUp(Math.max(0, ...this.values(name)));
  }

  // The end of the scale of a score in cells, which begins at 0: its largest number, rounded up, so that small scores differ too.
  top(name) {
    return Math.min(this.limit(name), roundUp(Math.max(0, ...this.values(name))));
  }

  unit(name) {
    return this.app.info.scores[name];
  }

  // The least of the highest few scores; Infinity until all are there.
  threshold(name) {
    const sorted = this.isComplete ? this.values(name).sort((a, b) => b - a) : [];
    return Math.max(1e-9, sorted[Math.min(MARKED, sorted.length) - 1] ?? Infinity);
  }
}

// The name of a score, as words.
const scoreName = (name) => name.replaceAll("_", " ");

// A score with two decimals, fewer if it is large, or more if it is almost 1.
function formatScore(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? count(Math.round(value)) : value >= 10 ? value.toFixed(1) : twoDecimals(value);
}

// A score in three or four characters: ".97", ".999", "1.0", "28", "3k".
function shortScore(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${Math.round(value / 1000)}k`;
  return value >= 10 ? String(Math.round(value)) : value >= 0.9995 ? value.toFixed(1) : twoDecimals(value).slice(1);
}
