// Where a matrix is drawn: its area on the canvas, and which of its tokens are in view.

const STRIP = 36, BAR = 84, MARGIN = 10; // pixels: the strips at the edges of the matrix, the colour bar, a margin
const PHONE = 480; // pixels: in less space, the ruler of queries is narrow
const NAMED_RULER = 118, NUMBERED_RULER = 78, NARROW_RULER = 70; // pixels: the ruler of queries with names, with numbers only, and on a phone
const NAMED_ABOVE = 96, NUMBERED_ABOVE = 60, NARROW_ABOVE = 72; // pixels: the ruler of keys, likewise
const CLOSEST = 96; // pixels per token at the highest zoom
const FEW = 40; // pixels: the most that a token of the shorter axis takes while the whole longer axis is in view
const LEAST_BAR = 190; // pixels: the height of the colour bar with its legend

// A view is {x, y, n}: the key and the query in the centre, as fractions, and the number of tokens across the shorter side of the
// area, or along the longer axis of an elongated matrix. It has no pixels, so a link shows the same tokens in a window of any size.
class Geometry {
  // shape: the numbers of queries and keys. shifts: see `level_shifts` in pyramid.py. finest: the finest level that has tiles.
  constructor([t, s], shifts, finest, { isLabelled, hasStrips }) {
    Object.assign(this, { t, s, finest, isElongated: Math.max(...shifts) > 0, isLabelled, strip: hasStrips ? STRIP : 0 });
    this.above = this.strip + (isLabelled ? NAMED_ABOVE : NUMBERED_ABOVE);
  }

  // Set the space for the canvas in pixels, and choose the area: a square unless the matrix is elongated, so that it has the same
  // proportions in every window. isPhone: whether the rulers are narrow. hasBar: whether the colour bar is beside it.
  setSpace(width, height, isPhone, hasBar) {
    this.beside = hasBar ? BAR : MARGIN;
    this.above = this.strip + (!this.isLabelled ? NUMBERED_ABOVE : isPhone ? NARROW_ABOVE : NAMED_ABOVE);
    this.left = this.strip + (isPhone ? NARROW_RULER : this.isLabelled ? NAMED_RULER : NUMBERED_RULER);
    const wide = Math.max(40, width - this.left - this.beside), high = Math.max(40, height - this.above - MARGIN);
    const most = ([tokens, pixels]) => Math.min(pixels, Math.max(1, tokens) * CLOSEST);
    if (this.isElongated) {
      this.wide = most([this.s, wide]);
      this.high = most([this.t, high]);
    } else {
      const side = most([Math.max(this.t, this.s), Math.min(wide, high)]);
      this.wide = side;
      this.high = side;
    }
    this.setView(this.wanted ?? null);
  }

  // The size of the canvas that the area needs.
  get width() {
    return this.left + this.wide + this.beside;
  }

  get height() {
    return this.above + Math.max(this.high, LEAST_BAR) + MARGIN;
  }

  // -- zoom ---------------------------------------------------------------------------------------

  // The number of pixels along which a view's `n` counts tokens.
  get span() {
    if (!this.isElongated) return Math.min(this.wide, this.high);
    return this.s >= this.t ? this.wide : this.high;
  }

  // Pixels per token of the longer axis if the whole matrix is in view, and at the highest zoom.
  get least() {
    return Math.min(this.span / Math.max(this.t, this.s), CLOSEST);
  }

  get most() {
    return Math.max(this.least, CLOSEST / 2 ** this.finest);
  }

  get isWhole() {
    return this.zoom <= this.least * (1 + 1e-9);
  }

  // Set the pixels per token of the longer axis. The few tokens of the other axis fill the area until both have the same size.
  setZoom(zoom) {
    this.zoom = Math.min(this.most, Math.max(this.least, zoom));
    this.k = this.v = this.zoom;
    if (!this.isElongated) return;
    if (this.s >= this.t) this.v = Math.max(this.zoom, Math.min(this.high / this.t, CLOSEST, Math.max(FEW, this.zoom)));
    else this.k = Math.max(this.zoom, Math.min(this.wide / this.s, CLOSEST, Math.max(FEW, this.zoom)));
  }

  // Zoom by a factor so that the tokens at a pixel stay there.
  zoomAt([px, py], factor) {
    const [j, i] = this.under([px, py]);
    this.setZoom(this.zoom * factor);
    this.place(px - this.k * j, py - this.v * i);
  }

  move(dx, dy) {
    this.place(this.x + dx, this.y + dy);
  }

  // Put the first token at a pixel, or as near to it as the area stays filled. A matrix that is smaller starts at the rulers.
  place(x, y) {
    const within = (at, from, length, size) => Math.min(from, Math.max(at, from + Math.min(0, length - size)));
    this.x = within(x, this.left, this.wide, this.k * this.s);
    this.y = within(y, this.above, this.high, this.v * this.t);
    this.wanted = this.isWhole ? null : this.view;
  }

  // -- views --------------------------------------------------------------------------------------

  get view() {
    const x = (this.left + this.wide / 2 - this.x) / this.k, y = (this.above + this.high / 2 - this.y) / this.v;
    return { x, y, n: this.span / this.zoom };
  }

  // Show a view, or the whole matrix for null.
  setView(view) {
    this.setZoom(view === null ? 0 : this.span / view.n);
    const { x, y } = view ?? { x: 0, y: 0 };
    this.place(this.left + this.wide / 2 - this.k * x, this.above + this.high / 2 - this.v * y);
    this.wanted = view;
  }

  // -- tokens and pixels --------------------------------------------------------------------------

  // The key and query at a pixel, as fractions.
  under([px, py]) {
    return [(px - this.x) / this.k, (py - this.y) / this.v];
  }

  // The query and key at a pixel, or null outside the matrix.
  cellAt([px, py]) {
    const [j, i] = this.under([px, py]).map(Math.floor);
    const isInside = px >= this.left && py >= this.above && px < this.left + this.wide && py < this.above + this.high;
    return isInside && i >= 0 && j >= 0 && i < this.t && j < this.s ? [i, j] : null;
  }

  // The ranges of tokens in view: the first, and the one after the last.
  get queries() {
    return inView(this.above, this.high, this.y, this.v, this.t);
  }

  get keys() {
    return inView(this.left, this.wide, this.x, this.k, this.s);
  }

  // The right and lower edges of the part of the matrix in view.
  get right() {
    return Math.min(this.left + this.wide, this.x + this.k * this.s);
  }

  get bottom() {
    return Math.min(this.above + this.high, this.y + this.v * this.t);
  }

  // Whether a weight is in view as a whole.
  hasInView([i, j]) {
    const x = this.x + this.k * j, y = this.y + this.v * i;
    return x >= this.left - 1 && y >= this.above - 1 && x + this.k <= this.left + this.wide + 1 && y + this.v <= this.above + this.high + 1;
  }
}

// The range of tokens between two pixels. Views in links are rounded, so a token that is in view by less than a hundredth of a pixel
// isn't counted.
function inView(from, length, first, size, tokens) {
  const near = 0.01 / size;
  return [Math.max(0, Math.floor((from - first) / size + near)), Math.min(tokens, Math.ceil((from + length - first) / size - near))];
}

// Round a view to the numbers in a link, so that a link restores it exactly.
function roundView(view) {
  return view && { x: Number(view.x.toFixed(4)), y: Number(view.y.toFixed(4)), n: Number(view.n.toPrecision(8)) };
}
