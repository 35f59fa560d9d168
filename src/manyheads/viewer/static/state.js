// The state of the viewer: its initial values, the fragment of the URL that restores it, and valid values.

// The initial state. The URL omits values that are equal to these.
const DEFAULTS = {
  page: "overview", run: 0, layer: 0, head: 0, batch: 0,
  pooling: "max", scale: "sqrt", theme: null,
  view: null, // of the head page: {x, y, n} (see geometry.js), null for the whole matrix
  pin: null, // the pinned crosshair: [query, key]
  second: null, // the head to compare with: {run, layer, head}
  show: "both", // of two heads: "both", or "difference"
  heads: "all", // of the pages Text and Lines: "all", "none", or the numbers of some heads, as in "0,3"
  token: null, // the selected token, as the position of a key; in cross-attention that of a query if `side` is "query"
  side: "query", // whether the token was selected as a query or as a key
  start: null, // of the page Lines: the first key, null to show the selected token
  length: null, // of the page Lines: the number of tokens
  queries: null, // of the page Lines: the first query, in cross-attention
  least: 0.02, // of the page Lines: the least weight that is drawn as a line
  score: "", // of the overview: the head score that its cells show, "" for none
  order: "layer", // of the overview: "layer", or "score" to sort by the score
};

// Values to choose from. The first is used in place of an invalid one.
const CHOICES = { page: Object.keys(PAGES), pooling: ["max", "mean"], scale: ["sqrt", "linear", "log"], order: ["layer", "score"], show: ["both", "difference"], side: ["query", "key"] };

const WORDS = ["page", "pooling", "scale", "theme", "heads", "side", "score", "order", "show"]; // parts of the state that are strings
const NUMBERS = ["run", "layer", "head", "batch", "token", "start", "length", "queries", "least"];

// Return the state in the URL. Unknown names are ignored.
function parseHash() {
  const params = new URLSearchParams(location.hash.slice(1)), state = {};
  for (const name of WORDS) if (params.has(name)) state[name] = params.get(name);
  for (const name of NUMBERS) if (params.has(name)) state[name] = Number(params.get(name)) || 0;
  const list = (name, size) => {
    const parts = params.get(name)?.split(",").map(Number);
    return parts?.length === size && parts.every(Number.isFinite) ? parts : null;
  };
  const view = list("view", 3), pin = list("pin", 2), second = list("second", 3);
  if (view && view[2] > 0) state.view = roundView({ x: view[0], y: view[1], n: view[2] });
  if (pin && Math.min(...pin) >= 0) state.pin = pin.map(Math.floor);
  if (second) state.second = { run: second[0], layer: second[1], head: second[2] };
  return state;
}

// Return the state as the fragment of a URL.
function formatHash(state) {
  const params = new URLSearchParams(), { view, pin, second } = state;
  for (const [name, value] of Object.entries(state)) {
    if (value === null || typeof value === "object" || value === DEFAULTS[name]) continue;
    params.set(name, value);
  }
  if (view) params.set("view", [view.x, view.y, view.n].join(","));
  if (pin) params.set("pin", pin.join(","));
  if (second) params.set("second", [second.run, second.layer, second.head].join(","));
  return params.toString().replaceAll("%2C", ",");
}

// Return the names of the values in the URL that the valid state doesn't have: "layer", "head", ….
function wrongParts(state) {
  const given = new URLSearchParams(location.hash.slice(1)), valid = new URLSearchParams(formatHash(state));
  return ["run", "layer", "head", "pin", "second"].filter((name) => given.has(name) && given.get(name) !== (valid.get(name) ?? String(DEFAULTS[name])));
}

// Replace invalid values, which the URL may contain if it was edited by hand.
function sanitize(state, info) {
  const { runs } = info, clampIndex = (n, size) => Math.max(0, Math.min(Math.floor(n) || 0, size - 1));
  const clampPlace = (place) => {
    place.run = clampIndex(place.run, runs.length);
    place.layer = clampIndex(place.layer, runs[place.run].layers.length);
    place.head = clampIndex(place.head, runs[place.run].layers[place.layer].heads.length);
  };
  for (const [name, values] of Object.entries(CHOICES)) if (!values.includes(state[name])) state[name] = values[0];
  if (!Object.hasOwn(THEMES, state.theme)) state.theme = null;
  if (!Object.hasOwn(info.scores, state.score)) state.score = "";
  clampPlace(state);
  if (state.second) clampPlace((state.second = { ...state.second }));
  const [, h, t, s] = runs[state.run].layers[state.layer].shape;
  if (state.pin && (state.pin[0] >= t || state.pin[1] >= s)) state.pin = null;
  state.batch = clampIndex(state.batch, Math.max(...runs.flatMap(({ layers }) => layers.map(({ shape }) => shape[0]))));
  for (const [name, size] of [["token", Math.max(s, t)], ["start", s], ["queries", t]]) {
    if (state[name] !== null) state[name] = clampIndex(state[name], size);
  }
  if (state.length !== null) state.length = Math.max(1, clampIndex(state.length, SPANS.at(-1) + 1));
  if (!LEAST_WEIGHTS.includes(state.least)) state.least = DEFAULTS.least;
  if (!["all", "none"].includes(state.heads) && !state.heads.split(",").every((head) => /^\d{1,5}$/.test(head) && Number(head) < h)) state.heads = "all";
}
