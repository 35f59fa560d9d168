// The heads that the pages Text and Lines show: a row of chips to choose them, and the colours and dashes of their lines.

// Colours that differ for people with every kind of colour vision (after Okabe and Ito), by theme. Heads beyond the last one begin
// again with the first, in other dashes.
const HEAD_COLORS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b0558a", "#c98a00", "#3d9bd1", "#5f5f5f"],
  dark: ["#5aa9f0", "#ff8a3d", "#2fcf9f", "#e79ac6", "#f2bd3d", "#a6dcff", "#c4c4c4"],
};
const HEAD_DASHES = [[], [8, 4], [2, 3], [9, 3, 2, 3], [2, 8]]; // pixels of lines and gaps; with the colours, for 35 heads
const SAMPLE = 22; // pixels: the length of a sample of a line

const headColor = (theme, head) => HEAD_COLORS[theme][head % HEAD_COLORS[theme].length];
const headDashes = (head) => HEAD_DASHES[Math.floor(head / HEAD_COLORS.light.length) % HEAD_DASHES.length];

// A short line with the dashes of a head, in the colour of the text around it.
function lineSample(head) {
  const create = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const svg = create("svg", { class: "line-sample", width: SAMPLE, height: 4, "aria-hidden": "true" });
  svg.append(create("line", { x1: 0, y1: 2, x2: SAMPLE, y2: 2, "stroke-dasharray": headDashes(head).join(" ") || "none" }));
  return svg;
}

// The heads that a state chooses, as indices.
function chosenHeads(heads, size) {
  if (heads === "none") return [];
  return heads === "all" ? Array.from({ length: size }, (_, head) => head) : heads.split(",").map(Number);
}

// Chosen heads as a value of the state.
function formatHeads(chosen, size) {
  if (!chosen.length) return "none";
  return chosen.length === size ? "all" : [...chosen].sort((a, b) => a - b).join(",");
}

class HeadChips {
  // label: what the heads are chosen for. colored: show the colour and dashes of each head.
  constructor(app, label, colored) {
    this.app = app, this.colored = colored;
    this.chips = make("span", { class: "chip-list" });
    this.all = make("button", { type: "button", class: "chip-all", onclick: () => this.choose("all") }, "all");
    this.none = make("button", { type: "button", class: "chip-none", onclick: () => this.choose("none") }, "none");
    this.element = make("div", { class: "group chips", role: "group", "aria-label": label }, make("span", { class: "muted" }, label), this.all, this.none, this.chips);
  }

  // Show the chips of a layer. They are replaced only if the layer has other heads, so that a double click reaches one chip.
  update(layer) {
    const { heads } = this.app.state, names = layer.heads.join(",");
    if (names !== this.names) this.names = names, this.build(layer);
    const chosen = new Set(chosenHeads(heads, layer.heads.length)), theme = this.app.themeName();
    for (const [head, chip] of [...this.chips.children].entries()) {
      chip.setAttribute("aria-pressed", chosen.has(head));
      if (this.colored) chip.style.setProperty("--chip", headColor(theme, head));
    }
    this.all.disabled = heads === "all", this.none.disabled = heads === "none";
  }

  build({ heads }) {
    const toggle = (head) => {
      const chosen = new Set(chosenHeads(this.app.state.heads, heads.length));
      if (!chosen.delete(head)) chosen.add(head);
      this.choose(formatHeads([...chosen], heads.length));
    };
    this.chips.replaceChildren(...heads.map((name, head) => make("button", {
      type: "button", class: this.colored ? "chip colored" : "chip", "data-head": head, "aria-label": `head ${name}`,
      title: `head ${name}: click to show or hide it, double-click or alt-click to show only this one`,
      onclick: (event) => (event.altKey ? this.choose(String(head)) : toggle(head)),
      ondblclick: () => this.choose(String(head)),
    }, String(name), this.colored ? lineSample(head) : "")));
  }

  choose(heads) {
    this.app.change({ heads });
  }
}
