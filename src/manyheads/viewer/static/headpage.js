// The page of one head, or of two that are compared: its panes, which share view, crosshair and colours, and the side panel.

const PANEL = 330; // pixels: the least width of the side panel
const BOTH = 1200; // pixels: the least width of the page that has a side panel while the drawer is open
const FLIGHT = 500; // milliseconds in which the view moves to a finding
const READABLE = 14; // pixels: cells of the whole matrix that are as large need no zoom to a finding
const LEAST_PANE = 420; // pixels: the least width of a pane, whose texts need it
const ROOMY = 500; // pixels: the side of compared matrices that leaves room for the side panel
const SCANNING = "The crosshair moves to the next largest weight when the scan of this head is complete.";

class HeadPage {
  constructor(body, app, tools) {
    Object.assign(this, { app, panes: [], panels: [], rank: -1, ranking: null, isWaiting: false });
    this.root = make("div", { class: "head-page" });
    this.message = make("p", { class: "muted opening", hidden: true });
    this.side = make("div", { class: "side" });
    this.root.append(this.message, this.side);
    body.append(this.root);
    this.compareButton = button("compare", "compare", "compare with another head, layer or run; both zoom together (c)", () => this.compare());
    this.show = app.choice("show", "show", { both: "both", difference: "difference" }, "show both heads, or the difference of their weights");
    this.panelButton = button("side-panel", "side panel", "show or hide the weights of the query under the crosshair, of both heads (s)", () => this.togglePanel());
    this.nextButton = button("next", "next largest", "move the crosshair to the next largest weight in this head (n)", () => this.moveToNextLargest());
    this.nextButton.hidden = app.client instanceof PageClient; // an exported page can't search all weights
    this.saveButtons = new SaveButtons(this);
    tools.append(this.compareButton, this.show, this.panelButton, this.nextButton,
      button("fit", "fit", "fit the matrix (0)", () => this.fit()), this.saveButtons.element);
    this.resizing = new ResizeObserver(() => this.layOut());
    this.resizing.observe(this.root);
  }

  open() {
    const { state } = this.app, pairs = this.pairs();
    this.compareButton.setAttribute("aria-pressed", Boolean(state.second));
    this.show.hidden = !state.second;
    this.show.querySelector(`input[value="${state.show}"]`).checked = true; // this control is built after App.show sets those of the toolbar
    while (this.panes.length > pairs.length) this.panes.pop().remove();
    for (const [n, [place, other]] of pairs.entries()) {
      const pane = (this.panes[n] ??= new HeadPane(this.root, this.app, this));
      const isShown = JSON.stringify([pane.place, pane.other]) === JSON.stringify([place, other]);
      if (isShown) pane.writeTitle();
      else {
        pane.open(place, other);
        Object.assign(this, { rank: -1, ranking: null, isWaiting: false });
      }
    }
    this.root.append(this.side); // after the panes, also for the keyboard
    this.openPanels(pairs.flatMap((pair, n) => pair.filter(Boolean).map((place) => [this.panes[n], place])));
    this.openPicture(pairs.length === 1 && !pairs[0][1] ? pairs[0][0] : null);
    this.saveButtons.update();
    this.layOut();
    this.update();
    if (this.panes.length) pinSelected(this.app, this.panes[0]).catch((error) => this.app.showError(error));
  }

  // Show a side panel for each of these heads, as [pane, place].
  openPanels(heads) {
    while (this.panels.length > heads.length) this.panels.pop().remove();
    for (const [n, [pane, place]] of heads.entries()) {
      this.panels[n] ??= new SidePanel(this.app, this, this.side);
      this.panels[n].open(pane, place, heads.length > 1);
    }
  }

  // Show the picture whose patches are keys of a single head.
  openPicture(place) {
    if (!(place && this.app.layer(place).has_patches)) {
      this.picture?.remove();
      this.picture = null;
      return;
    }
    this.picture ??= new PicturePanel(this.app, this, this.side);
    this.picture.open(this.panes[0], place);
  }

  // The heads of each pane: a place, and null or the place to subtract.
  pairs() {
    const { state } = this.app;
    const place = ({ run, layer, head }) => ({ run, layer, head, batch: this.app.batchOf({ run, layer }) });
    const places = [state, ...(state.second ? [state.second] : [])].map(place);
    const [shape, other] = places.map((x) => this.app.layer(x).shape);
    const isPossible = !other || (shape[2] === other[2] && shape[3] === other[3]);
    this.message.hidden = isPossible || state.show !== "difference";
    if (!this.message.hidden) {
      this.message.textContent = `A difference needs heads of the same size. These have ${matrixSize(shape)} and ${matrixSize(other)}.`;
      return [];
    }
    return other && state.show === "difference" ? [[places[0], places[1]]] : places.map((x) => [x, null]);
  }

  remove() {
    clearTimeout(this.saving);
    this.resizing.disconnect();
    this.openPanels([]);
    this.openPicture(null);
    this.panes.forEach((pane) => pane.remove());
    this.panes = [];
  }

  // -- layout -------------------------------------------------------------------------------------

  // Give each pane its space. A single matrix is a square, with the side panel in the space beside it, or below on a narrow screen.
  layOut() {
    const width = this.root.clientWidth, { length } = this.panes, isNarrow = width < 760, isCompared = length > 1;
    this.isNarrow = isNarrow;
    this.root.classList.toggle("narrow", isNarrow);
    this.root.classList.toggle("compared", isCompared);
    this.alignHeads(isNarrow);
    const isCovering = isCompared && !isNarrow && width < length * LEAST_PANE + PANEL;
    this.root.classList.toggle("covering", isCovering); // the panel covers a part of the second matrix
    this.side.hidden = !this.panels.length || !(isNarrow || this.hasPanel(width));
    this.panelButton.hidden = !isCompared || isNarrow;
    this.panelButton.setAttribute("aria-pressed", !this.side.hidden);
    const isBeside = !isNarrow && !this.side.hidden && !isCovering, room = width - (isBeside ? PANEL + 16 : 0);
    const bars = isCompared && !isNarrow ? BAR - MARGIN : 0; // the pane with the colour bar is wider, so that matrices are equally large
    const shareOf = (pane) => (isNarrow ? width : (room - bars) / length + (this.hasBar(pane) ? bars : 0));
    const isPhone = Math.min(...this.panes.map(shareOf)) - 16 < PHONE;
    for (const pane of this.panes) {
      if (!pane.tiles) continue;
      const texts = pane.element.offsetHeight - pane.canvas.offsetHeight;
      const height = isNarrow ? width : this.root.clientHeight - texts;
      const share = shareOf(pane);
      pane.setSpace(isBeside && !isCompared ? Math.max(LEAST_PANE, share - 16) : share - 16, height, isPhone);
      pane.element.style.width = isBeside ? `${Math.max(LEAST_PANE - BAR, pane.geometry.width + 16)}px` : `${share}px`;
    }
    for (const panel of this.panels) panel.draw();
    this.picture?.draw();
  }

  // Whether the side panel is shown in a page of this width. It isn't beside an open drawer, unless both fit, and beside two matrices
  // only if these stay large or the button was pressed.
  hasPanel(width) {
    const { length } = this.panes, { app } = this;
    if (app.drawer.shown !== null && width < BOTH) return false;
    if (length < 2) return width >= LEAST_PANE + PANEL;
    const [, , t, s] = app.layer(this.panes[0].place).shape, side = (width - PANEL - BAR) / length - STRIP - NAMED_RULER - 16;
    return app.wantsPanel ?? side >= Math.min(ROOMY, CLOSEST * Math.max(t, s));
  }

  togglePanel() {
    const { app } = this, { drawer } = app;
    if (this.panelButton.hidden) return;
    app.wantsPanel = this.side.hidden;
    if (app.wantsPanel && drawer.shown !== null && this.root.clientWidth < BOTH) drawer.toggle(drawer.shown);
    this.layOut();
  }

  // Give the heads of panes beside each other the same height, so that their matrices begin at the same height.
  alignHeads(isNarrow) {
    const heads = this.panes.map(({ head }) => head);
    for (const head of heads) head.style.minHeight = "";
    if (heads.length < 2 || isNarrow) return;
    const most = Math.max(...heads.map(({ offsetHeight }) => offsetHeight));
    for (const head of heads) head.style.minHeight = `${most}px`;
  }

  // Draw again, because the crosshair moved.
  update() {
    for (const pane of this.panes) pane.update();
    for (const panel of this.panels) panel.update();
    this.picture?.update();
  }

  // -- colours ------------------------------------------------------------------------------------

  // Set the largest weight that a pane has in view.
  setLargest(pane, largest) {
    if (pane.largest === largest) return;
    pane.largest = largest;
    this.drawOthers(pane);
  }

  drawOthers(pane) {
    for (const other of this.panes) if (other !== pane) other.draw();
  }

  // Whether a pane has the bar of the colours, which panes beside each other share.
  hasBar(pane) {
    return this.isNarrow || pane === this.panes.at(-1);
  }

  // The upper ends of the scales of strips: the largest numbers in view of all panes.
  get largestMarginals() {
    const panes = this.panes.filter(({ marginals }) => marginals);
    const largest = (name, part) => Math.max(...panes.map(({ marginals, geometry }) => largestOf(marginals[name], geometry[part])));
    return { received: largest("received", "keys"), entropy: largest("entropy", "queries") };
  }

  // The upper end of the scale of colours: the largest weight in view of all panes, rounded up.
  top(pane) {
    const largest = Math.max(...this.panes.map((one) => one.largest ?? 0));
    return largest ? Math.min(1, roundUp(largest)) : pane.top ?? 1;
  }

  // -- view ---------------------------------------------------------------------------------------

  setView(view) {
    this.flight = null; // a key or a gesture ends it
    this.showView(view);
  }

  showView(view) {
    this.app.state.view = roundView(view);
    for (const pane of this.panes) if (pane.tiles) pane.setView(this.app.state.view);
    this.saveView();
  }

  saveView() {
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.app.saveState(), 150);
  }

  fit() {
    this.setView(null);
  }

  move(pane, [dx, dy]) {
    pane.changeView(() => pane.geometry.move(-80 * dx, -80 * dy));
  }

  // Zoom in or out around the pinned crosshair, or around the middle if none is pinned.
  zoomBy(factor) {
    const pane = this.panes[0], { geometry, cell } = pane;
    pane.changeView(() => {
      const view = geometry.view, x = cell ? cell[1] + 0.5 : view.x, y = cell ? cell[0] + 0.5 : view.y;
      geometry.setZoom(geometry.zoom * factor);
      geometry.setView({ x, y, n: geometry.view.n });
    });
  }

  // Show single weights.
  zoomToWeights() {
    const { geometry } = this.panes[0];
    this.zoomBy(48 / Math.min(geometry.k, geometry.v));
  }

  // Move to a weight step by step, and zoom in until its cell is large, unless the whole matrix is readable.
  flyTo([i, j]) {
    this.app.clearHover();
    const { geometry } = this.panes[0];
    if (geometry.isWhole && geometry.zoom >= READABLE) return;
    const from = geometry.view, n = Math.min(from.n, geometry.span / 28);
    if (n === from.n && geometry.isWhole) return;
    const [path, start] = [d3.interpolateZoom([from.x, from.y, from.n], [j + 0.5, i + 0.5, n]), performance.now()];
    const duration = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : FLIGHT;
    const flight = (this.flight = {});
    const step = () => {
      if (this.flight !== flight || !this.panes.length) return;
      const share = duration ? Math.min(1, (performance.now() - start) / duration) : 1, [x, y, wide] = path(d3.easeCubicInOut(share));
      this.showView({ x, y, n: wide });
      if (share < 1) requestAnimationFrame(step);
      else this.flight = null;
    };
    step();
  }

  // -- crosshair ----------------------------------------------------------------------------------

  // Forget where the pointer was, until it moves.
  clearPointer() {
    for (const pane of this.panes) pane.pointer = null;
  }

  // Pin the crosshair at a weight, and move the view to it if it isn't in view.
  moveTo(cell) {
    const { geometry } = this.panes[0];
    this.app.clearHover();
    Object.assign(this.app.state, pinning(cell));
    this.app.saveState();
    if (!geometry.hasInView(cell)) this.setView({ ...geometry.view, x: cell[1] + 0.5, y: cell[0] + 0.5 });
    this.update();
  }

  // Move the crosshair by one weight.
  moveCrosshair(pane, [dx, dy]) {
    const { t, s, view } = pane.geometry, [i, j] = this.app.state.pin ?? [Math.floor(view.y), Math.floor(view.x)];
    const within = (n, size) => Math.max(0, Math.min(size - 1, n));
    this.moveTo([within(i + dy, t), within(j + dx, s)]);
  }

  // Move the crosshair to the next largest weight of the head. The first key press goes to the largest.
  async moveToNextLargest() {
    const pane = this.panes[0], { place } = pane, { run, layer, head, batch } = place;
    if (pane.other || this.app.client instanceof PageClient) return;
    if (!pane.isComplete) return this.waitForScan();
    const rank = this.rank + 1;
    try {
      const { query, key, complete } = await json(this.app.client, `largest/${run}/${layer}/${head}/${rank}/${batch}`);
      if (pane.place !== place || !pane.tiles) return;
      if (!complete) return pane.rescan(), this.waitForScan();
      if (query === null) return this.showRanking(this.app.state.pin, rank ? "this was the last weight above 0" : "no query of this head has several keys to attend to");
      this.rank = rank;
      this.moveTo([query, key]);
      if (pane.geometry.zoom < READABLE) this.flyTo([query, key]); // to where single weights are visible
      this.showRanking([query, key], `weight ${count(rank + 1)} of this head, in descending order`);
    } catch (error) {
      this.app.showError(error);
    }
  }

  // Move to the next largest weight when the scan of the first pane is complete.
  waitForScan() {
    this.isWaiting = true;
    this.app.showMessage(SCANNING);
  }

  // The scan of a pane is complete.
  scanned(pane) {
    if (!this.isWaiting || pane !== this.panes[0]) return;
    this.isWaiting = false;
    this.app.hideMessage(SCANNING);
    this.moveToNextLargest();
  }

  // Show a text about the order of weights in the status line of the first pane, as long as a cell is pinned.
  showRanking(cell, text) {
    this.ranking = { cell: String(cell), text };
    this.update();
  }

  // What the status line of a pane says about the order of weights, or "".
  rankingOf(pane) {
    return pane === this.panes[0] && this.ranking?.cell === String(this.app.state.pin) ? this.ranking.text : "";
  }

  // -- actions ------------------------------------------------------------------------------------

  compare() {
    const { run, layer, head, second } = this.app.state, { runs } = this.app.info, { length } = this.app.layer(this.app.state).heads;
    const other = runs.length > 1 ? { run: (run + 1) % runs.length, layer, head } : { run, layer, head: (head + 1) % length };
    this.app.change({ second: second ? null : other });
  }

  pressKey(event) {
    const pane = this.panes[0], arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!pane?.tiles) return false;
    if (arrows) {
      if (event.shiftKey) this.moveCrosshair(pane, arrows);
      else this.move(pane, arrows);
      return true;
    }
    const action = {
      "+": () => this.zoomBy(2), "=": () => this.zoomBy(2), "-": () => this.zoomBy(0.5), "0": () => this.fit(),
      "1": () => this.zoomToWeights(), n: () => this.moveToNextLargest(), c: () => this.compare(), p: () => this.saveButtons.savePng(), s: () => this.togglePanel(),
      Escape: () => this.app.pin(null),
    }[event.key];
    action?.();
    return action !== undefined;
  }
}
