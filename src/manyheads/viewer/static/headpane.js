// A pane with the matrix of a head: its weights with zoom, rulers, strips, a crosshair, and the weight under the crosshair.

class HeadPane {
  // page: the HeadPage, with the view and the scale of colours that panes share.
  constructor(root, app, page) {
    Object.assign(this, { app, page });
    this.canvas = make("canvas", { class: "map", tabindex: 0, role: "application", "aria-roledescription": "matrix" });
    this.minimap = new Minimap((x, y) => this.page.setView({ ...this.geometry.view, x, y }));
    this.title = make("h2", { class: "pane-title" });
    this.habit = make("div", { class: "habit" });
    this.note = make("div", { class: "note", role: "status" });
    this.reading = make("div", { class: "reading", "aria-live": "polite" });
    this.progressBar = make("progress", { max: 1, "aria-label": "progress of the scan" });
    this.head = make("div", { class: "pane-head" }, this.title, this.habit);
    this.element = make("section", { class: "pane" }, this.head, this.reading,
      make("div", { class: "stage" }, this.canvas, this.minimap.canvas),
      make("div", { class: "foot" }, this.progressBar, this.note));
    root.append(this.element);
    this.gestures = new Gestures(this.canvas, {
      move: (dx, dy) => this.changeView(() => this.geometry.move(dx, dy)),
      zoom: (at, factor) => this.changeView(() => this.geometry.zoomAt(at, factor)),
      zoomIn: (at) => this.changeView(() => this.geometry.zoomAt(at, 4)),
      point: (at) => this.point(at),
      choose: (at) => this.app.pin(this.geometry.cellAt(at)),
      end: () => this.page.saveView(),
    });
  }

  // Show a head. place: {run, layer, head, batch}. other: null, or the place of a head to subtract.
  open(place, other = null) {
    this.close();
    Object.assign(this, { place, other, layer: this.app.layer(place) });
    Object.assign(this, { marginals: null, progress: 0, isComplete: false, hasNaN: false, isLabelled: false, isDescribed: Boolean(other), known: null, largest: null });
    this.tokens = new Tokens({ queries: null, keys: null, first: null });
    this.grid = new TileGrid(this.layer, this.app.info.side);
    const changed = () => this.update(), load = (head) => new Tiles(this.app.client, head, this.grid, changed);
    this.tiles = other ? new DifferenceTiles(load(place), load(other)) : load(place);
    const failed = (error) => this.app.showError(error), size = this.layer.shape.slice(2);
    this.exact = [place, other].filter(Boolean).map((head) => new ExactWeights(this.app.client, head, size, changed, failed));
    this.writeTitle();
    this.measure();
    const { tiles } = this;
    this.app.tokens(place).then((tokens) => {
      if (tiles !== this.tiles) return;
      this.tokens = tokens;
      this.isLabelled = true;
      this.measure();
      this.showValue();
    });
    this.describeHabit(tiles);
    this.poll(tiles);
  }

  // Write the name of the head. The header has the model and the text.
  writeTitle() {
    const { place, other } = this;
    this.title.replaceChildren(...(other ? ["difference: ", ...this.nameHead(place), " − "] : []), ...this.nameHead(other ?? place));
    this.canvas.setAttribute("aria-label", `attention weights of ${this.title.textContent}; shift and arrows read single weights`);
  }

  // Whether runs of different texts are compared.
  get comparesTexts() {
    const { run, second } = this.app.state, { batch } = this.place;
    return this.app.textOf(run, batch) !== this.app.textOf(second?.run ?? run, batch);
  }

  // The name of a head as elements: its numbers first, then its run if there are several, with its text if these differ, and last
  // its module.
  nameHead(place) {
    const { runs } = this.app.info, text = this.comparesTexts && this.app.textOf(place.run, place.batch), { number, name, heads } = this.app.layer(place);
    const source = runs.length > 1 ? ` · ${runs[place.run].title}` : "", quoted = text ? [", “", make("bdi", {}, short(text, 32)), "”"] : [];
    return [`layer ${number}, head ${heads[place.head]}${source}`, ...quoted, make("span", { class: "module" }, ` ${name}`)];
  }

  close() {
    this.tiles?.close();
    this.exact?.forEach((weights) => weights.close());
    this.tiles = this.request = null;
  }

  remove() {
    this.close();
    this.element.remove();
  }

  // Request the progress of the scans until they are complete.
  async poll(tiles) {
    const addresses = [this.place, this.other].filter(Boolean).map(({ run, layer, head, batch }) => `${run}/${layer}/${head}/${batch}`);
    while (tiles === this.tiles) {
      try {
        const scans = await Promise.all(addresses.map((address) => json(this.app.client, `scan/${address}`)));
        const isComplete = scans.every(({ complete }) => complete);
        const marginals = isComplete && !this.other ? decodeMarginals(await this.app.client.bytes(`marginals/${addresses[0]}`)) : null;
        if (tiles !== this.tiles) return;
        Object.assign(this, { progress: Math.min(...scans.map(({ progress }) => progress)), isComplete, marginals });
        this.hasNaN = Boolean(marginals?.entropy.some(Number.isNaN));
      } catch (error) {
        if (tiles === this.tiles) this.app.showError(error);
        return;
      }
      if (this.isComplete) {
        tiles.removeSampled();
        this.showValue();
        this.page.drawOthers(this); // whose strips have the same scale
        this.page.scanned(this);
        return;
      }
      this.draw();
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
  }

  // Scan the head again, because the server has evicted the results of its scan, or because a tile that was requested before the
  // end of the scan has arrived after it.
  rescan() {
    Object.assign(this, { isComplete: false, progress: 0 });
    this.draw(); // the pane says at once that it is incomplete
    this.poll(this.tiles);
  }

  // Say in words what the head attends to, if its scores are known and high.
  async describeHabit(tiles) {
    this.habit.textContent = this.other ? "colours: blue where the second head has more weight, red where the first has more" : "";
    if (this.other) return;
    const { run, layer, head, batch } = this.place;
    // Without scores, such as in an exported page of a part of a run, there is nothing to say.
    const { patterns } = await this.app.load(`scores/${run}/${layer}/${batch}`).catch(() => ({}));
    if (tiles !== this.tiles) return;
    this.habit.textContent = this.habit.title = patterns?.[head] ?? "";
    this.isDescribed = true;
    this.page.layOut(); // the words may need another line
  }

  // -- layout and view ----------------------------------------------------------------------------

  // Create the geometry, whose rulers depend on whether tokens have labels.
  measure() {
    const { shape, shifts, finest } = this.layer, isLabelled = Boolean(this.tokens.keys || this.tokens.queries);
    this.geometry = new Geometry(shape.slice(2), shifts, finest, { isLabelled, hasStrips: !this.other });
    this.page.layOut();
  }

  // Set the space that the canvas may take, in pixels, and take what the matrix needs. isPhone: whether its rulers are narrow.
  setSpace(width, height, isPhone) {
    const ratio = window.devicePixelRatio || 1;
    this.geometry.setSpace(width, height, isPhone, this.page.hasBar(this));
    this.geometry.setView(this.app.state.view);
    const size = [Math.round(this.geometry.width), Math.round(this.geometry.height)];
    Object.assign(this.canvas.style, { width: `${size[0]}px`, height: `${size[1]}px` });
    this.canvas.width = size[0] * ratio;
    this.canvas.height = size[1] * ratio;
    const { left, above, wide, high } = this.geometry;
    this.canvas.dataset.area = [left, above, wide, high].join();
    this.update();
  }

  setView(view) {
    this.geometry.setView(view);
    this.afterMove();
  }

  // Change the view by a gesture.
  changeView(change) {
    change();
    this.page.setView(this.geometry.isWhole ? null : this.geometry.view);
  }

  afterMove() {
    if (this.pointer) this.app.hover(this.geometry.cellAt(this.pointer)); // the matrix has moved under the pointer
    this.update();
  }

  point(at) {
    this.pointer = at;
    this.app.hover(at && this.geometry.cellAt(at));
  }

  // The level to draw. Until the scan is complete, the coarsest level replaces those that the scan computes.
  get level() {
    const level = this.grid.levelFor([this.geometry.v, this.geometry.k]);
    return this.isComplete || this.grid.isFine(level, this.app.info.max_weights) ? level : this.grid.top;
  }

  // The tiles in view, as [x, y], starting with those nearest to the middle.
  inView(level) {
    const { queries, keys, view } = this.geometry, [rows, cols] = this.grid.cell(level), { side } = this.app.info;
    const distance = ([x, y]) => Math.hypot((x + 0.5) * side * cols - view.x, (y + 0.5) * side * rows - view.y);
    return this.grid.inView(level, queries, keys).sort((a, b) => distance(a) - distance(b));
  }

  // The crosshair's cell as [query, key], or null if this matrix has no such cell.
  get cell() {
    const cell = this.app.cell();
    return cell && cell[0] < this.geometry.t && cell[1] < this.geometry.s ? cell : null;
  }

  // The tile of the pinned crosshair, which is needed even if it is out of view, as a list of one address or none.
  pinned(level) {
    const { pin } = this.app.state, { t, s } = this.geometry;
    if (!pin || pin[0] >= t || pin[1] >= s) return [];
    const { x, y } = this.grid.find(level, pin);
    return [`${level}/${x}/${y}`];
  }

  // -- drawing ------------------------------------------------------------------------------------

  update() {
    this.draw();
    this.showValue();
  }

  draw() {
    if (this.drawing || !this.tiles) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (this.tiles) this.paint(this.canvas.getContext("2d"), window.devicePixelRatio || 1);
    });
  }

  get colors() {
    return this.other ? this.app.differenceColors : this.app.colors;
  }

  paint(context, ratio) {
    const theme = this.app.theme(), { level, geometry } = this, visible = this.inView(level);
    this.tiles.request([`${this.grid.top}/0/0`, ...visible.map(([x, y]) => `${level}/${x}/${y}`), ...this.pinned(level)]);
    this.page.setLargest(this, this.largestInView(level, visible));
    this.top = this.page.top(this);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.background;
    context.fillRect(0, 0, geometry.width, geometry.height);
    const found = this.paintCells(context, theme, level, visible);
    drawRulers(context, geometry, this.tokens, this.cell, theme);
    if (!this.other) drawStrips(context, geometry, this.marginals, this.page.largestMarginals, theme, this.page.hasBar(this));
    this.isMasked = visible.some(([x, y]) => hasMasked(this.tiles.get(level, x, y)));
    if (this.page.hasBar(this)) this.paintBar(context, theme, this.page.panes.some(({ isMasked }) => isMasked));
    this.minimap.draw(geometry, theme, (small, width, height) => this.paintSmall(small, width, height));
    if (this.isComplete && found.sampled > 1) this.rescan();
    this.describe(level, found);
  }

  paintCells(context, theme, level, visible) {
    const { left, above, right, bottom } = this.geometry;
    context.save();
    context.beginPath();
    context.rect(left, above, right - left, bottom - above);
    context.clip();
    context.fillStyle = theme.loading;
    context.fillRect(left, above, right - left, bottom - above);
    context.imageSmoothingEnabled = false;
    let missing = 0, sampled = 1;
    for (const [x, y] of visible) {
      const tile = this.paintTile(context, level, x, y);
      if (!tile || tile.level !== level) missing++;
      if (tile) sampled = Math.max(sampled, tile.sampled);
    }
    this.paintOutline(context, theme, level, visible);
    const unwritten = this.paintDigits(context, level);
    this.paintExtrapolation(context, theme);
    this.paintCrosshair(context);
    context.restore();
    return { missing, sampled, unwritten };
  }

  // Paint a tile, or the same part of a coarser tile until it is loaded; return the tile that was painted, or null.
  paintTile(context, level, x, y) {
    const { side } = this.app.info, [rows, cols] = this.grid.cell(level);
    for (let up = level; up <= this.grid.top; up++) {
      const place = this.grid.find(up, [y * side * rows, x * side * cols]);
      const tile = this.tiles.get(up, place.x, place.y);
      if (!tile) continue;
      const area = this.box(level, x, y, side, side), box = this.box(up, place.x, place.y, tile.cols, tile.rows);
      context.save();
      context.beginPath();
      context.rect(...area);
      context.clip();
      context.fillStyle = this.app.hatch(context);
      context.fillRect(...box); // visible where the tile is masked, and so transparent
      context.drawImage(this.imageOf(tile), ...box);
      context.restore();
      tile.level = up;
      return tile;
    }
    return null;
  }

  imageOf(tile) {
    const { pooling, scale } = this.app.state, key = `${pooling} ${scale} ${this.top}`;
    if (tile.key !== key) {
      tile.key = key;
      tile.image = this.colors.paint(tile, pooling, this.top, scale);
    }
    return tile.image;
  }

  // The coarsest tile in colours that end at its own largest weight, whatever is in view.
  smallImageOf(tile) {
    const { pooling, scale } = this.app.state, { t, s } = this.geometry;
    const top = roundUp(this.grid.largest(tile, tile[pooling], this.grid.top, [0, 0], [0, t], [0, s])) || 1, key = `${pooling} ${scale} ${top}`;
    if (tile.smallKey !== key) {
      tile.smallKey = key;
      tile.smallImage = this.colors.paint(tile, pooling, top, scale);
    }
    return tile.smallImage;
  }

  // Paint the whole matrix from its coarsest tile.
  paintSmall(context, width, height) {
    const tile = this.tiles.get(this.grid.top, 0, 0);
    if (!tile) return;
    const [rows, cols] = this.grid.cell(this.grid.top), { t, s } = this.geometry;
    const box = [0, 0, (tile.cols * cols * width) / s, (tile.rows * rows * height) / t];
    context.fillStyle = this.app.hatch(context);
    context.fillRect(...box);
    context.drawImage(this.smallImageOf(tile), ...box);
  }

  // The rectangle of the first cols × rows cells of a tile: x, y, width and height in whole pixels.
  box(level, x, y, cols, rows) {
    const [height, width] = this.grid.cell(level), { side } = this.app.info, { x: dx, y: dy, k, v } = this.geometry;
    const edges = [
      dx + k * x * side * width, dy + v * y * side * height,
      dx + k * (x * side + cols) * width, dy + v * (y * side + rows) * height,
    ];
    const [a, b, c, d] = edges.map(Math.round);
    return [a, b, c - a, d - b];
  }

  // The largest weight of the cells in view, null if none of them is loaded.
  largestInView(level, visible) {
    const { pooling } = this.app.state, { queries, keys } = this.geometry;
    let largest = null;
    for (const place of visible) {
      const tile = this.tiles.get(level, ...place);
      if (tile) largest = Math.max(largest ?? 0, this.grid.largest(tile, tile[pooling], level, place, queries, keys));
    }
    const coarse = this.tiles.get(this.grid.top, 0, 0);
    if (largest === null && coarse) largest = this.grid.largest(coarse, coarse[pooling], this.grid.top, [0, 0], queries, keys);
    return largest;
  }

  paintOutline(context, theme, level, visible) {
    const { k, v } = this.geometry, [rows, cols] = this.grid.cell(level), size = [k * cols, v * rows];
    context.strokeStyle = theme.outline;
    for (const [x, y] of visible) {
      const tile = this.tiles.get(level, x, y);
      if (!tile) continue;
      const [left, above] = this.box(level, x, y, 0, 0);
      context.save();
      context.translate(left, above);
      context.scale(...size);
      context.lineWidth = 1 / Math.max(...size);
      context.stroke(outlineOf(tile));
      context.restore();
    }
  }

  // Draw the weights as numbers if they fit into their cells; return how many of them aren't loaded.
  paintDigits(context, level) {
    const { geometry } = this, { x: dx, y: dy, k, v, queries, keys } = geometry, { scale } = this.app.state;
    if (level || k < 34 || v < 14) return 0;
    const hasExact = !(this.app.client instanceof PageClient), digits = k < 60 ? 2 : 3;
    if (hasExact) for (const weights of this.exact) weights.request(queries, keys);
    context.font = `${k < 44 ? 10 : k < 60 ? 11 : 13}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    let unwritten = 0;
    for (let i = queries[0]; i < queries[1]; i++) {
      for (let j = keys[0]; j < keys[1]; j++) {
        if (!geometry.hasInView([i, j])) continue; // a number that is cut reads as another one
        const [weight, isExact] = hasExact ? [this.exactWeight([i, j]), true] : this.tileWeight([i, j]);
        if (weight === undefined) unwritten++;
        if (weight === undefined || weight !== weight) continue;
        context.fillStyle = this.colors.textColor(this.colors.place(weight, this.top, scale));
        const text = this.other ? number(weight, 2) : formatCell(weight, digits, isExact);
        context.fillText(text, dx + k * (j + 0.5), dy + v * (i + 0.5), k - 4);
      }
    }
    return unwritten;
  }

  // A single weight, or the difference of both heads' weights: exact, undefined until it is loaded.
  exactWeight(cell) {
    const [weight, other] = this.exact.map((weights) => weights.get(cell));
    return this.other ? subtract(weight, other) : weight;
  }

  // A single weight as a tile has it, and whether it is exact.
  tileWeight(cell) {
    const { x, y, row, col } = this.grid.find(0, cell), tile = this.tiles.get(0, x, y);
    return [tile?.max[row * tile.cols + col], Boolean(tile?.exact)];
  }

  // Draw the lines after which positions are beyond the trained context.
  paintExtrapolation(context, theme) {
    const from = this.app.info.runs[this.place.run].extrapolated_from, { t, s, x: dx, y: dy, k, v, left, above } = this.geometry;
    if (from === null || from >= Math.max(t, s)) return;
    const x = dx + k * from, y = dy + v * from;
    context.save();
    context.strokeStyle = theme.accent;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(x, dy);
    context.lineTo(x, dy + v * t);
    context.moveTo(dx, y);
    context.lineTo(dx + k * s, y);
    context.stroke();
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    const text = `extrapolated from token ${count(from)} on`, wide = context.measureText(text).width, { right, bottom } = this.geometry;
    const isBelow = y > above && y < bottom, isBeside = x > left && x < right;
    if (!isBelow && !isBeside) return context.restore(); // neither line is in view
    const least = isBeside ? x + 4 : left + 4, lowest = bottom - 18; // below the line of queries, or at the end of the line of keys
    const at = [Math.max(left + 4, Math.min(least, right - wide - 4)), isBelow ? Math.min(y + 4, lowest) : lowest];
    context.fillStyle = theme.background;
    context.fillRect(at[0] - 2, at[1] - 2, wide + 4, 15);
    context.fillStyle = theme.accent;
    context.fillText(text, ...at);
    context.restore();
  }

  // Draw white lines in black ones, which are legible on bright and dark cells.
  paintCrosshair(context) {
    if (!this.cell) return;
    const { x: dx, y: dy, k, v, left, above, right, bottom } = this.geometry, [i, j] = this.cell;
    const x = dx + k * j, y = dy + v * i, edges = (size) => (size < 16 ? [0.5] : [0, 1]); // wide cells, which may have numbers, get two lines
    for (const [style, width] of [["rgb(0 0 0 / 0.6)", 3], ["#fff", 1]]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.beginPath();
      for (const edge of edges(v)) {
        context.moveTo(left, y + edge * v);
        context.lineTo(x - 1, y + edge * v);
        context.moveTo(x + k + 1, y + edge * v);
        context.lineTo(right, y + edge * v);
      }
      for (const edge of edges(k)) {
        context.moveTo(x + edge * k, above);
        context.lineTo(x + edge * k, y - 1);
        context.moveTo(x + edge * k, y + v + 1);
        context.lineTo(x + edge * k, bottom);
      }
      context.stroke();
      context.strokeRect(x - 0.5, y - 0.5, k + 1, v + 1);
    }
  }

  // isMasked: cells in view may be masked, so that the bar has a legend for them.
  paintBar(context, theme, isMasked) {
    const { right, above, high } = this.geometry, x = right + 14, length = Math.min(220, Math.max(high, LEAST_BAR) - 40); // the legend is below
    const bar = { colors: this.colors, top: this.top, x, y: above, length, thickness: 12, text: theme.text };
    const { scale } = this.app.state;
    drawColorBar(context, { ...bar, scale, ticks: this.colors.ticks(this.top, scale) });
    if (!isMasked) return;
    context.fillStyle = this.app.hatch(context);
    context.fillRect(x, above + length + 14, 12, 12);
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = theme.muted;
    context.fillText("masked", x + 18, above + length + 20, BAR - 34);
    if (this.hasNaN) context.fillText("or NaN", x + 18, above + length + 33, BAR - 34);
  }

  // -- text ---------------------------------------------------------------------------------------

  // found: how many tiles and numbers are missing, and from one query in how many the tiles are estimated.
  describe(level, { missing, sampled, unwritten }) {
    const [rows, cols] = this.grid.cell(level), parts = [this.page.rankingOf(this)].filter(Boolean), way = this.app.state.pooling === "mean" ? "mean" : "largest";
    const whose = this.other ? `difference of the ${way} weights` : way;
    parts.push(level ? `pooled: each cell shows the ${whose} of ${count(rows)} × ${count(cols)} weights` : "single weights");
    if (this.layer.finest) {
      const [least, wide] = this.grid.cell(this.layer.finest);
      parts.push(`this file has cells of at least ${count(least)} × ${count(wide)} weights`);
    }
    if (sampled > 1) parts.push(`estimated from 1 query in ${count(sampled)}`);
    if (!this.isComplete) parts.push(`scanning: ${Math.floor(100 * this.progress)} %`);
    if (missing) parts.push(`loading ${plural(missing, "tile")}`);
    parts.push(this.layer.mask);
    if (this.tiles.failed) {
      parts.push(this.tiles.failed);
      this.app.showError(new ViewerError(this.tiles.failed));
    }
    this.note.textContent = parts.join(" · ");
    this.note.title = this.note.textContent;
    this.progressBar.value = this.progress;
    this.progressBar.hidden = this.isComplete;
    const { queries, keys } = this.geometry;
    Object.assign(this.note.dataset, { level, missing, unwritten, sampled, complete: this.isComplete, labelled: this.isLabelled, described: this.isDescribed });
    Object.assign(this.note.dataset, { top: this.top, queries: queries.join(), keys: keys.join() });
  }

  // The name of a token, or of the tokens from n to last. offset: the position of token 0, null if tokens have no labels.
  name(tokens, offset, n, last = n) {
    const name = (m) => `${count(m)}${offset === null ? "" : ` ${tokens.quoted(m + offset)}`}`;
    return last > n ? `${name(n)} to ${name(last)}` : name(n);
  }

  nameQuery(first, last = first) {
    return this.name(this.tokens.ofQueries, this.tokens.queries && this.tokens.queryOffset, first, last);
  }

  nameKey(first, last = first) {
    return this.name(this.tokens, this.tokens.keys && 0, first, last);
  }

  // Show the value under the crosshair. A pinned weight is shown itself at every zoom, and a cell under the pointer as it is pooled.
  // Of a single weight, the tile's number is shown first, rounded to float16, and then the exact one.
  async showValue() {
    const request = (this.request = {}); // a response to an earlier request is of no use any more
    if (!this.tiles || !this.cell) {
      this.reading.replaceChildren(matchMedia("(hover: none)").matches ? "Tap a weight to pin it." : "Hover over a weight; click to pin it.");
      this.reading.title = "";
      this.reading.dataset.weight = "";
      return;
    }
    const { cell, level, grid } = this, [i, j] = cell, [rows, cols] = grid.cell(level), addresses = this.addresses(cell);
    const isPin = !this.app.hovered && !this.layer.finest;
    if ((isPin || !level) && this.known?.address === addresses[0]) return this.writeValue([i, i], [j, j], this.known.weights, this.known.isExact);
    const { weights, isExact } = this.readTiles(level, cell);
    if (level && !isPin) {
      const range = (n, size, total) => [n - (n % size), Math.min(total, n - (n % size) + size) - 1];
      return this.writeValue(range(i, rows, this.geometry.t), range(j, cols, this.geometry.s), weights, false);
    }
    this.writeValue([i, i], [j, j], level ? addresses.map(() => undefined) : weights, isExact);
    if (!level && (isExact || weights.includes(undefined))) return;
    await new Promise((resolve) => setTimeout(resolve, 30));
    if (request !== this.request) return;
    try {
      const responses = await Promise.all(addresses.map((address) => json(this.app.client, address)));
      const known = { address: addresses[0], weights: responses.map(({ weight }) => weight ?? NaN), isExact: responses.every(({ exact = true }) => exact) };
      if (request !== this.request) return;
      this.known = known;
      this.writeValue([i, i], [j, j], known.weights, known.isExact);
    } catch (error) {
      if (request === this.request) this.app.showError(error);
    }
  }

  // The numbers of a cell in the tiles of the head, or of both heads in a difference; undefined until they are loaded.
  readTiles(level, cell) {
    const { x, y, row, col } = this.grid.find(level, cell), { pooling } = this.app.state;
    const tiles = (this.other ? this.tiles.both : [this.tiles]).map((each) => each.get(level, x, y));
    return { weights: tiles.map((tile) => tile?.[pooling][row * tile.cols + col]), isExact: !level && tiles.every((tile) => tile?.exact) };
  }

  // The addresses of a weight, of both heads in a difference.
  addresses([i, j]) {
    const places = [this.place, this.other].filter(Boolean);
    return places.map(({ run, layer, head, batch }) => `weight/${run}/${layer}/${head}/${i}/${j}/${batch}`);
  }

  // Write the weight first, because a long line is cut at its end. weights: of the head, or of both heads in a difference.
  writeValue(queries, keys, weights, isExact) {
    const isPooled = queries[1] > queries[0] || keys[1] > keys[0], way = this.app.state.pooling === "mean" ? "mean" : "largest";
    const what = this.other ? `difference${isPooled ? ` of the ${way} weights` : ""}` : isPooled ? `${way} weight` : "weight";
    const write = (weight, masked) => (weight === undefined ? "…" : weight !== weight ? masked : isExact ? number(weight, 4) : `≈ ${number(weight)}`);
    const weight = this.other ? subtract(...weights) : weights[0], more = [];
    const isNaNRow = !isPooled && Number.isNaN(this.marginals?.entropy[queries[0]]); // masked weights of such a query are NaN, too
    const both = this.other && weight === weight ? ` = ${weights.map((each) => write(each, "0 (masked)")).join(" − ")}` : "";
    if (this.marginals && !isPooled && !isNaNRow) {
      more.push(` · key receives ${format(this.marginals.received[keys[0]], 4)}`);
      more.push(` · query's entropy ${format(this.marginals.entropy[queries[0]], 4)} nats`);
    }
    this.reading.replaceChildren(make("span", {},
      `${what} `, make("b", { class: "value" }, write(weight, isNaNRow ? "not a number (NaN), or masked" : "masked")), `${both} · query `, make("b", {}, this.nameQuery(...queries)),
      " → key ", make("b", {}, this.nameKey(...keys))), ...more.map((text) => make("span", {}, text)));
    this.reading.title = this.reading.textContent;
    const shown = weight === undefined ? "" : String(weight);
    Object.assign(this.reading.dataset, { query: queries[0], key: keys[0], weight: shown, exact: isExact });
  }
}

const LEAST_NORMAL = 2 ** -29, STEP = 2 ** -39; // of float16 divided by 2^15: below the first, numbers have fewer digits

// Format a weight of a tile with at most `digits` significant digits, and only as many as its float16 has.
function formatCell(weight, digits, isExact) {
  if (isExact || weight >= LEAST_NORMAL) return format(weight, digits, isExact ? 4 : 3);
  const known = Math.floor(Math.log10(weight / STEP));
  return known < 1 ? "< 2e-11" : format(weight, Math.min(digits, known));
}
