// Why a weight is what it is: the steps from q·k to the weight as equations, and q·k by dimension.

const PRODUCTS = 64; // pixels: the height of the chart of products

// Return elements that explain a weight. steps: the API's response to "explain".
function explainSteps(steps, app) {
  const chart = make("canvas", { class: "products", role: "img", "aria-label": `products of query and key in ${plural(steps.products.length, "dimension")}` });
  requestAnimationFrame(() => chart.isConnected && drawProducts(chart, steps.products, app.theme())); // its width is known then
  return [
    make("dl", { class: "steps" }, ...stepsOf(steps).flatMap(([name, value, className]) => [
      make("dt", { class: className }, name), make("dd", { class: className }, value)])),
    steps.value_norm === null ? make("p", { class: "muted" }, "How much the key contributes to the output (weight × norm of its value) isn't known: the run has no values.") : "",
    make("p", { class: "chart-title" }, `q·k is the sum of these products, one per dimension (${count(steps.products.length)})`),
    chart,
  ];
}

// The steps as [what, value, class].
function stepsOf(steps) {
  const rows = [["q·k", exactly(steps.dot), ""], [`× scale ${exactly(steps.scale)}`, `= ${exactly(steps.scaled)}`, ""]];
  if (steps.softcap !== null) rows.push([`softcap: ${exactly(steps.softcap)} · tanh(${exactly(steps.scaled)} / ${exactly(steps.softcap)})`, `= ${exactly(steps.capped)}`, ""]);
  const before = steps.capped ?? steps.scaled;
  if (steps.bias !== null) {
    const sum = before === null ? null : before + steps.bias;
    rows.push([`${steps.bias < 0 ? "−" : "+"} bias ${exactly(Math.abs(steps.bias))}`, `= ${exactly(steps.score ?? sum)}`, ""]);
  }
  if (steps.is_masked) {
    rows.push([`masked by ${steps.mask ?? "the bias"}: score`, "= −∞", "result"], ["weight = exp(−∞)", "= 0", "result"]);
    return rows;
  }
  rows.push(["score", `= ${exactly(steps.score)}`, "result"]);
  rows.push([`log-sum-exp of all scores of this query${steps.sink === null ? "" : `, with the sink's ${exactly(steps.sink)}`}`, exactly(steps.lse), ""]);
  rows.push([`weight = exp(${exactly(steps.score)} − ${inBrackets(steps.lse)})`, `= ${number(steps.weight, 4)}`, "result"]);
  if (steps.value_norm !== null) rows.push([`× norm of the value ${number(steps.value_norm, 4)}`, `= ${number(steps.contribution, 4)}`, ""]);
  if (steps.sink_weight !== null) rows.push(["weight of the sink", number(steps.sink_weight, 4), ""]);
  return rows;
}

const exactly = (x) => number(x, 7); // as float32 has it, so that differences of scores give the weight
const inBrackets = (x) => (x < 0 ? `(${exactly(x)})` : exactly(x));

// Draw the products of query and key as bars, up for positive ones and down for negative ones.
function drawProducts(canvas, products, theme) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = (PRODUCTS + 22) * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const numbers = products.map((product) => product ?? 0), high = Math.max(0, ...numbers), low = Math.min(0, ...numbers);
  const y = (product) => 6 + ((high - product) / (high - low || 1)) * (PRODUCTS - 8);
  const labels = [high, 0, low].filter((value, n, all) => n === 0 || Math.abs(y(value) - y(all[n - 1])) > 11);
  context.font = "11px system-ui, sans-serif";
  const left = Math.max(44, ...labels.map((value) => Math.ceil(context.measureText(number(value)).width) + 6)); // room for the minus sign
  const wide = width - left - 12, size = wide / numbers.length;
  for (const [n, product] of numbers.entries()) {
    context.fillStyle = product < 0 ? theme.accent : theme.bars;
    const [from, to] = [y(Math.max(0, product)), y(Math.min(0, product))];
    context.fillRect(left + n * size, from, Math.max(1, size - (size > 3 ? 1 : 0)), Math.max(product ? 1 : 0, to - from));
  }
  context.fillStyle = theme.muted;
  context.fillRect(left, Math.round(y(0)), wide, 1);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of labels) context.fillText(number(value), left - 5, y(value));
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText("dimension 0", left, PRODUCTS + 6);
  context.textAlign = "right";
  context.fillText(count(numbers.length - 1), left + wide, PRODUCTS + 6);
}
