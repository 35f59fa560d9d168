// The selection that all pages share. Text and Lines select a token, Head pins a weight. The last choice counts: it resets the
// other one, which is then derived from it when a page needs it.

// The changes of the state that select a token. side: "query" or "key". Its position is that of a key, or in cross-attention that of
// a query if the side is "query".
const selecting = (token, side = "query") => ({ token, side: token === null ? "query" : side, pin: null, start: null, queries: null });

// The changes of the state that pin a weight, [query, key].
const pinning = (pin) => ({ pin, token: null, side: "query", start: null });

// The query of the selected token, null if it isn't one.
function selectedQuery({ token, side }, { first }, t) {
  if (token === null || side !== "query") return null;
  const query = token - (first ?? 0);
  return query >= 0 && query < t ? query : null;
}

// Select the token of the pinned weight's query if no token is selected.
function deriveToken(state, { first }) {
  if (state.token !== null || !state.pin) return;
  state.token = state.pin[0] + (first ?? 0), state.side = "query";
}

// Return the weight to pin for the selected token, [query, key]: the largest of the query, or that of the key if it isn't a query,
// in the head that is shown, or in the mean of those that Text and Lines show.
async function deriveCell(app, { run, layer, head, batch }, tokens) {
  const { page, heads } = app.state, isMean = showsHeads(page) && heads !== "none";
  const { shape: [, , t, s], finest } = app.layer({ run, layer }), { token } = app.state, query = selectedQuery(app.state, tokens, t);
  const [axis, n] = query === null ? ["column", token] : ["row", query];
  if (token === null || n >= (query === null ? s : t)) return null;
  const isPooled = finest > 0; // a file that has no single weights
  const { top } = isPooled ? { top: [] } : await json(app.client, `${axis}/${run}/${layer}/${isMean ? heads : head}/${n}/${batch}`);
  const largest = top[0]?.[0];
  if (query === null) return [largest ?? Math.min(t - 1, Math.max(0, n - (tokens.first ?? 0))), n];
  return [n, largest ?? Math.min(s - 1, n + (tokens.first ?? 0))];
}

// Pin the weight of the selected token on the page Head, and move the view to it.
async function pinSelected(app, pane) {
  const { token, side, pin } = app.state;
  if (token === null || pin) return;
  const { place } = pane, cell = await deriveCell(app, place, await app.tokens(place));
  const isCurrent = pane.tiles && pane.place === place && app.state.token === token && app.state.side === side && !app.state.pin;
  if (!cell || !isCurrent) return;
  pane.page.moveTo(cell);
  Object.assign(app.state, { token, side });
  app.saveState();
}

const showsHeads = (page) => page === "text" || page === "lines";

// The changes of the chosen heads when a page is opened: Text and Lines show the head of the page Head, and Head shows one of theirs.
function carryHeads(state, { page, head }) {
  if (page === undefined || page === state.page || head !== undefined) return {};
  if (state.page === "head" && showsHeads(page)) return { heads: String(state.head) };
  if (!showsHeads(state.page) || page !== "head" || ["all", "none"].includes(state.heads)) return {};
  const chosen = state.heads.split(",").map(Number);
  return chosen.includes(state.head) ? {} : { head: chosen[0] };
}
