// The viewer's app: the header, the toolbar, the state that pages share, keyboard shortcuts, themes and messages.

const KEYS = [ // of all pages
  ["[  ]", "previous, next head"], ["{  }", "previous, next layer"], ["m", "cells: max or mean"], ["l", "colours: √, linear or log"],
  ...Object.values(PAGES).map(({ key, title }) => [key, `page: ${title}`]),
  ["/", "find a word"], ["f", "findings"], ["w", "which heads attend from a token to another"], ["k", "copy the link"], ["t", "light or dark theme"], ["esc", "close the search, the panel"], ["?", "show this help"],
];

const GUIDE = "Each row of a matrix is a query, a token that reads. Each column is a key, a token that is read from. "
  + "A cell is the weight that the query gives to the key, and the weights of each row sum to 1.";

class App {
  // root: the element to fill. client: see clients.js. linked: store the state in the URL.
  constructor(root, client, linked) {
    Object.assign(this, { root, client, linked, page: null, hovered: null, hatches: {} });
    this.responses = new Map(); // of `load`, by address
    this.wantsPanel = null; // whether the side panel is shown beside compared heads; null if it was never chosen
    this.state = { ...DEFAULTS, ...(linked ? parseHash() : {}) };
    this.abortController = new AbortController();
  }

  async start() {
    this.root.classList.add("manyheads");
    this.root.dataset.theme = this.themeName();
    this.root.replaceChildren(make("p", { class: "muted opening" }, "Loading …"));
    const info = await json(this.client, "runs"), { signal } = this.abortController;
    if (signal.aborted) return;
    this.info = info;
    this.colors = new ColorScale(info.colors);
    this.differences = { light: new DifferenceColors(info.differences.light), dark: new DifferenceColors(info.differences.dark) };
    this.build();
    if (this.linked) {
      this.readState(); // it may have changed while loading
      window.addEventListener("hashchange", () => this.readHash(), { signal });
    } else {
      this.root.tabIndex = -1; // so that a click anywhere in the viewer gives it the keyboard focus
    }
    (this.linked ? document : this.root).addEventListener("keydown", (event) => this.pressKey(event), { signal });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(), { signal });
    this.show();
  }

  remove() {
    this.abortController.abort();
    this.page?.remove();
    this.page = null;
    clearTimeout(this.hiding);
    this.root.replaceChildren();
  }

  // -- state ------------------------------------------------------------------------------------

  saveState() {
    // Without the bare "#" of an empty hash, to which a page that embeds the viewer would scroll when it is loaded.
    const hash = formatHash(this.state), address = hash ? `#${hash}` : location.pathname + location.search;
    if (this.linked) history.replaceState(null, "", address);
    this.drawer.update(); // it shows the selected weight
  }

  readHash() {
    if (location.hash.slice(1) === formatHash(this.state)) return;
    this.clearHover();
    this.readState();
    this.show();
  }

  // Read the state of a link. If it names what the runs don't have, correct it and say so.
  readState() {
    this.state = { ...DEFAULTS, ...parseHash() };
    sanitize(this.state, this.info);
    const wrong = wrongParts(this.state).map((name) => (name === "second" ? "compared head" : name));
    if (!wrong.length) return;
    const names = wrong.length > 1 ? `${wrong.slice(0, -1).join(", ")} and ${wrong.at(-1)}` : wrong[0];
    const pin = wrong.includes("pin") ? ", and no weight is pinned" : "";
    this.showMessage(`This link names a ${names} that ${this.info.runs.length > 1 ? "these runs don't" : "this run doesn't"} have. ${this.short(this.state)} is shown${pin}.`.replace(". l", ". L"));
  }

  // Change the state. A change of page or head adds an entry to the browser's history.
  change(changes) {
    const isNavigation = ["page", "run", "layer", "head", "second"].some((name) => name in changes);
    if (this.linked && isNavigation) history.pushState(null, "", location.href);
    if (["page", "view", "pin", "token"].some((name) => name in changes)) this.clearHover(); // the crosshair moves elsewhere
    Object.assign(this.state, carryHeads(this.state, changes), changes);
    if (this.banner.classList.contains("bad")) this.banner.hidden = true;
    this.show();
  }

  // The index of the sequence to show for a layer: the selected one, or the last if the layer has fewer sequences.
  batchOf(place) {
    return Math.min(this.state.batch, this.layer(place).shape[0] - 1);
  }

  layer({ run, layer }) {
    return this.info.runs[run].layers[layer];
  }

  // The name of a head: its numbers first, then its run if there are several, and its module.
  name(place) {
    const { number, name, heads } = this.layer(place), { runs } = this.info;
    return `layer ${number}, head ${heads[place.head]} · ${runs.length > 1 ? `${runs[place.run].title} · ` : ""}${name}`;
  }

  short(place) {
    return `layer ${this.layer(place).number} · head ${this.layer(place).heads[place.head]}`;
  }

  // -- data -------------------------------------------------------------------------------------

  // Return a promise of the response to an address, which is requested once.
  load(address, convert = (response) => response) {
    if (!this.responses.has(address)) {
      const loading = json(this.client, address, this.abortController.signal).then(convert);
      loading.catch(() => this.responses.delete(address)); // so that it can be requested again
      this.responses.set(address, loading);
    }
    return this.responses.get(address);
  }

  async tokens({ run, layer, batch }) {
    try {
      const tokens = await this.load(`tokens/${run}/${layer}/${batch}`, (response) => new Tokens(response));
      this.reportMissingFonts(tokens);
      return tokens;
    } catch (error) {
      this.showError(error);
      return new Tokens({ queries: null, keys: null, first: null });
    }
  }

  // -- header and toolbar -----------------------------------------------------------------------

  build() {
    const tabs = Object.entries(PAGES).map(([page, { title, key }]) => button(`page-${page}`, title, `${title} (${key})`, () => this.change({ page })));
    this.subject = make("div", { class: "subject" });
    this.controls = {
      place: make("span", { class: "group" }), second: make("span", { class: "group" }), sequence: make("span", { class: "group" }),
      pooling: this.choice("pooling", "cells", { max: "max", mean: "mean" }, "how cells of several weights are pooled (m)"),
      scale: this.choice("scale", "colours", SCALES, "scale of colours (l)"),
    };
    this.tools = make("span", { class: "group page-tools" }); // of the page
    this.heading = make("h1", { class: "visually-hidden" });
    this.body = make(this.linked ? "main" : "div", { class: "body", tabindex: -1 }); // a notebook has a <main> already
    this.banner = make("div", { class: "banner", role: "alert", hidden: true });
    this.search = new Search(this);
    this.drawer = new Drawer(this);
    this.settings = button("settings", "settings", "show or hide all controls", () => this.expand(!this.root.classList.contains("expanded")));
    this.settings.setAttribute("aria-expanded", "false");
    this.keys = make("dialog", { class: "keys", "aria-labelledby": "keys-title" });
    this.root.replaceChildren(
      make("header", { class: "header" }, this.heading, make("nav", { class: "tabs", "aria-label": "pages" }, ...tabs), this.subject, this.settings,
        this.search.element,
        make("span", { class: "group" },
          this.linked ? button("link", "copy link", "copy a link to this view (k)", () => this.copyLink()) : "",
          button("theme", "theme", "light or dark theme (t)", () => this.toggleTheme()),
          button("help", "?", "help (?)", () => this.showKeys()))),
      make("section", { class: "toolbar", "aria-label": "settings" }, ...Object.values(this.controls), this.tools,
        make("span", { class: "group tail" }, ...Object.values(this.drawer.buttons))),
      make("div", { class: "middle" }, this.body, this.drawer.element), this.banner, this.keys);
  }

  // Show all controls, or on a phone only those that each page needs most.
  expand(isExpanded) {
    this.root.classList.toggle("expanded", isExpanded);
    this.settings.setAttribute("aria-expanded", isExpanded);
  }

  // Return a group of radio buttons that set a part of the state. options: labels by value.
  choice(name, label, options, title = "") {
    const group = `${name}-${Math.random().toString(36).slice(2)}`; // several viewers may share a notebook
    const inputs = Object.entries(options).map(([value, text]) => make("label", {},
      make("input", { type: "radio", name: group, value, onchange: () => this.change({ [name]: value }) }), make("span", {}, text)));
    return make("fieldset", { id: name, class: "choice", title }, make("legend", {}, label), make("span", { class: "segments" }, ...inputs));
  }

  show() {
    if (this.abortController.signal.aborted) return; // removed, such as by a notebook that runs the cell again
    if (this.root.matches(":focus-within")) this.keepFocus();
    sanitize(this.state, this.info);
    const { state, root } = this;
    Object.assign(root.dataset, { theme: this.themeName(), page: state.page });
    for (const page of CHOICES.page) root.querySelector(`#page-${page}`).setAttribute("aria-current", state.page === page ? "page" : "false");
    this.heading.textContent = `${PAGES[state.page].title}: ${state.page === "overview" ? this.info.runs[0].title : this.name(state)}`;
    if (this.linked) document.title = `${state.page === "overview" ? this.info.runs[0].title : this.name(state)} · manyheads`;
    this.describeSubject();
    this.updateControls();
    this.saveState();
    this.showPage();
    for (const name of Object.keys(CHOICES)) {
      const input = root.querySelector(`#${name} input[value="${state[name]}"]`);
      if (input) input.checked = true;
    }
  }

  // Keep the keyboard focus in the viewer if the focused element is replaced.
  keepFocus() {
    const { activeElement } = this.root.getRootNode(), select = activeElement?.matches("select") && `select.${activeElement.className}`;
    requestAnimationFrame(() => {
      if (this.root.matches(":focus-within")) return;
      const element = (select && this.root.querySelector(select)) || this.body.querySelector("canvas.map") || this.body;
      element.focus({ preventScroll: true });
    });
  }

  showPage() {
    const { page: name } = this.state;
    if (this.pageName !== name) {
      if (this.page) this.hideMessage(); // it was about this page
      this.page?.remove();
      this.body.replaceChildren();
      this.body.scrollTop = 0; // each page opens at its top, or where it scrolls to
      this.tools.replaceChildren();
      this.page = PAGES[name].open(this.body, this, this.tools);
      this.pageName = name;
    }
    this.page.open();
  }

  // Write the model, its text, and the numbers of tokens, layers and heads; of several runs their models and texts.
  describeSubject() {
    const { state, info } = this, { second } = state, isCompared = state.page === "head" && second && second.run !== state.run;
    const shown = state.page === "overview" ? [...info.runs.keys()] : isCompared ? [state.run, second.run] : [state.run];
    const excerpt = (run) => (shown.length > 2 ? "" : this.excerptOf(run)); // of more runs, their matrices have it
    const names = shown.map((run) => [make("strong", { title: info.runs[run].title }, info.runs[run].title), excerpt(run)]);
    const [run] = shown.map((n) => info.runs[n]);
    const facts = shown.length > 1 ? [plural(shown.length, "run")] : [describeSize(run), describeHeads(run)];
    this.subject.classList.toggle("several", shown.length > 1);
    this.subject.replaceChildren(...names.flat(), ...facts.map((text) => make("span", { class: "muted" }, text)));
  }

  // The text of a run in quotation marks: its beginning, or of several runs the part that tells it from the others. "" without a text.
  textOf(run, batch = this.state.batch) {
    const { texts, parts } = this.info.runs[run], all = this.info.runs.length > 1 ? parts : texts;
    return all[Math.min(batch, all.length - 1)] ?? "";
  }

  excerptOf(run) {
    const text = this.textOf(run);
    return text ? make("span", { class: "excerpt", dir: "auto", title: text }, `“${text}”`) : "";
  }

  // Show the controls of the page, and fill the selects of run, layer, head and sequence.
  updateControls() {
    const { state, info, controls } = this, used = PAGES[state.page].controls, hasHead = used.includes("head");
    for (const [name, control] of Object.entries(controls)) control.hidden = !used.includes(name) || (name === "second" && !state.second);
    if (used.includes("place")) controls.place.replaceChildren(...this.selectPlace(state, hasHead, "", (changes) => this.change({ ...changes, ...this.resetView(changes) })));
    if (used.includes("second") && state.second) {
      const choose = (changes) => this.change({ second: { ...state.second, ...changes } });
      controls.second.replaceChildren(make("span", { class: "muted" }, "with"), ...this.selectPlace(state.second, hasHead, " beside", choose));
    }
    const count = Math.max(...info.runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0])));
    const sequences = Array.from({ length: count }, (_, n) => String(n));
    controls.sequence.replaceChildren(this.select("sequence", "sequence", sequences, state.batch, (batch) => this.change({ batch })));
  }

  // Return the selects of a run, a layer and, if `hasHead`, a head. suffix: what distinguishes their names from others.
  selectPlace(place, hasHead, suffix, choose) {
    const { runs } = this.info, { layers } = runs[place.run];
    return [
      this.select("run", `run${suffix}`, runs.map(({ title }) => title), place.run, (run) => choose({ run, layer: 0, head: 0 })),
      this.select("layer", `layer${suffix}`, layers.map(({ number, name }) => `${number}: ${shortenMiddle(name, 24)}`), place.layer, (layer) => choose({ layer })),
      hasHead ? this.select("head", `head${suffix}`, this.layer(place).heads.map(String), place.head, (head) => choose({ head })) : "",
    ];
  }

  // Return a labelled <select>, or "" if there is nothing to choose.
  select(label, name, options, value, choose) {
    if (options.length < 2) return "";
    const box = make("select", { "aria-label": name, class: `choose-${name.replaceAll(" ", "-")}`, onchange: () => choose(Number(box.value)) },
      ...options.map((text, n) => make("option", { value: n }, text)));
    box.value = value;
    return make("label", { class: "field" }, make("span", {}, label), box);
  }

  // Return the changes that reset view and pin, or none if the new layer has the same shape.
  resetView(changes) {
    const before = this.layer(this.state).shape, run = changes.run ?? this.state.run, layer = changes.layer ?? this.state.layer;
    const after = this.info.runs[run].layers[layer].shape;
    return before[2] === after[2] && before[3] === after[3] ? {} : { view: null, pin: null };
  }

  // -- the crosshair ----------------------------------------------------------------------------

  // The cell of the crosshair: the one under the pointer, else the pinned one.
  cell() {
    return this.hovered ?? this.state.pin;
  }

  hover(cell) {
    if (String(cell) === String(this.hovered)) return;
    this.hovered = cell;
    this.page.update?.();
  }

  // Forget the cell under the pointer, so that the pinned one is shown until the pointer moves.
  clearHover() {
    this.hovered = null;
    this.page?.clearPointer?.();
  }

  pin(cell) {
    const isPinned = cell && String(cell) === String(this.state.pin);
    Object.assign(this.state, pinning(isPinned ? null : cell));
    this.saveState();
    this.page.update?.();
  }

  // -- theme ------------------------------------------------------------------------------------

  themeName() {
    return this.state.theme ?? this.notebookTheme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  // Adopt the notebook's theme: dark if its text colour, such as "rgb(230, 230, 230)", is light.
  adaptTo(color) {
    const parts = String(color).match(/[\d.]+/g)?.slice(0, 3).map(Number);
    const theme = parts?.length === 3 ? (parts[0] + parts[1] + parts[2] > 383 ? "dark" : "light") : this.notebookTheme;
    if (theme === this.notebookTheme) return;
    this.notebookTheme = theme;
    this.root.dataset.theme = this.themeName();
    if (this.info) this.show();
  }

  theme() {
    return THEMES[this.themeName()];
  }

  get differenceColors() {
    return this.differences[this.themeName()];
  }

  toggleTheme() {
    this.change({ theme: this.themeName() === "dark" ? "light" : "dark" });
  }

  // Choose the next value of a part of the state.
  toggle(name) {
    const values = CHOICES[name];
    this.change({ [name]: values[(values.indexOf(this.state[name]) + 1) % values.length] });
  }

  // The pattern that fills masked cells.
  hatch(context) {
    const name = this.themeName();
    return (this.hatches[name] ??= makeHatch(context, THEMES[name].hatch));
  }

  // -- links and messages -----------------------------------------------------------------------

  async copyLink() {
    this.saveState();
    try {
      await navigator.clipboard.writeText(location.href);
      this.showMessage("Link copied. It restores this view in this browser.");
    } catch {
      this.showMessage(location.href);
    }
  }

  // Show a message for a few seconds.
  showMessage(text) {
    this.writeBanner(text, false);
    this.hiding = setTimeout(() => (this.banner.hidden = true), 4000);
  }

  // Hide the message, unless it is an error. text: only if it is this one.
  hideMessage(text = null) {
    const isShown = text === null || this.banner.textContent.startsWith(text);
    if (isShown && !this.banner.classList.contains("bad")) this.banner.hidden = true;
  }

  // Show an error until it is dismissed. A request that was cancelled isn't an error.
  showError(error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ViewerError)) console.error(error);
    this.writeBanner(error.message, true);
  }

  // Say once, until it is dismissed, that no installed font has some characters of a text.
  reportMissingFonts({ keys, pieces }) {
    const absent = this.hasReportedFonts ? null : findAbsentCharacter((pieces ?? keys ?? []).join(""));
    if (!absent) return;
    this.hasReportedFonts = true;
    const write = () => {
      if (this.abortController.signal.aborted) return;
      if (this.banner.hidden) this.writeBanner(`No installed font has the characters drawn as boxes, such as ${absent}; Noto's fonts have most.`, false);
      else setTimeout(write, 500); // another message, such as that of a corrected link, is read first
    };
    write();
  }

  writeBanner(text, isError) {
    clearTimeout(this.hiding);
    this.banner.replaceChildren(make("span", {}, text),
      make("button", { type: "button", class: "dismiss", "aria-label": "dismiss", onclick: () => (this.banner.hidden = true) }, "×"));
    this.banner.classList.toggle("bad", isError);
    this.banner.hidden = false;
  }

  // -- keys -------------------------------------------------------------------------------------

  showKeys() {
    const list = (title, keys) => (keys.length ? make("section", {}, make("h3", {}, title),
      make("dl", {}, ...keys.flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)]))) : "");
    const { title, keys } = PAGES[this.state.page];
    this.keys.replaceChildren(
      make("h2", { id: "keys-title" }, "Help"),
      make("p", { class: "guide" }, GUIDE),
      make("div", { class: "sections" }, list(`${title} page`, keys), list("All pages", KEYS.filter(([key]) => this.linked || key !== "k"))),
      make("form", { method: "dialog" }, make("button", {}, "close")));
    this.keys.showModal();
  }

  pressKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.linked) event.stopPropagation(); // otherwise the notebook would handle the key too
    if (this.keys.open || isForControl(event)) return;
    if (event.key === "Escape" && (this.search.close() || this.drawer.close())) return event.preventDefault();
    if (this.page.pressKey?.(event) || this.pressSharedKey(event.key)) event.preventDefault();
  }

  // Handle a key that all pages have; return false if it isn't one.
  pressSharedKey(key) {
    const page = Object.keys(PAGES).find((name) => PAGES[name].key === key);
    const action = page ? () => this.change({ page }) : {
      "[": () => this.moveHead(-1), "]": () => this.moveHead(1), "{": () => this.moveLayer(-1), "}": () => this.moveLayer(1),
      m: () => this.toggle("pooling"), l: () => this.toggle("scale"), k: () => this.linked && this.copyLink(),
      t: () => this.toggleTheme(), "?": () => this.showKeys(), "/": () => (this.expand(true), this.search.input.select()),
      f: () => this.drawer.toggle("findings"), w: () => this.drawer.toggle("pair"),
    }[key];
    action?.();
    return action !== undefined;
  }

  moveHead(by) {
    const { length } = this.layer(this.state).heads, head = (this.state.head + by + length) % length;
    this.change({ head, ...(showsHeads(this.state.page) ? { heads: String(head) } : {}) });
  }

  moveLayer(by) {
    const { length } = this.info.runs[this.state.run].layers, layer = (this.state.layer + by + length) % length;
    this.change({ layer, ...this.resetView({ layer }) });
  }
}

const button = (id, text, title, onclick) => make("button", { type: "button", id, title, onclick }, text);

// Shorten a text in its middle, because the ends of the names of modules tell more.
const shortenMiddle = (text, most) => (text.length > most ? `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}` : text);

// Return true if a key is meant for the focused control: letters for a text field, arrows for radio buttons.
function isForControl({ target, key }) {
  const control = target.closest?.("input, select, textarea");
  if (!control || key === "Escape") return false;
  const isToggle = control.matches("input[type=radio], input[type=checkbox]");
  return !isToggle || key.startsWith("Arrow") || key === " ";
}

// The number of tokens of a run, of queries and keys where they differ.
function describeSize({ layers }) {
  const [{ shape }] = layers;
  return shape[2] === shape[3] ? plural(shape[3], "token") : matrixSize(shape);
}

// The numbers of layers and heads of a run, such as "4 layers × 6 heads".
function describeHeads({ layers }) {
  const heads = layers.map(({ shape }) => shape[1]), most = Math.max(...heads);
  const isEqual = heads.every((count) => count === most);
  return `${plural(layers.length, "layer")} × ${isEqual ? plural(most, "head") : `${Math.min(...heads)} to ${most} heads`}`;
}

// Start the viewer in an element. linked: store the state in the URL.
function show(root, client, linked = true) {
  const app = new App(root, client, linked);
  app.start().catch((error) => {
    root.replaceChildren(make("p", { class: "opening", role: "alert" }, error.message));
    if (!(error instanceof ViewerError)) console.error(error);
  });
  return app;
}
