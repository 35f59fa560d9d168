// The page of an atlas: a map of all heads, a table of them, and the details of one.

const { facts, heads, measures, shares, passages } = JSON.parse(document.getElementById("data").textContent);
const UNITS = Object.fromEntries(measures);
const EXTRA = { sink_rate: "", sink_first: "", ablation_cost: "nats" };
const NAMES = { sink_rate: "sink rate", sink_first: "sink first", ablation_cost: "ablation cost", row_max: "largest weight" };
const columns = [...measures.map(([name]) => name), ...Object.keys(EXTRA)].filter((name) => heads.some((head) => head[name] !== null));
const title = (name) => NAMES[name] ?? name.replaceAll("_", " ");
const unit = (name) => UNITS[name] ?? EXTRA[name] ?? "";
const format = (x) => (x === null || x === undefined ? "–" : x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(1) : x.toFixed(Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 3));
const place = ({ layer, head }) => `${layer}.${head}`;

// Viridis (van der Walt & Smith 2015), at nine points.
const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]];
function colour(share) {
  const x = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1), n = Math.min(Math.floor(x), VIRIDIS.length - 2);
  return VIRIDIS[n].map((from, i) => Math.round(from + (VIRIDIS[n + 1][i] - from) * (x - n)));
}

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function drawing(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const state = { score: columns.includes("induction") ? "induction" : columns[0], order: null, down: true, head: heads[0] };
const map = make("div"), table = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "All heads" }), detail = make("section", { "aria-live": "polite" });

function choose(head) {
  state.head = head;
  history.replaceState(null, "", `#${place(head)}`);
  show();
}

// -- the map ---------------------------------------------------------------------------------------

function range(name) {
  const values = heads.map((head) => head[name]).filter((x) => x !== null);
  const isWeight = unit(name) === "";
  return isWeight ? [0, Math.max(...values, 1e-9)] : [Math.min(...values, 0), Math.max(...values, 1e-9)];
}

function drawMap() {
  const [low, high] = range(state.score), layers = new Map();
  for (const head of heads) layers.set(head.layer, [...(layers.get(head.layer) ?? []), head]);
  const most = Math.max(...[...layers.values()].map((row) => row.length));
  const cell = (head) => {
    const value = head[state.score], share = (value - low) / (high - low || 1), rgb = colour(share);
    const button = make("button", { "aria-pressed": String(head === state.head), title: `layer ${head.layer}, head ${head.head}: ${title(state.score)} ${format(value)}`, onclick: () => choose(head) }, format(value));
    if (value !== null) button.style.cssText = `background: rgb(${rgb}); color: ${share > 0.6 ? "#111" : "#fff"}`;
    return make("td", {}, button);
  };
  const select = make("select", { onchange: ({ target }) => { state.score = target.value; show(); } }, ...columns.map((name) => {
    const option = make("option", { value: name }, title(name));
    option.selected = name === state.score;
    return option;
  }));
  const bar = make("canvas", { width: "128", height: "1", "aria-hidden": "true" }), context = bar.getContext("2d");
  for (let x = 0; x < 128; x++) {
    context.fillStyle = `rgb(${colour(x / 127)})`;
    context.fillRect(x, 0, 1, 1);
  }
  map.replaceChildren(
    make("label", {}, "Show ", select),
    make("table", { class: "map" },
      make("tr", {}, make("th", { scope: "col" }, "layer"), ...Array.from({ length: most }, (_, n) => make("th", { scope: "col" }, `head ${n}`))),
      ...[...layers].map(([layer, row]) => make("tr", {}, make("th", { scope: "row" }, String(layer)), ...row.map(cell)))),
    make("div", { class: "legend" }, format(low), bar, `${format(high)} ${unit(state.score)}`, make("span", {}, "(mean over the queries)")),
  );
}

// -- the table -------------------------------------------------------------------------------------

function drawTable() {
  const names = ["head", "pattern", "cluster", ...columns], key = state.order;
  const value = (head, name) => (name === "head" ? head.layer * 1e6 + head.head : head[name]);
  const rows = [...heads];
  if (key) {
    rows.sort((a, b) => {
      const [x, y] = [value(a, key), value(b, key)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (typeof x === "string" ? x.localeCompare(y) : x - y) * (state.down ? -1 : 1);
    });
  }
  const header = names.map((name) => make("th", { scope: "col", "aria-sort": name === key ? (state.down ? "descending" : "ascending") : "none" },
    make("button", { onclick: () => { state.down = name === key ? !state.down : !["head", "pattern", "cluster"].includes(name); state.order = name; drawTable(); } }, title(name) + (name === key ? (state.down ? " ▾" : " ▴") : ""))));
  const scroll = [table.scrollLeft, table.scrollTop];
  table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...header)), make("tbody", {}, ...rows.map((head) => make("tr", { "aria-selected": String(head === state.head) },
    make("td", {}, make("button", { onclick: () => choose(head) }, place(head))),
    make("td", { class: "text" }, head.pattern ?? "–"),
    make("td", {}, String(head.cluster)),
    ...columns.map((name) => make("td", {}, format(head[name]))))))));
  [table.scrollLeft, table.scrollTop] = scroll;
}

// -- a head ----------------------------------------------------------------------------------------

function plot(points, name, text) {
  const width = 220, height = 100, last = Math.max(points.at(-1)?.[1] ?? 1, 1), top = Math.max(...points.map((p) => p[2]), 1e-9);
  const x = (p) => (Math.log1p(p) / Math.log1p(last)) * width, y = (v) => height - (v / top) * height;
  const path = points.map(([first, end, v], n) => `${n ? "L" : "M"}${x((first + end) / 2).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  return make("figure", { style: null }, drawing("svg", { width: width + 60, height: height + 36, viewBox: `-44 -8 ${width + 60} ${height + 40}`, role: "img", "aria-label": text },
    drawing("line", { x1: 0, x2: width, y1: height, y2: height }),
    drawing("line", { x1: 0, x2: 0, y1: 0, y2: height }),
    drawing("text", { x: -5, y: 8, "text-anchor": "end" }, format(top)),
    drawing("text", { x: -5, y: height, "text-anchor": "end" }, "0"),
    ...[...new Set([0, 10, 100, 1000, 10000].filter((p) => p < last / 1.5).concat(last))].map((p) => drawing("text", { x: x(p), y: height + 13, "text-anchor": "middle" }, String(p))),
    drawing("text", { x: width / 2, y: height + 28, "text-anchor": "middle" }, `position of the query`),
    drawing("path", { d: path })), make("figcaption", { class: "muted" }, name));
}

// Parts are [text, weight, is the query]: the weight is null for text that is no key, the text is null where some is left out.
function drawText(parts) {
  const text = make("p");
  for (const [part, weight, isQuery] of parts) {
    if (part === null) text.append(make("span", { class: "muted" }, " … "));
    else if (weight === null && !isQuery) text.append(part);
    else {
      const span = make(weight === null ? "span" : "mark", { class: isQuery ? "query" : null, title: weight === null ? "the query" : `weight ${format(weight)}` }, part);
      if (weight !== null) span.style.setProperty("--weight", weight);
      text.append(span);
    }
  }
  return text;
}

// The parts of the whole passage of an example.
function passageOf(example) {
  const characters = [...passages[example.passage]], marks = new Map(), parts = [];
  example.spans.forEach(([start, stop], n) => {
    const mark = marks.get(start) ?? { stop, weight: null, isQuery: false };
    if (n === 0) mark.isQuery = true;
    else mark.weight = Math.max(mark.weight ?? 0, example.keys[n - 1][2]);
    marks.set(start, mark);
  });
  let at = 0;
  for (const [start, { stop, weight, isQuery }] of [...marks].sort((x, y) => x[0] - y[0])) {
    parts.push([characters.slice(at, start).join(""), null, false], [characters.slice(start, stop).join(""), weight, isQuery]);
    at = stop;
  }
  return [...parts, [characters.slice(at).join(""), null, false]];
}

// The largest weights of the query, and the sum of the others.
function drawRow(example) {
  const rest = Math.max(0, 1 - example.keys.reduce((sum, [, , weight]) => sum + weight, 0));
  const line = (label, where, weight) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--weight", weight);
    return make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "muted" }, where), make("td", {}, weight < 0.0005 ? "< 0.001" : weight.toFixed(3)), make("td", {}, bar));
  };
  return make("table", { class: "row" },
    make("caption", {}, `“${example.token}” at ${example.query} attends to`),
    ...example.keys.map(([label, key, weight]) => line(`“${label}”`, key === example.query ? "itself" : `at ${key}`, weight)),
    rest >= 0.0005 ? line("other keys", "", rest) : null);
}

function drawExample(example) {
  const open = () => {
    if (whole.children.length > 1) return;
    const text = drawText(passageOf(example));
    whole.append(text);
    text.scrollTop = text.querySelector(".query").offsetTop - text.offsetTop - text.clientHeight / 2;
  };
  const whole = make("details", { ontoggle: open }, make("summary", {}, "whole passage"));
  return make("div", { class: "example" }, drawText(example.parts), drawRow(example), whole, make("div", { class: "about" }, `${example.file} `,
    example.link ? make("a", { href: example.link, target: "_blank", rel: "noopener" }, "open in the viewer") : null));
}

function drawDetail() {
  const head = state.head, link = ([layer, n, overlap]) => {
    const other = heads.find((each) => each.layer === layer && each.head === n);
    return make("button", { onclick: () => choose(other) }, `${layer}.${n} (${format(overlap)})`);
  };
  const spread = (list) => list.flatMap((each, n) => (n ? [" ", each] : [each]));
  detail.replaceChildren(
    make("h2", {}, `Layer ${head.layer}, head ${head.head}${head.pattern ? `: ${head.pattern}` : ""}`),
    make("div", { class: "muted" }, `cluster ${head.cluster} · ${head.path}`, head.cost ? ` · ablation adds ${format(head.cost[0])} ± ${format(head.cost[1])} nats per token` : ""),
    make("h3", {}, "Scores of the queries"),
    make("table", { class: "quantiles" },
      make("thead", {}, make("tr", {}, ...["", "mean", "std", ...shares.map((p) => `${Number(p.slice(1))} %`), ""].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...Object.entries(head.scores).map(([name, values]) => make("tr", {}, make("th", { scope: "row" }, title(name)), ...values.map((x) => make("td", {}, format(x))), make("td", { class: "muted" }, unit(name)))))),
    make("h3", {}, "By position"),
    make("div", { class: "plots" },
      plot(head.positions.map(([a, b, entropy]) => [a, b, entropy]), "mean entropy, nats", "Mean entropy by position"),
      plot(head.positions.map(([a, b, , distance]) => [a, b, distance]), "mean distance, positions", "Mean distance by position")),
    make("h3", {}, "Similar heads (overlap of their weights)"),
    make("div", {}, ...spread(head.alike.map(link))),
    make("h3", {}, "Sinks: keys that receive the most attention in a passage"),
    make("div", {}, head.sinks.map(([token, position, received]) => `“${token}” at ${position}: ${format(received)}`).join("; ") || "–",
      make("span", { class: "muted" }, ` · ${format(100 * head.sink_rate)} % of the queries give the first key more than 0.3`)),
    make("h3", {}, "Most surprising examples"),
    make("div", { class: "muted" }, "The query is underlined, its keys are highlighted by weight.",
      head.examples.some((example) => example.link) ? null : make("span", {}, " This page has the largest weights of each example; ", make("code", {}, "manyheads view DIR"), ", with the folder of the atlas, opens the whole matrix.")),
    ...head.examples.map(drawExample),
  );
}

function show() {
  drawMap();
  drawTable();
  drawDetail();
}

const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
document.getElementById("atlas").append(
  make("header", {}, make("h1", {}, `Atlas of heads: ${facts.model}`),
    make("span", { class: "muted" }, [count(heads.length, "head"), count(facts.layers.length, "layer"), count(facts.tokens, "token"), count(facts.files, "file")].join(" · "))),
  make("main", { class: "columns" }, make("section", {}, map, table), detail),
);
state.head = heads.find((head) => place(head) === location.hash.slice(1)) ?? heads[0];
show();
