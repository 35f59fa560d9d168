// Saving the view of heads: as a PNG, painted again at twice the resolution of a plain screen, or as an SVG or PDF file, which the
// server draws.

const SHARPNESS = 2; // the least number of image pixels per pixel of the page
const IMAGE_MARGIN = 14, TITLE_LINE = 26, NOTE_LINE = 17; // pixels of the page
const CAPTION = 80; // the number of characters of a text below the title
const FIGURES = { svg: "image/svg+xml", pdf: "application/pdf" }; // media types

// The buttons that save the view of a HeadPage.
class SaveButtons {
  constructor(page) {
    this.page = page;
    const isFile = page.app.client instanceof PageClient;
    const reason = isFile ? " SVG and PDF are drawn by the command manyheads view, not by an exported page." : "";
    this.figures = isFile ? [] : Object.keys(FIGURES).map((format) =>
      button(format, format.toUpperCase(), "", () => this.run(() => saveFigure(page, format))));
    this.png = button("png", "PNG", `save the view as a PNG picture (p).${reason}`, () => this.savePng());
    this.element = make("fieldset", { id: "save", class: "choice" }, make("legend", {}, "save"), this.png, ...this.figures);
  }

  // Figures have one head, or two of the same size. Without panes (a difference of heads of two sizes), there is no view to save.
  update() {
    const { panes } = this.page, [first, second] = panes.map(({ layer }) => layer.shape.slice(2).join());
    this.png.disabled = !panes.length;
    for (const figure of this.figures) {
      const name = `${figure.id === "svg" ? "an" : "a"} ${figure.textContent} file`;
      figure.disabled = !panes.length || (panes.length > 1 && first !== second);
      figure.title = figure.disabled ? `${name} has heads of the same size; ${panes.length ? "save both as a PNG" : "choose show: both, and save them as a PNG"}` : `save the view as ${name} for papers`;
    }
  }

  savePng() {
    return this.run(() => savePng(this.page));
  }

  async run(action) {
    try {
      await action();
    } catch (error) {
      this.page.app.showError(error);
    }
  }
}

// Save the panes of a page side by side as one PNG, when all of their tiles are loaded and exact.
async function savePng(page) {
  const { app } = page;
  await waitForTiles(page);
  const { panes } = page, name = fileName(app);
  if (!panes.length) return; // the page was left
  const ratio = Math.max(SHARPNESS, window.devicePixelRatio || 1), images = panes.map((pane) => paintImage(pane, ratio));
  const top = Math.max(...images.map(({ matrixTop }) => matrixTop)); // all matrices begin at this height
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = images.reduce((sum, { image }) => sum + image.width, 0);
  canvas.height = Math.max(...images.map(({ image, matrixTop }) => top - matrixTop + image.height));
  context.fillStyle = app.theme().background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  let x = 0;
  for (const { image, matrixTop } of images) {
    context.drawImage(image, x, top - matrixTop);
    x += image.width;
  }
  const blob = await new Promise((resolve) => canvas.toBlob(resolve));
  if (!blob) throw new ViewerError("The picture is too large for this browser. Make the window smaller.");
  download(blob, `${name}.png`);
}

// Save the queries and keys in view as an SVG or PDF file.
async function saveFigure(page, format) {
  const { app } = page, [pane] = page.panes, { run, layer, head, batch } = pane.place, { queries, keys } = pane.geometry;
  const { pooling, scale } = app.state, name = fileName(app);
  const message = `Drawing the ${format.toUpperCase()} file …`;
  app.showMessage(message);
  const part = `${queries.join("/")}/${keys.join("/")}/${pooling}/${scale}/${format}`;
  const placeOf = ({ run, layer, head, batch }) => [run, layer, head, batch].join();
  const both = page.panes[1]?.place ?? pane.other, kind = pane.other ? "difference" : "comparison";
  const address = both ? `${kind}/${placeOf(pane.place)}/${placeOf(both)}/${part}` : `figure/${run}/${layer}/${head}/${part}/${batch}`;
  const bytes = await app.client.bytes(address);
  download(new Blob([bytes], { type: FIGURES[format] }), `${name}.${format}`);
  app.hideMessage(message);
}

// Wait until the panes of a page are drawn from tiles that are loaded and exact, with the names of tokens, or until the page is left.
async function waitForTiles(page) {
  const isWaiting = ({ note: { dataset } }) => dataset.missing !== "0" || dataset.complete !== "true" || dataset.labelled !== "true";
  for (let n = 0; page.panes.length; n++) {
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))); // a change of view is painted
    const waiting = page.panes.find(isWaiting);
    if (!waiting) return;
    if (waiting.tiles?.failed) throw new ViewerError(waiting.tiles.failed);
    if (n === 30) page.app.showMessage("The picture is saved when its tiles are loaded.");
  }
}

// Return an image of a pane with its title, its source, the value under the crosshair, and what its cells are; and as `matrixTop`
// the image's row of pixels where the matrix begins.
function paintImage(pane, ratio) {
  const matrix = document.createElement("canvas"), { clientWidth, clientHeight } = pane.canvas;
  matrix.width = Math.round(clientWidth * ratio);
  matrix.height = Math.round(clientHeight * ratio);
  pane.paint(matrix.getContext("2d"), ratio);
  const blank = countBlankRows(matrix, Math.round(pane.geometry.above * ratio)) / ratio, shownHeight = clientHeight - blank;
  const image = document.createElement("canvas"), context = image.getContext("2d"), theme = pane.app.theme();
  const width = clientWidth + 2 * IMAGE_MARGIN, texts = [pane.reading.dataset.weight ? pane.reading.textContent : "", pane.note.textContent];
  const noteFont = "12px system-ui, sans-serif", titleFont = "600 15px system-ui, sans-serif";
  const wrap = (font, text) => {
    context.font = font;
    return wrapText(context, text, clientWidth);
  };
  const { title, sources } = nameView(pane), titles = wrap(titleFont, title), sourceLines = sources.flatMap((text) => wrap(noteFont, text));
  const lines = texts.flatMap((text) => wrap(noteFont, text)), top = IMAGE_MARGIN + titles.length * TITLE_LINE;
  const above = top + sourceLines.length * NOTE_LINE + IMAGE_MARGIN / 2, height = above + shownHeight + lines.length * NOTE_LINE + IMAGE_MARGIN;
  image.width = Math.round(width * ratio);
  image.height = Math.round(height * ratio);
  context.scale(ratio, ratio);
  context.fillStyle = theme.background;
  context.fillRect(0, 0, width, height);
  context.drawImage(matrix, 0, blank * ratio, matrix.width, shownHeight * ratio, IMAGE_MARGIN, above, clientWidth, shownHeight);
  context.textBaseline = "middle";
  const write = (text, y, font, color) => {
    context.font = font;
    context.fillStyle = color;
    context.fillText(text, IMAGE_MARGIN, y);
  };
  titles.forEach((text, n) => write(text, IMAGE_MARGIN + (n + 0.4) * TITLE_LINE, titleFont, theme.text));
  sourceLines.forEach((text, n) => write(text, top + (n + 0.5) * NOTE_LINE, noteFont, theme.muted));
  lines.forEach((text, n) => write(text, above + shownHeight + (n + 0.5) * NOTE_LINE, noteFont, theme.muted));
  return { image, matrixTop: Math.round((above - blank + pane.geometry.above) * ratio) };
}

// The title of an image, what the head attends to included, and as sources the model, layer and text, and the part in view.
function nameView(pane) {
  const { app, place, other, geometry } = pane, { title: model } = app.info.runs[place.run];
  const text = app.textOf(place.run, place.batch), { queries, keys, t, s } = geometry;
  const habit = pane.habit.textContent, isWhole = queries[0] === 0 && queries[1] === t && keys[0] === 0 && keys[1] === s;
  const names = new Set([model, ...(other ? [] : [pane.layer.name])]); // equal for a single map
  const range = (name, [from, to]) => `${name} ${count(from)} to ${count(to - 1)}`;
  const sources = [[...names, ...(text ? [`“${short(text, CAPTION)}”`] : [])].join(" · ")];
  if (other) sources.push(habit); // what the colours mean
  if (!isWhole) sources.push(`${range("queries", queries)}, ${range("keys", keys)}`);
  if (other) return { title: pane.title.textContent, sources };
  const title = `layer ${pane.layer.number}, head ${pane.layer.heads[place.head]}`;
  return { title: habit ? `${title} — ${habit}` : title, sources };
}

// The number of blank rows of pixels at the top of a canvas, at most `most`: key labels may be shorter than their ruler.
function countBlankRows(canvas, most) {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, most).data.buffer);
  const painted = pixels.findIndex((pixel) => pixel !== pixels[0]);
  return painted < 0 ? 0 : Math.floor(painted / canvas.width);
}

// Return the lines of a text that is broken between words; none for an empty text.
function wrapText(context, text, width) {
  const lines = [];
  for (const word of text.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

// A name for the file of a view: of two heads, both.
function fileName(app) {
  const { second, show } = app.state, names = [app.short(app.state)];
  if (second) names.push(show === "difference" ? "minus" : "and", app.short(second));
  return names.join(" ").replaceAll(/[^a-z0-9]+/g, "-");
}

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
