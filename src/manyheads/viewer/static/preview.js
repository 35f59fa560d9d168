// The panel beside the overview: the head under the pointer or with the keyboard focus, its scores, and the scales.

const PREVIEW = 268; // pixels along each side of the preview's thumbnail

class Preview {
  constructor(app, scores, thumbnails) {
    Object.assign(this, { app, scores, thumbnails, place: null });
    this.name = make("h2", {});
    this.axes = make("span", { class: "muted axes" }, "queries ↓  keys →");
    this.layer = make("p", { class: "muted layer-name" });
    this.habit = make("p", { class: "habit" });
    this.canvas = make("canvas", { class: "thumbnail large", width: PREVIEW, height: PREVIEW, "aria-hidden": "true" });
    this.bar = make("canvas", { class: "color-bar", role: "img" });
    this.scaleName = make("span", {});
    this.scoreScale = make("div", { class: "score-scale" });
    this.list = make("dl", { class: "scores" });
    this.facts = make("p", { class: "muted facts" });
    this.opener = make("button", { type: "button", class: "primary", onclick: () => this.open(this.place) }, "open head");
    this.element = make("aside", { class: "preview", "aria-label": "preview" },
      make("div", { class: "preview-head" }, this.name, this.axes), this.layer, this.canvas, this.habit,
      make("div", { class: "scale" }, this.bar,
        make("div", { class: "scale-notes" }, this.scaleName, make("span", { class: "masked-key" }, make("i"), "masked")),
        this.scoreScale),
      this.list, this.facts, this.opener);
  }

  // Show a head, with the colours of weights of a scale {top, isSaturated}.
  show(place, scale) {
    const { app } = this, layer = app.layer(place), isSame = JSON.stringify(place) === JSON.stringify(this.place);
    Object.assign(this, { place, scale });
    this.name.textContent = app.short(place);
    this.layer.textContent = app.info.runs.length > 1 ? `${app.info.runs[place.run].title} · ${layer.name}` : layer.name;
    this.opener.hidden = this.canvas.hidden = this.axes.hidden = !layer.has_weights;
    this.drawScale();
    this.listScores();
    if (!isSame) this.thumbnail = null;
    if (layer.has_weights && !isSame) this.request(place, layer);
    this.draw();
  }

  async request(place, layer) {
    try {
      const thumbnail = await this.thumbnails.get(place, layer.shape, PREVIEW);
      if (place !== this.place) return;
      this.thumbnail = thumbnail;
      this.draw();
    } catch (error) {
      this.app.showError(error);
    }
  }

  draw() {
    if (this.thumbnail) drawThumbnail(this.canvas, this.thumbnail, PREVIEW, this.app, this.scale.top);
    else this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.describe();
  }

  // Write the sizes, the mask and what a cell is.
  describe() {
    const layer = this.app.layer(this.place), { mask, shape, has_weights } = layer, parts = [matrixSize(shape)];
    if (has_weights) parts.push(mask);
    else parts.push("only statistics were recorded");
    const [rows, cols] = cellSize(layer, this.thumbnail?.level ?? 0), way = this.app.state.pooling === "mean" ? "mean" : "largest";
    if (rows * cols > 1) parts.push(`each cell: the ${way} of ${count(rows)} × ${count(cols)} weights`);
    if (this.thumbnail?.sampled > 1) parts.push(`≈ estimated from 1 query in ${count(this.thumbnail.sampled)}`);
    this.facts.textContent = parts.join(" · ");
  }

  listScores() {
    const { scores, place } = this, rows = [];
    for (const name of Object.keys(this.app.info.scores)) {
      const value = scores.value(place, name), unit = scores.unit(name), bar = make("i");
      if (value === null) continue;
      bar.style.width = `${100 * Math.min(1, (value ?? 0) / scores.limit(name))}%`;
      const number = value === undefined ? "…" : `${formatScore(value)}${unit ? ` ${unit}` : ""}`;
      rows.push(make("div", { class: name === this.app.state.score ? "chosen" : "", "data-score": name, "data-value": value ?? "" },
        make("dt", {}, scoreName(name)), make("dd", { class: "bar" }, bar), make("dd", { class: "value" }, number)));
    }
    this.habit.textContent = scores.habit(place);
    const stride = scores.sampled(place);
    this.list.title = stride > 1 ? `estimated from 1 query in ${count(stride)}` : "means over all queries";
    this.list.classList.toggle("estimated", stride > 1);
    this.list.replaceChildren(...rows);
  }

  drawScale() {
    const ratio = window.devicePixelRatio || 1, { top, isSaturated } = this.scale, { scale } = this.app.state, high = 26;
    this.bar.width = PREVIEW * ratio;
    this.bar.height = high * ratio;
    const context = this.bar.getContext("2d");
    context.scale(ratio, ratio);
    const { colors } = this.app, text = this.app.theme().muted;
    drawColorBar(context, { colors, top, scale, isSaturated, x: 0, y: 0, length: PREVIEW, thickness: 9, text, lying: true });
    this.bar.setAttribute("aria-label", `colours of weights: ${SCALES[scale]} scale from 0 to ${isSaturated ? "at least " : ""}${format(top, 2)}`);
    this.bar.dataset.top = top;
    this.scaleName.textContent = `attention weight, ${SCALES[scale]} scale`;
  }

  // Write the scale of the score that cells show. isTint: they show it as a colour, else as the length of a bar.
  showScoreScale(name, isTint) {
    this.scoreScale.hidden = !name;
    this.scoreScale.classList.toggle("is-tint", isTint);
    if (!name) return;
    const unit = this.scores.unit(name), top = format(this.scores.top(name), 3);
    this.scoreScale.replaceChildren(make("span", {}, scoreName(name)), "0", make("i"), unit ? `${top} ${unit}` : top);
  }

  open({ run, layer, head }) {
    const { app } = this;
    if (app.layer({ run, layer }).has_weights) app.change({ ...app.resetView({ run, layer }), run, layer, head, page: "head", view: null });
  }
}

// Draw a thumbnail into a canvas of a number of pixels, in the colours of a scale that ends at `top`.
function drawThumbnail(canvas, thumbnail, pixels, app, top) {
  const { pooling, scale } = app.state, pooled = poolTile(thumbnail, Math.round(pixels * (window.devicePixelRatio || 1)));
  const image = app.colors.paint(pooled, pooling, top, scale);
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").drawImage(image, 0, 0);
  // Few cells along an axis have sharp edges. Many are smoothed, because their widths in pixels would differ.
  canvas.classList.toggle("sharp", 3 * Math.min(image.width, image.height) <= pixels);
  canvas.classList.add("drawn");
}
