// One head: its weights from the whole matrix down to single ones, with rulers, crosshair and the value under it.

const STRIP = 36, BAR = 74, EDGE = 8; // pixels: the strips beside the picture, the colour bar, a margin
const MOST = 96; // pixels a token at the closest

class HeadPane {
  // app: what panes share; place: {run, layer, head, batch}.
  constructor(root, app) {
    this.app = app;
    this.canvas = make("canvas", { class: "map", tabindex: 0, role: "img" });
    this.title = make("div", { class: "pane-title" });
    this.note = make("div", { class: "note", role: "status" });
    this.reading = make("div", { class: "reading", "aria-live": "polite" });
    this.done = make("progress", { max: 1, "aria-label": "how much of the head is read" });
    this.element = make("section", { class: "pane" }, this.title, this.canvas, this.reading, make("div", { class: "foot" }, this.done, this.note));
    root.append(this.element);
    this.zoom = d3.zoom().clickDistance(4).on("zoom", (event) => this.moved(event));
    d3.select(this.canvas).call(this.zoom).on("dblclick.zoom", null);
    this.canvas.addEventListener("pointermove", (event) => this.point(d3.pointer(event, this.canvas)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.app.pin(this.cellAt(d3.pointer(event, this.canvas))));
    this.canvas.addEventListener("dblclick", (event) => this.near(event));
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.canvas);
  }

  async open(place) {
    this.close();
    this.place = place, this.layer = this.app.layer(place);
    const [, , t, s] = this.layer.shape;
    Object.assign(this, { t, s, edges: null, progress: 0, whole: false, tokens: { queries: null, keys: null, first: null } });
    this.tiles = new Tiles(this.app.source, place, this.layer.shape, this.app.info.side, () => (this.draw(), this.read()));
    this.known = null;
    this.title.textContent = this.app.name(place);
    this.canvas.setAttribute("aria-label", `attention weights of ${this.app.name(place)}`);
    this.resize();
    const tiles = this.tiles;
    this.app.tokens(place).then((tokens) => tiles === this.tiles && ((this.tokens = tokens), this.measure(), this.read()));
    this.poll(tiles);
  }

  close() {
    this.tiles?.close();
    this.tiles = null;
  }

  remove() {
    this.close();
    this.resizing.disconnect();
    this.element.remove();
  }

  // Ask how far the pass over all of the head is, until it has ended.
  async poll(tiles) {
    const { run, layer, head, batch } = this.place, where = `${run}/${layer}/${head}/${batch}`;
    while (tiles === this.tiles) {
      try {
        const { progress, whole } = await json(this.app.source, `pass/${where}`);
        const edges = whole ? decodeEdges(await this.app.source.bytes(`edges/${where}`)) : null;
        if (tiles !== this.tiles) return;
        this.progress = progress, this.whole = whole, this.edges = edges;
        if (whole) return tiles.forgetSampled(), this.read();
      } catch (error) {
        return this.app.complain(error);
      }
      this.draw();
      await new Promise((go) => setTimeout(go, 250));
    }
  }

  // -- where things are -------------------------------------------------------------------------

  measure() {
    const wide = this.canvas.clientWidth, high = this.canvas.clientHeight;
    const named = this.tokens?.keys || this.tokens?.queries;
    this.left = (named ? 118 : 62) + STRIP, this.above = (named ? 88 : 26) + STRIP;
    this.wide = Math.max(20, wide - this.left - BAR), this.high = Math.max(20, high - this.above - EDGE);
    const least = Math.min(this.wide / this.s, this.high / this.t, MOST);
    // Few queries over many keys would be a line: they are drawn taller than wide; few keys, wider than tall.
    const wider = least * this.s < 48 ? Math.max(1, Math.min(24, this.wide / this.s) / least) : 1, k = least * wider;
    this.tall = least * this.t < 48 ? Math.max(1, Math.min(24, this.high / this.t) / least) : 1 / wider;
    const pad = [0.5 * this.s, 0.5 * this.t];
    this.zoom
      .extent([[this.left, this.above], [this.left + this.wide, this.above + this.high]])
      .scaleExtent([k * 0.7, Math.max(MOST * wider, k)])
      .translateExtent([[-pad[0], -pad[1] * this.tall], [this.s + pad[0], (this.t + pad[1]) * this.tall]]);
    this.fit = { x: this.s / 2, y: this.t / 2, k };
    this.look(this.app.state.view ?? this.fit);
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(this.canvas.clientHeight * ratio);
    if (this.tiles) this.measure();
  }

  // Show what is around a place {x, y} of the matrix, k pixels a token.
  look({ x, y, k }, slowly = false) {
    const down = this.above + this.high / 2 - k * this.tall * y;
    const to = d3.zoomIdentity.translate(this.left + this.wide / 2 - k * x, down).scale(k);
    this.zoom.transform(slowly ? d3.select(this.canvas).transition().duration(200) : d3.select(this.canvas), to);
  }

  moved({ transform, sourceEvent }) {
    const { x, y, k } = transform, v = k * this.tall;
    this.at = { x, y, k, v }; // where token 0 lies, and how wide and tall a token is
    this.view = { x: (this.left + this.wide / 2 - x) / k, y: (this.above + this.high / 2 - y) / v, k };
    if (sourceEvent) this.app.moved(this);
    if (this.pointer) this.point(this.pointer); // which stays while the matrix moves below it
    this.draw(), this.read();
  }

  point(at) {
    this.pointer = at;
    this.app.point(at && this.cellAt(at));
  }

  near(event) {
    const [x, y] = d3.pointer(event, this.canvas), [j, i] = this.under([x, y]), k = Math.min(this.zoom.scaleExtent()[1], this.at.k * 4);
    this.look({ x: j + (this.left + this.wide / 2 - x) / k, y: i + (this.above + this.high / 2 - y) / (k * this.tall), k }, true);
    this.app.moved(this, { x: j, y: i, k });
  }

  // The query and key under the pointer, or null.
  under([x, y]) {
    return [(x - this.at.x) / this.at.k, (y - this.at.y) / this.at.v];
  }

  cellAt([x, y]) {
    if (!this.at) return null;
    const [j, i] = this.under([x, y]).map(Math.floor);
    const inside = x >= this.left && y >= this.above && x < this.left + this.wide && y < this.above + this.high;
    return inside && i >= 0 && j >= 0 && i < this.t && j < this.s ? [i, j] : null;
  }

  // The level whose cells are a pixel or two; of levels that only a pass fills, the last one until it has.
  get level() {
    const least = Math.min(this.at.k, this.at.v), level = Math.min(this.tiles.top, Math.max(0, Math.ceil(-Math.log2(least) - 0.01)));
    const { side, most } = this.app.info, computed = Math.min(this.t * this.s, (side * 2 ** level) ** 2) <= most;
    return computed || this.whole ? level : this.tiles.top;
  }

  // The tiles in view, as [x, y], the nearest to the middle first.
  inView(level) {
    const side = this.app.info.side * 2 ** level, { x, y, k, v } = this.at;
    const range = (from, length, size) => {
      const first = Math.max(0, Math.floor(from / side)), last = Math.min(Math.ceil(size / side), Math.ceil((from + length) / side));
      return Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
    };
    const across = range((this.left - x) / k, this.wide / k, this.s), down = range((this.above - y) / v, this.high / v, this.t);
    const far = ([cx, cy]) => Math.hypot((cx + 0.5) * side - this.view.x, (cy + 0.5) * side - this.view.y);
    return down.flatMap((cy) => across.map((cx) => [cx, cy])).sort((a, b) => far(a) - far(b));
  }

  // The tile of the crosshair that was kept, which may be out of view.
  pinned(level) {
    const { pin } = this.app.state, side = this.app.info.side * 2 ** level;
    if (!pin || pin[0] >= this.t || pin[1] >= this.s) return [];
    return [`${level}/${Math.floor(pin[1] / side)}/${Math.floor(pin[0] / side)}`];
  }

  // -- drawing ----------------------------------------------------------------------------------

  draw() {
    if (this.drawing || !this.tiles) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (this.tiles && this.at) this.paint(this.canvas.getContext("2d"), window.devicePixelRatio || 1);
    });
  }

  paint(context, ratio) {
    const theme = this.app.theme(), level = this.level, seen = this.inView(level);
    this.tiles.want([`${this.tiles.top}/0/0`, ...seen.map(([x, y]) => `${level}/${x}/${y}`), ...this.pinned(level)]);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.ground;
    context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    this.top = this.scaleTop(level, seen);
    context.save();
    this.clip(context, theme);
    let missing = 0, sampled = 1;
    for (const [x, y] of seen) {
      const grid = this.paintTile(context, level, x, y);
      if (!grid || grid.level !== level) missing++;
      if (grid) sampled = Math.max(sampled, grid.sampled);
    }
    this.outline(context, theme, level, seen);
    this.digits(context, level);
    context.restore();
    this.crosshair(context, theme);
    this.rulers(context, theme);
    this.strips(context, theme);
    this.beyond(context, theme);
    this.bar(context, theme);
    this.say(level, missing, sampled);
  }

  // The matrix is clipped to its edges; where nothing may be seen its ground is hatched.
  clip(context, theme) {
    const { x, y, k, v } = this.at;
    context.beginPath();
    context.rect(this.left, this.above, this.wide, this.high);
    context.clip();
    context.beginPath();
    context.rect(x, y, k * this.s, v * this.t);
    context.clip();
    context.fillStyle = theme.unknown;
    context.fillRect(this.left, this.above, this.wide, this.high);
    context.imageSmoothingEnabled = false;
    context.strokeStyle = theme.line;
  }

  // A tile, or as long as it isn't there what is known of its place: of a coarser one.
  paintTile(context, level, x, y) {
    const { side } = this.app.info, { how, scale } = this.app.state, key = `${how} ${scale} ${this.top}`;
    for (let up = level; up <= this.tiles.top; up++) {
      const shift = 2 ** (up - level), [tx, ty] = [Math.floor(x / shift), Math.floor(y / shift)];
      const grid = this.tiles.get(up, tx, ty);
      if (!grid) continue;
      if (grid.key !== key) grid.key = key, grid.picture = this.app.colours.paint(grid, how, this.top, scale);
      const own = this.box(level, x, y, side, side), box = this.box(up, tx, ty, grid.cols, grid.rows);
      context.save();
      if (up > level) context.beginPath(), context.rect(...own), context.clip();
      context.fillStyle = this.app.hatch(context), context.fillRect(...box); // what is clear is masked
      context.drawImage(grid.picture, ...box);
      context.restore();
      grid.level = up;
      return grid;
    }
    return null;
  }

  // Where so many cells of a tile lie, as x, y, width, height in whole pixels.
  box(level, x, y, cols, rows) {
    const cell = 2 ** level, side = this.app.info.side * cell, { x: dx, y: dy, k, v } = this.at;
    const edges = [dx + k * x * side, dy + v * y * side, dx + k * (x * side + cols * cell), dy + v * (y * side + rows * cell)];
    const [a, b, c, d] = edges.map(Math.round);
    return [a, b, c - a, d - b];
  }

  // The number that the scale ends with: the largest in view, rounded up.
  scaleTop(level, seen) {
    const { how } = this.app.state;
    let most = 0, some = false;
    for (const [x, y] of seen) {
      const grid = this.tiles.ready.get(`${level}/${x}/${y}`);
      if (grid) most = Math.max(most, Tiles.most(grid, how)), some = true;
    }
    const coarse = this.tiles.ready.get(`${this.tiles.top}/0/0`);
    if (!some && coarse) most = Tiles.most(coarse, how);
    return most ? Math.min(1, roundUp(most)) : this.top ?? 1;
  }

  outline(context, theme, level, seen) {
    const { k, v } = this.at, cell = 2 ** level * k;
    context.strokeStyle = theme.outline;
    for (const [x, y] of seen) {
      const grid = this.tiles.ready.get(`${level}/${x}/${y}`);
      if (!grid) continue;
      const [left, above] = this.box(level, x, y, 0, 0);
      context.save();
      context.translate(left, above);
      context.scale(cell, 2 ** level * v);
      context.lineWidth = 1 / cell;
      context.stroke(Tiles.outline(grid));
      context.restore();
    }
  }

  // The weights themselves, where a cell has room for them.
  digits(context, level) {
    const { x: dx, y: dy, k, v } = this.at, { how, scale } = this.app.state, { side } = this.app.info;
    if (level || k < 44 || v < 14) return;
    context.font = `${k < 60 ? 11 : 13}px system-ui, sans-serif`;
    context.textAlign = "center", context.textBaseline = "middle";
    const [i0, i1] = this.between(this.above, this.high, dy, this.t, v), [j0, j1] = this.between(this.left, this.wide, dx, this.s);
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const grid = this.tiles.ready.get(`0/${Math.floor(j / side)}/${Math.floor(i / side)}`);
        const weight = grid?.[how][(i % side) * grid.cols + (j % side)];
        if (weight === undefined || weight !== weight) continue;
        context.fillStyle = this.app.colours.ink(Colours.place(weight, this.top, scale));
        context.fillText(written(weight, 2), dx + k * (j + 0.5), dy + v * (i + 0.5));
      }
    }
  }

  // The first token in view and the one after the last.
  between(from, length, shift, size, k = this.at.k) {
    return [Math.max(0, Math.floor((from - shift) / k)), Math.min(size, Math.ceil((from + length - shift) / k))];
  }

  // Token rulers: every token where there is room, else every few with their positions.
  rulers(context, theme) {
    const { x: dx, y: dy, k, v } = this.at, { keys, queries } = this.tokens;
    context.save();
    context.fillStyle = theme.ground;
    context.fillRect(0, 0, this.left, this.canvas.clientHeight);
    context.fillRect(0, 0, this.canvas.clientWidth, this.above);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle", context.textAlign = "right";
    const label = (names, n, every) => {
      if (!names) return count(n);
      const name = isolated(short(names[n], 13));
      return every ? name : `${name} ${count(n)}`;
    };
    const step = (size, one, several) => (size >= one ? 1 : roundUp(several / size));
    const rows = step(v, 13, 30), cols = step(k, 14, keys ? 104 : 56), chosen = this.app.cell();
    const line = (x, y, width, height) => context.fillRect(x, y, width, height);
    context.save();
    context.beginPath(), context.rect(0, this.above, this.left, this.high), context.clip();
    const [i0, i1] = this.between(this.above, this.high, dy, this.t, v);
    for (let i = Math.ceil(i0 / rows) * rows; i < i1; i += rows) {
      const y = dy + v * (i + 0.5), text = y < this.above ? y : Math.max(y, this.above + 7);
      context.fillStyle = chosen?.[0] === i ? theme.accent : theme.ink;
      context.fillText(label(queries, i, rows === 1), this.left - STRIP - 6, text, this.left - STRIP - 8);
      line(this.left - STRIP - 4, y, 3, 1);
    }
    context.restore();
    context.beginPath(), context.rect(this.left, 0, this.wide, this.above), context.clip();
    const [j0, j1] = this.between(this.left, this.wide, dx, this.s), upright = cols === 1 && (keys !== null || k < 40);
    for (let j = Math.ceil(j0 / cols) * cols; j < j1; j += cols) {
      const x = dx + k * (j + 0.5);
      context.fillStyle = chosen?.[1] === j ? theme.accent : theme.ink;
      context.save();
      context.translate(x, this.above - STRIP - 6);
      context.textAlign = upright ? "left" : "center";
      if (upright) context.rotate(-Math.PI / 2);
      const text = label(keys, j, cols === 1), most = upright ? this.above - STRIP - 8 : cols * k - 6;
      const cut = upright || x < this.left ? 0 : Math.max(0, this.left - x + Math.min(most, context.measureText(text).width) / 2);
      context.fillText(text, cut, upright ? 0 : -6, most);
      context.restore();
      line(x, this.above - STRIP - 4, 1, 3);
    }
    context.restore();
    context.save();
    context.fillStyle = theme.quiet, context.font = "11px system-ui, sans-serif";
    context.textAlign = "left", context.textBaseline = "middle";
    context.fillText("queries ↓", 6, this.above - STRIP - 6);
    context.textAlign = "right";
    context.fillText("keys →", this.left - 4, 10);
    context.restore();
  }

  // What each key receives, along the top, and each query's entropy, along the side: the largest in a pixel.
  strips(context, theme) {
    const { x: dx, y: dy } = this.at;
    context.fillStyle = theme.quiet, context.font = "11px system-ui, sans-serif", context.textBaseline = "middle";
    context.textAlign = "left";
    if (!this.edges) {
      context.fillText("received: …", this.left + 4, this.above - STRIP / 2);
      return;
    }
    const strip = (numbers, shift, from, length, size, bar) => {
      const [first, last] = this.between(from, length, shift, numbers.length, size), pixels = new Map();
      let most = 0;
      for (let n = first; n < last; n++) {
        const at = Math.floor(shift + size * n + 1e-3); // a link rounds the shift
        if (!(pixels.get(at) >= numbers[n])) pixels.set(at, numbers[n]);
        most = Math.max(most, numbers[n]);
      }
      const thick = Math.max(1, Math.ceil(size) - (size > 5 ? 1 : 0));
      context.fillStyle = theme.bars;
      for (const [at, number] of pixels) {
        const first = Math.max(from, at), last = Math.min(at + thick, from + length);
        if (first < last) bar(first, last - first, most ? (number / most) * (STRIP - 6) : 0);
      }
      return most;
    };
    const received = strip(this.edges.received, dx, this.left, this.wide, this.at.k, (at, thick, high) =>
      context.fillRect(at, this.above - 2 - high, thick, high));
    const entropy = strip(this.edges.entropy, dy, this.above, this.high, this.at.v, (at, thick, wide) =>
      context.fillRect(this.left - 2 - wide, at, wide, thick));
    context.fillStyle = theme.quiet;
    context.fillText("received,", this.left + this.wide + 4, this.above - STRIP + 8, BAR - 6);
    context.fillText(`to ${written(received)}`, this.left + this.wide + 4, this.above - STRIP + 22, BAR - 6);
    context.textAlign = "right";
    context.fillText(`entropy, to ${written(entropy)} nats`, this.left - 3, this.above - 10, this.left - 6);
  }

  // The line from which on the model was never trained.
  beyond(context, theme) {
    const from = this.app.info.runs[this.place.run].extrapolated_from, { x: dx, y: dy, k, v } = this.at;
    if (from === null || from >= Math.max(this.t, this.s)) return;
    const x = dx + k * from, y = dy + v * from;
    context.save();
    context.beginPath(), context.rect(this.left, this.above, this.wide, this.high), context.clip();
    context.strokeStyle = theme.accent, context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(x, dy), context.lineTo(x, dy + v * this.t);
    context.moveTo(dx, y), context.lineTo(dx + k * this.s, y);
    context.stroke();
    context.font = "11px system-ui, sans-serif", context.textBaseline = "top", context.textAlign = "left";
    const words = `extrapolated from token ${count(from)} on`, wide = context.measureText(words).width;
    const at = [Math.max(x, this.left) + 4, Math.max(y, this.above) + 4];
    context.fillStyle = theme.ground, context.fillRect(at[0] - 2, at[1] - 2, wide + 4, 15);
    context.fillStyle = theme.accent, context.fillText(words, ...at);
    context.restore();
  }

  crosshair(context, theme) {
    const cell = this.app.cell();
    if (!cell || cell[0] >= this.t || cell[1] >= this.s) return;
    const { x: dx, y: dy, k, v } = this.at, [i, j] = cell, x = dx + k * j, y = dy + v * i;
    context.save();
    context.beginPath(), context.rect(this.left, this.above, this.wide, this.high), context.clip();
    for (const [style, width] of [["rgb(0 0 0 / 0.55)", 3], ["#fff", 1]]) {
      context.strokeStyle = style, context.lineWidth = width;
      context.beginPath();
      for (const at of k < 16 ? [0.5] : [0, 1]) { // wide ones are framed, as they hold numbers
        context.moveTo(this.left, y + at * v), context.lineTo(x - 1, y + at * v);
        context.moveTo(x + k + 1, y + at * v), context.lineTo(this.left + this.wide, y + at * v);
        context.moveTo(x + at * k, this.above), context.lineTo(x + at * k, y - 1);
        context.moveTo(x + at * k, y + v + 1), context.lineTo(x + at * k, this.above + this.high);
      }
      context.stroke();
      context.strokeRect(x - 0.5, y - 0.5, k + 1, v + 1);
    }
    context.restore();
  }

  bar(context, theme) {
    const { scale } = this.app.state, x = this.left + this.wide + 12, high = Math.min(220, this.high), y = this.above;
    for (let n = 0; n < high; n++) context.fillStyle = this.app.colours.css(1 - n / high), context.fillRect(x, y + n, 12, 1);
    context.fillStyle = theme.ink, context.font = "11px system-ui, sans-serif";
    context.textAlign = "left", context.textBaseline = "middle";
    const parts = scale === "log" ? [0, 1, 2, 3, 4].map((n) => [n / DECADES, this.top * 10 ** (n - DECADES)])
      : [0, 0.25, 0.5, 0.75, 1].map((n) => [n, n * this.top]);
    for (const [at, weight] of parts) {
      const label = scale === "log" && at === 0 ? `≤ ${written(weight, 1)}` : written(weight, 2);
      context.fillText(label, x + 16, Math.min(y + high - 5, Math.max(y + 5, y + high * (1 - at))), BAR - 30);
    }
    context.fillStyle = this.app.hatch(context), context.fillRect(x, y + high + 14, 12, 12);
    context.fillStyle = theme.quiet, context.fillText("masked", x + 16, y + high + 20, BAR - 30);
  }

  // -- in words ---------------------------------------------------------------------------------

  say(level, missing, sampled) {
    const side = 2 ** level, { how } = this.app.state, words = [];
    const way = how === "mean" ? "the mean" : "the largest";
    if (level) words.push(`pooled: each cell is ${way} of ${count(side)} × ${count(side)} weights`);
    else words.push("single weights");
    if (sampled > 1) words.push(`of one query in ${count(sampled)} until all are read: ${Math.floor(100 * this.progress)} %`);
    else if (!this.whole) words.push(`reading all queries: ${Math.floor(100 * this.progress)} %`);
    if (missing) words.push(`${plural(missing, "tile")} to come`);
    words.push(this.layer.mask);
    if (this.tiles.failed) words.push(this.tiles.failed), this.app.complain(new Problem(this.tiles.failed));
    this.note.textContent = words.join(" · ");
    this.done.value = this.progress, this.done.hidden = this.whole;
    Object.assign(this.note.dataset, { level, missing, sampled, whole: this.whole });
  }

  name(names, n, last = n) {
    const one = (m) => `${count(m)}${names ? ` ${isolated(`“${names[m]}”`)}` : ""}`;
    return last > n ? `${one(n)} to ${one(last)}` : one(n);
  }

  // The value under the crosshair: from the tile at hand, and then, of a single weight, exactly.
  async read() {
    const cell = this.app.cell();
    if (!this.tiles || !this.at || !cell || cell[0] >= this.t || cell[1] >= this.s) {
      this.reading.replaceChildren("point at a weight; click to keep it");
      this.reading.dataset.weight = "";
      return;
    }
    const [i, j] = cell, level = this.level, side = 2 ** level, cells = this.app.info.side;
    const [r, c] = [i, j].map((n) => Math.floor(n / side));
    const grid = this.tiles.ready.get(`${level}/${Math.floor(c / cells)}/${Math.floor(r / cells)}`);
    const weight = grid?.[this.app.state.how][(r % cells) * grid.cols + (c % cells)];
    const last = (n, size) => Math.min(size, (Math.floor(n / side) + 1) * side) - 1;
    const exact = grid?.exact && !level, { run, layer, head, batch } = this.place;
    const address = `value/${run}/${layer}/${head}/${i}/${j}/${batch}`;
    if (!level && this.known?.address === address) return this.tell(i, i, j, j, this.known.weight, true);
    this.tell(i - (i % side), last(i, this.t), j - (j % side), last(j, this.s), weight, exact);
    const asked = (this.asked = {});
    if (level || !grid || exact || this.app.source instanceof Written) return;
    await new Promise((go) => setTimeout(go, 30));
    if (asked !== this.asked) return;
    try {
      const { weight: found } = await json(this.app.source, address);
      this.known = { address, weight: found ?? NaN };
      if (asked === this.asked) this.tell(i, i, j, j, this.known.weight, true);
    } catch (error) {
      this.app.complain(error);
    }
  }

  tell(i0, i1, j0, j1, weight, exact) {
    const { keys, queries } = this.tokens, pooled = i1 > i0 || j1 > j0;
    const way = pooled ? (this.app.state.how === "mean" ? "mean weight " : "largest weight ") : "weight ";
    const value = weight === undefined ? "…" : weight !== weight ? "masked" : exact ? written(weight, 7) : `≈ ${written(weight, 3)}`;
    const more = [];
    if (this.edges && !pooled) {
      more.push(` · the key receives ${written(this.edges.received[j0], 4)}`);
      more.push(` · the query's entropy is ${written(this.edges.entropy[i0], 4)} nats`);
    }
    this.reading.replaceChildren(
      "query ", make("b", {}, this.name(queries, i0, i1)), " → key ", make("b", {}, this.name(keys, j0, j1)),
      `: ${way}`, make("b", { class: "value" }, value), ...more,
    );
    Object.assign(this.reading.dataset, { query: i0, key: j0, weight: weight === undefined ? "" : String(weight), exact: !!exact });
  }

  // The picture as it is, with what it shows above it.
  picture() {
    const ratio = window.devicePixelRatio || 1, canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    const head = 22, foot = 40;
    canvas.width = this.canvas.width, canvas.height = this.canvas.height + (head + foot) * ratio;
    const theme = this.app.theme();
    context.fillStyle = theme.ground, context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.canvas, 0, head * ratio);
    context.scale(ratio, ratio);
    context.fillStyle = theme.ink, context.font = "14px system-ui, sans-serif", context.textBaseline = "middle";
    context.fillText(this.title.textContent, 8, head / 2);
    context.font = "12px system-ui, sans-serif";
    context.fillText(this.reading.dataset.weight ? this.reading.textContent : "", 8, canvas.height / ratio - 28);
    context.fillText(this.note.textContent, 8, canvas.height / ratio - 11);
    return canvas;
  }
}
