// The page of one head: its matrix of weights, to zoom into, with rulers, a crosshair and the weight under the crosshair.

const STRIP = 36, BAR = 74, MARGIN = 8; // pixels: the strips at the edges of the matrix, the colour bar, a margin
const CLOSEST = 96; // pixels per token at the highest zoom

class HeadPane {
  // app: the App, with the state that panes share.
  constructor(root, app) {
    this.app = app;
    this.canvas = make("canvas", { class: "map", tabindex: 0, role: "img" });
    this.title = make("div", { class: "pane-title" });
    this.note = make("div", { class: "note", role: "status" });
    this.reading = make("div", { class: "reading", "aria-live": "polite" });
    this.progressBar = make("progress", { max: 1, "aria-label": "progress of the scan" });
    this.element = make("section", { class: "pane" }, this.title, this.canvas, this.reading, make("div", { class: "foot" }, this.progressBar, this.note));
    root.append(this.element);
    this.zoom = d3.zoom().clickDistance(4).on("zoom", (event) => this.zoomed(event));
    d3.select(this.canvas).call(this.zoom).on("dblclick.zoom", null);
    this.canvas.addEventListener("pointermove", (event) => this.hover(d3.pointer(event, this.canvas)));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
    this.canvas.addEventListener("click", (event) => this.app.pin(this.cellAt(d3.pointer(event, this.canvas))));
    this.canvas.addEventListener("dblclick", (event) => this.zoomIn(event));
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.canvas);
  }

  // Show a head. place: {run, layer, head, batch}.
  async open(place) {
    this.close();
    this.place = place, this.layer = this.app.layer(place);
    const [, , t, s] = this.layer.shape;
    Object.assign(this, { t, s, marginals: null, progress: 0, complete: false, tokens: { queries: null, keys: null, first: null } });
    this.tiles = new Tiles(this.app.client, place, this.layer.shape, this.app.info.side, () => this.update());
    this.known = null;
    this.title.textContent = this.app.name(place);
    this.canvas.setAttribute("aria-label", `attention weights of ${this.app.name(place)}`);
    this.resize();
    const tiles = this.tiles;
    this.app.tokens(place).then((tokens) => tiles === this.tiles && ((this.tokens = tokens), this.layOut(), this.showValue()));
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

  // Request the scan's progress until it is complete.
  async poll(tiles) {
    const { run, layer, head, batch } = this.place, where = `${run}/${layer}/${head}/${batch}`;
    while (tiles === this.tiles) {
      try {
        const { progress, complete } = await json(this.app.client, `scan/${where}`);
        const marginals = complete ? decodeMarginals(await this.app.client.bytes(`marginals/${where}`)) : null;
        if (tiles !== this.tiles) return;
        Object.assign(this, { progress, complete, marginals });
        if (complete) return tiles.removeSampled(), this.showValue();
      } catch (error) {
        return this.app.showError(error);
      }
      this.draw();
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
  }

  // -- layout -----------------------------------------------------------------------------------

  layOut() {
    const wide = this.canvas.clientWidth, high = this.canvas.clientHeight;
    const named = this.tokens?.keys || this.tokens?.queries;
    this.left = (named ? 118 : 62) + STRIP, this.above = (named ? 88 : 26) + STRIP;
    this.wide = Math.max(20, wide - this.left - BAR), this.high = Math.max(20, high - this.above - MARGIN);
    const least = Math.min(this.wide / this.s, this.high / this.t, CLOSEST);
    // A matrix of few queries and many keys would be a thin line, so its weights are drawn taller than wide; with few keys, wider
    // than tall.
    const wider = least * this.s < 48 ? Math.max(1, Math.min(24, this.wide / this.s) / least) : 1, k = least * wider;
    this.tall = least * this.t < 48 ? Math.max(1, Math.min(24, this.high / this.t) / least) : 1 / wider;
    const pad = [0.5 * this.s, 0.5 * this.t];
    this.zoom
      .extent([[this.left, this.above], [this.left + this.wide, this.above + this.high]])
      .scaleExtent([k * 0.7, Math.max(CLOSEST * wider, k)])
      .translateExtent([[-pad[0], -pad[1] * this.tall], [this.s + pad[0], (this.t + pad[1]) * this.tall]]);
    this.fit = { x: this.s / 2, y: this.t / 2, k };
    this.setView(this.app.state.view ?? this.fit);
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(this.canvas.clientHeight * ratio);
    if (this.tiles) this.layOut();
  }

  // Center the point {x, y} of the matrix, with k pixels per token.
  setView({ x, y, k }, slowly = false) {
    const down = this.above + this.high / 2 - k * this.tall * y;
    const to = d3.zoomIdentity.translate(this.left + this.wide / 2 - k * x, down).scale(k);
    this.zoom.transform(slowly ? d3.select(this.canvas).transition().duration(200) : d3.select(this.canvas), to);
  }

  zoomed({ transform, sourceEvent }) {
    const { x, y, k } = transform, v = k * this.tall;
    this.at = { x, y, k, v }; // the pixel of token 0, and the width and height of a token
    this.view = { x: (this.left + this.wide / 2 - x) / k, y: (this.above + this.high / 2 - y) / v, k };
    if (sourceEvent) this.app.viewChanged(this);
    if (this.pointer) this.hover(this.pointer); // the matrix has moved under the pointer
    this.update();
  }

  hover(at) {
    this.pointer = at;
    this.app.hover(at && this.cellAt(at));
  }

  zoomIn(event) {
    const [x, y] = d3.pointer(event, this.canvas), [j, i] = this.under([x, y]), k = Math.min(this.zoom.scaleExtent()[1], this.at.k * 4);
    this.setView({ x: j + (this.left + this.wide / 2 - x) / k, y: i + (this.above + this.high / 2 - y) / (k * this.tall), k }, true);
    this.app.viewChanged(this, { x: j, y: i, k });
  }

  // The key and query at a pixel, as fractions.
  under([x, y]) {
    return [(x - this.at.x) / this.at.k, (y - this.at.y) / this.at.v];
  }

  // The query and key at a pixel, or null.
  cellAt([x, y]) {
    if (!this.at) return null;
    const [j, i] = this.under([x, y]).map(Math.floor);
    const inside = x >= this.left && y >= this.above && x < this.left + this.wide && y < this.above + this.high;
    return inside && i >= 0 && j >= 0 && i < this.t && j < this.s ? [i, j] : null;
  }

  // The level whose cells are one or two pixels large. Until the scan is complete, levels that it computes are replaced by the
  // coarsest.
  get level() {
    const least = Math.min(this.at.k, this.at.v), level = Math.min(this.tiles.top, Math.max(0, Math.ceil(-Math.log2(least) - 0.01)));
    const { side, max_weights } = this.app.info, fine = Math.min(this.t * this.s, (side * 2 ** level) ** 2) <= max_weights;
    return fine || this.complete ? level : this.tiles.top;
  }

  // The tiles in view, as [x, y], starting with those nearest to the middle.
  inView(level) {
    const side = this.app.info.side * 2 ** level, { x, y, k, v } = this.at;
    const range = (from, length, size) => {
      const first = Math.max(0, Math.floor(from / side)), last = Math.min(Math.ceil(size / side), Math.ceil((from + length) / side));
      return Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
    };
    const across = range((this.left - x) / k, this.wide / k, this.s), down = range((this.above - y) / v, this.high / v, this.t);
    const distance = ([cx, cy]) => Math.hypot((cx + 0.5) * side - this.view.x, (cy + 0.5) * side - this.view.y);
    return down.flatMap((cy) => across.map((cx) => [cx, cy])).sort((a, b) => distance(a) - distance(b));
  }

  // The tile of the pinned crosshair, which is needed even out of view, as a list of one address or none.
  pinned(level) {
    const { pin } = this.app.state, side = this.app.info.side * 2 ** level;
    if (!pin || pin[0] >= this.t || pin[1] >= this.s) return [];
    return [`${level}/${Math.floor(pin[1] / side)}/${Math.floor(pin[0] / side)}`];
  }

  // -- drawing ----------------------------------------------------------------------------------

  update() {
    this.draw(), this.showValue();
  }

  draw() {
    if (this.drawing || !this.tiles) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (this.tiles && this.at) this.paint(this.canvas.getContext("2d"), window.devicePixelRatio || 1);
    });
  }

  paint(context, ratio) {
    const theme = this.app.theme(), level = this.level, visible = this.inView(level);
    this.tiles.request([`${this.tiles.top}/0/0`, ...visible.map(([x, y]) => `${level}/${x}/${y}`), ...this.pinned(level)]);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.background;
    context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    this.top = this.scaleTop(level, visible);
    context.save();
    this.clip(context, theme);
    let missing = 0, sampled = 1;
    for (const [x, y] of visible) {
      const tile = this.paintTile(context, level, x, y);
      if (!tile || tile.level !== level) missing++;
      if (tile) sampled = Math.max(sampled, tile.sampled);
    }
    this.outline(context, theme, level, visible);
    this.digits(context, level);
    context.restore();
    this.crosshair(context, theme);
    this.rulers(context, theme);
    this.strips(context, theme);
    this.extrapolation(context, theme);
    this.bar(context, theme);
    this.describe(level, missing, sampled);
  }

  // Clip to the matrix, and fill it with the colour of tiles that aren't loaded.
  clip(context, theme) {
    const { x, y, k, v } = this.at;
    context.beginPath();
    context.rect(this.left, this.above, this.wide, this.high);
    context.clip();
    context.beginPath();
    context.rect(x, y, k * this.s, v * this.t);
    context.clip();
    context.fillStyle = theme.loading;
    context.fillRect(this.left, this.above, this.wide, this.high);
    context.imageSmoothingEnabled = false;
    context.strokeStyle = theme.line;
  }

  // Paint a tile, or the same part of a coarser tile until it is loaded; return the tile that was painted, or null.
  paintTile(context, level, x, y) {
    const { side } = this.app.info, { pooling, scale } = this.app.state, key = `${pooling} ${scale} ${this.top}`;
    for (let up = level; up <= this.tiles.top; up++) {
      const shift = 2 ** (up - level), [tx, ty] = [Math.floor(x / shift), Math.floor(y / shift)];
      const tile = this.tiles.get(up, tx, ty);
      if (!tile) continue;
      if (tile.key !== key) tile.key = key, tile.image = this.app.colors.paint(tile, pooling, this.top, scale);
      const area = this.box(level, x, y, side, side), box = this.box(up, tx, ty, tile.cols, tile.rows);
      context.save();
      if (up > level) context.beginPath(), context.rect(...area), context.clip();
      context.fillStyle = this.app.hatch(context), context.fillRect(...box); // visible where the tile is masked, and so transparent
      context.drawImage(tile.image, ...box);
      context.restore();
      tile.level = up;
      return tile;
    }
    return null;
  }

  // The rectangle of the first cols × rows cells of a tile: x, y, width and height in whole pixels.
  box(level, x, y, cols, rows) {
    const cell = 2 ** level, side = this.app.info.side * cell, { x: dx, y: dy, k, v } = this.at;
    const edges = [dx + k * x * side, dy + v * y * side, dx + k * (x * side + cols * cell), dy + v * (y * side + rows * cell)];
    const [a, b, c, d] = edges.map(Math.round);
    return [a, b, c - a, d - b];
  }

  // The upper end of the colour scale: the largest weight in view, rounded up.
  scaleTop(level, visible) {
    const { pooling } = this.app.state;
    let largest = 0, found = false;
    for (const [x, y] of visible) {
      const tile = this.tiles.ready.get(`${level}/${x}/${y}`);
      if (tile) largest = Math.max(largest, Tiles.largest(tile, pooling)), found = true;
    }
    const coarse = this.tiles.ready.get(`${this.tiles.top}/0/0`);
    if (!found && coarse) largest = Tiles.largest(coarse, pooling);
    return largest ? Math.min(1, roundUp(largest)) : this.top ?? 1;
  }

  outline(context, theme, level, visible) {
    const { k, v } = this.at, cell = 2 ** level * k;
    context.strokeStyle = theme.outline;
    for (const [x, y] of visible) {
      const tile = this.tiles.ready.get(`${level}/${x}/${y}`);
      if (!tile) continue;
      const [left, above] = this.box(level, x, y, 0, 0);
      context.save();
      context.translate(left, above);
      context.scale(cell, 2 ** level * v);
      context.lineWidth = 1 / cell;
      context.stroke(Tiles.outline(tile));
      context.restore();
    }
  }

  // Draw the weights as numbers if they fit into their cells.
  digits(context, level) {
    const { x: dx, y: dy, k, v } = this.at, { pooling, scale } = this.app.state, { side } = this.app.info;
    if (level || k < 44 || v < 14) return;
    context.font = `${k < 60 ? 11 : 13}px system-ui, sans-serif`;
    context.textAlign = "center", context.textBaseline = "middle";
    const [i0, i1] = this.between(this.above, this.high, dy, this.t, v), [j0, j1] = this.between(this.left, this.wide, dx, this.s);
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const tile = this.tiles.ready.get(`0/${Math.floor(j / side)}/${Math.floor(i / side)}`);
        const weight = tile?.[pooling][(i % side) * tile.cols + (j % side)];
        if (weight === undefined || weight !== weight) continue;
        context.fillStyle = this.app.colors.textColor(ColorScale.place(weight, this.top, scale));
        context.fillText(format(weight, 2), dx + k * (j + 0.5), dy + v * (i + 0.5));
      }
    }
  }

  // The range of tokens in view: the first, and the one after the last.
  between(from, length, shift, size, k = this.at.k) {
    return [Math.max(0, Math.floor((from - shift) / k)), Math.min(size, Math.ceil((from + length - shift) / k))];
  }

  // Draw rulers. They name every token if there is room, else some of them with their positions.
  rulers(context, theme) {
    const { x: dx, y: dy, k, v } = this.at, { keys, queries } = this.tokens;
    context.save();
    context.fillStyle = theme.background;
    context.fillRect(0, 0, this.left, this.canvas.clientHeight);
    context.fillRect(0, 0, this.canvas.clientWidth, this.above);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle", context.textAlign = "right";
    const label = (names, n, all) => {
      if (!names) return count(n);
      const name = isolated(short(names[n], 13));
      return all ? name : `${name} ${count(n)}`;
    };
    const step = (size, single, several) => (size >= single ? 1 : roundUp(several / size));
    const rows = step(v, 13, 30), cols = step(k, 14, keys ? 104 : 56), chosen = this.app.cell();
    const line = (x, y, width, height) => context.fillRect(x, y, width, height);
    context.save();
    context.beginPath(), context.rect(0, this.above, this.left, this.high), context.clip();
    const [i0, i1] = this.between(this.above, this.high, dy, this.t, v);
    for (let i = Math.ceil(i0 / rows) * rows; i < i1; i += rows) {
      const y = dy + v * (i + 0.5), text = y < this.above ? y : Math.max(y, this.above + 7);
      context.fillStyle = chosen?.[0] === i ? theme.accent : theme.text;
      context.fillText(label(queries, i, rows === 1), this.left - STRIP - 6, text, this.left - STRIP - 8);
      line(this.left - STRIP - 4, y, 3, 1);
    }
    context.restore();
    context.beginPath(), context.rect(this.left, 0, this.wide, this.above), context.clip();
    const [j0, j1] = this.between(this.left, this.wide, dx, this.s), upright = cols === 1 && (keys !== null || k < 40);
    for (let j = Math.ceil(j0 / cols) * cols; j < j1; j += cols) {
      const x = dx + k * (j + 0.5);
      context.fillStyle = chosen?.[1] === j ? theme.accent : theme.text;
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
    context.fillStyle = theme.muted, context.font = "11px system-ui, sans-serif";
    context.textAlign = "left", context.textBaseline = "middle";
    context.fillText("queries ↓", 6, this.above - STRIP - 6);
    context.textAlign = "right";
    context.fillText("keys →", this.left - 4, 10);
    context.restore();
  }

  // Draw the weight that each key receives, at the top, and the entropy of each query, at the left. Where several tokens share a
  // pixel, the largest number is drawn.
  strips(context, theme) {
    const { x: dx, y: dy } = this.at;
    context.fillStyle = theme.muted, context.font = "11px system-ui, sans-serif", context.textBaseline = "middle";
    context.textAlign = "left";
    if (!this.marginals) {
      context.fillText("received: …", this.left + 4, this.above - STRIP / 2);
      return;
    }
    const strip = (numbers, shift, from, length, size, bar) => {
      const [first, last] = this.between(from, length, shift, numbers.length, size), pixels = new Map();
      let largest = 0;
      for (let n = first; n < last; n++) {
        const at = Math.floor(shift + size * n + 1e-3); // the view in a link is rounded
        if (!(pixels.get(at) >= numbers[n])) pixels.set(at, numbers[n]);
        largest = Math.max(largest, numbers[n]);
      }
      const thick = Math.max(1, Math.ceil(size) - (size > 5 ? 1 : 0));
      context.fillStyle = theme.bars;
      for (const [at, number] of pixels) {
        const first = Math.max(from, at), last = Math.min(at + thick, from + length);
        if (first < last) bar(first, last - first, largest ? (number / largest) * (STRIP - 6) : 0);
      }
      return largest;
    };
    const received = strip(this.marginals.received, dx, this.left, this.wide, this.at.k, (at, thick, high) =>
      context.fillRect(at, this.above - 2 - high, thick, high));
    const entropy = strip(this.marginals.entropy, dy, this.above, this.high, this.at.v, (at, thick, wide) =>
      context.fillRect(this.left - 2 - wide, at, wide, thick));
    context.fillStyle = theme.muted;
    context.fillText("received,", this.left + this.wide + 4, this.above - STRIP + 8, BAR - 6);
    context.fillText(`to ${format(received)}`, this.left + this.wide + 4, this.above - STRIP + 22, BAR - 6);
    context.textAlign = "right";
    context.fillText(`entropy, to ${format(entropy)} nats`, this.left - 3, this.above - 10, this.left - 6);
  }

  // Draw the lines after which positions are beyond the trained context.
  extrapolation(context, theme) {
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
    const text = `extrapolated from token ${count(from)} on`, wide = context.measureText(text).width;
    const at = [Math.max(x, this.left) + 4, Math.max(y, this.above) + 4];
    context.fillStyle = theme.background, context.fillRect(at[0] - 2, at[1] - 2, wide + 4, 15);
    context.fillStyle = theme.accent, context.fillText(text, ...at);
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
      for (const at of k < 16 ? [0.5] : [0, 1]) { // wide cells, which may have numbers, get two lines
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
    for (let n = 0; n < high; n++) context.fillStyle = this.app.colors.css(1 - n / high), context.fillRect(x, y + n, 12, 1);
    context.fillStyle = theme.text, context.font = "11px system-ui, sans-serif";
    context.textAlign = "left", context.textBaseline = "middle";
    const parts = scale === "log" ? [0, 1, 2, 3, 4].map((n) => [n / DECADES, this.top * 10 ** (n - DECADES)])
      : [0, 0.25, 0.5, 0.75, 1].map((n) => [n, n * this.top]);
    for (const [at, weight] of parts) {
      const label = scale === "log" && at === 0 ? `≤ ${format(weight, 1)}` : format(weight, 2);
      context.fillText(label, x + 16, Math.min(y + high - 5, Math.max(y + 5, y + high * (1 - at))), BAR - 30);
    }
    context.fillStyle = this.app.hatch(context), context.fillRect(x, y + high + 14, 12, 12);
    context.fillStyle = theme.muted, context.fillText("masked", x + 16, y + high + 20, BAR - 30);
  }

  // -- text -------------------------------------------------------------------------------------

  describe(level, missing, sampled) {
    const side = 2 ** level, parts = [], way = this.app.state.pooling === "mean" ? "mean" : "largest";
    parts.push(level ? `pooled: each cell shows the ${way} of ${count(side)} × ${count(side)} weights` : "single weights");
    if (sampled > 1) parts.push(`estimated from 1 query in ${count(sampled)}`);
    if (!this.complete) parts.push(`scanning: ${Math.floor(100 * this.progress)} %`);
    if (missing) parts.push(`loading ${plural(missing, "tile")}`);
    parts.push(this.layer.mask);
    if (this.tiles.failed) parts.push(this.tiles.failed), this.app.showError(new ViewerError(this.tiles.failed));
    this.note.textContent = parts.join(" · ");
    this.progressBar.value = this.progress, this.progressBar.hidden = this.complete;
    Object.assign(this.note.dataset, { level, missing, sampled, complete: this.complete });
  }

  name(names, n, last = n) {
    const name = (m) => `${count(m)}${names ? ` ${isolated(`“${names[m]}”`)}` : ""}`;
    return last > n ? `${name(n)} to ${name(last)}` : name(n);
  }

  // Show the value under the crosshair: at once as the tile has it, rounded to float16; then exactly, if it is a single weight.
  async showValue() {
    const cell = this.app.cell();
    if (!this.tiles || !this.at || !cell || cell[0] >= this.t || cell[1] >= this.s) {
      this.reading.replaceChildren("Hover over a weight; click to pin it.");
      this.reading.dataset.weight = "";
      return;
    }
    const [i, j] = cell, level = this.level, side = 2 ** level, cells = this.app.info.side;
    const [r, c] = [i, j].map((n) => Math.floor(n / side));
    const tile = this.tiles.ready.get(`${level}/${Math.floor(c / cells)}/${Math.floor(r / cells)}`);
    const weight = tile?.[this.app.state.pooling][(r % cells) * tile.cols + (c % cells)];
    const last = (n, size) => Math.min(size, (Math.floor(n / side) + 1) * side) - 1;
    const exact = tile?.exact && !level, { run, layer, head, batch } = this.place;
    const address = `weight/${run}/${layer}/${head}/${i}/${j}/${batch}`;
    if (!level && this.known?.address === address) return this.writeValue(i, i, j, j, this.known.weight, true);
    this.writeValue(i - (i % side), last(i, this.t), j - (j % side), last(j, this.s), weight, exact);
    const request = (this.request = {});
    if (level || !tile || exact || this.app.client instanceof PageClient) return;
    await new Promise((resolve) => setTimeout(resolve, 30));
    if (request !== this.request) return;
    try {
      const { weight: found } = await json(this.app.client, address);
      this.known = { address, weight: found ?? NaN };
      if (request === this.request) this.writeValue(i, i, j, j, this.known.weight, true);
    } catch (error) {
      this.app.showError(error);
    }
  }

  writeValue(i0, i1, j0, j1, weight, exact) {
    const { keys, queries } = this.tokens, pooled = i1 > i0 || j1 > j0;
    const way = pooled ? (this.app.state.pooling === "mean" ? "mean weight " : "largest weight ") : "weight ";
    const value = weight === undefined ? "…" : weight !== weight ? "masked" : exact ? format(weight, 7) : `≈ ${format(weight, 3)}`;
    const more = [];
    if (this.marginals && !pooled) {
      more.push(` · the key receives ${format(this.marginals.received[j0], 4)}`);
      more.push(` · the query's entropy is ${format(this.marginals.entropy[i0], 4)} nats`);
    }
    this.reading.replaceChildren(
      "query ", make("b", {}, this.name(queries, i0, i1)), " → key ", make("b", {}, this.name(keys, j0, j1)),
      `: ${way}`, make("b", { class: "value" }, value), ...more,
    );
    Object.assign(this.reading.dataset, { query: i0, key: j0, weight: weight === undefined ? "" : String(weight), exact: !!exact });
  }

  // Return an image of the canvas with its title, value and note.
  toImage() {
    const ratio = window.devicePixelRatio || 1, canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    const head = 22, foot = 40;
    canvas.width = this.canvas.width, canvas.height = this.canvas.height + (head + foot) * ratio;
    const theme = this.app.theme();
    context.fillStyle = theme.background, context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.canvas, 0, head * ratio);
    context.scale(ratio, ratio);
    context.fillStyle = theme.text, context.font = "14px system-ui, sans-serif", context.textBaseline = "middle";
    context.fillText(this.title.textContent, 8, head / 2);
    context.font = "12px system-ui, sans-serif";
    context.fillText(this.reading.dataset.weight ? this.reading.textContent : "", 8, canvas.height / ratio - 28);
    context.fillText(this.note.textContent, 8, canvas.height / ratio - 11);
    return canvas;
  }
}
