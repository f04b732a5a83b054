// The results browser: measurements from benchmarks/results, as they are in the files.

import { byId, make } from "./dom.js";
import { colours, started, startTheme } from "./theme.js";

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "ring"];
const FILTERS = [
  ["model", "Model"],
  ["problems", "Problems"],
  ["device", "Device"],
  ["cache", "Cache"],
  ["decoding", "Decoding"],
  ["file", "File"],
];
const state = { points: [], chosen: {}, kind: "accuracy", picked: null };

const svg = (name, attributes = {}, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

const KINDS = {
  accuracy: { x: ["tpf", "answer tokens a forward pass"], y: ["accuracy", "right answers, %"], has: (p) => p.tpf !== undefined && p.accuracy !== undefined },
  throughput: { x: ["batch", "slots"], y: ["throughput", "answer tokens a second"], has: (p) => p.throughput !== undefined && p.batch !== undefined },
};

/** Settings in words, as far as they differ from nothing. */
function words(point) {
  const flat = Object.entries(point.settings ?? {}).flatMap(([name, value]) =>
    value !== null && typeof value === "object" ? Object.entries(value) : [[name, value]],
  );
  return flat.map(([name, value]) => `${name} ${value}`).join(", ");
}

function prepare(point) {
  const [cache, decoding] = (point.method ?? "?").split("+");
  return { model: "random weights", problems: "-", device: "?", ...point, cache, decoding: decoding ?? "?" };
}

function shown() {
  return state.points.filter(
    (p) => KINDS[state.kind].has(p) && FILTERS.every(([name]) => !state.chosen[name] || String(p[name]) === state.chosen[name]),
  );
}

function buildFilters() {
  const mine = state.points.filter(KINDS[state.kind].has);
  byId("filters").replaceChildren(
    ...FILTERS.map(([name, label]) => {
      const values = [...new Set(mine.map((p) => String(p[name])))].sort();
      if (!values.includes(state.chosen[name])) state.chosen[name] = "";
      const select = make("select", { id: `filter-${name}`, onchange: () => ((state.chosen[name] = select.value), draw()) },
        make("option", { value: "" }, "all"), ...values.map((v) => make("option", { value: v, selected: v === state.chosen[name] }, v)));
      return make("div", { class: "field", style: "flex:1 1 9rem" }, make("label", { for: `filter-${name}` }, label), select);
    }),
  );
}

function ticks(low, high) {
  const raw = (high - low) / 6 || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) out.push(Number(v.toPrecision(6)));
  return out;
}

function extent(values, room) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const pad = (high - low || Math.abs(high) || 1) * room;
  return [low - pad, high + pad];
}

function mark(shape, x, y, ink, filled) {
  const r = 5.5;
  const paint = { fill: filled ? ink.accent : "none", stroke: ink.accent, "stroke-width": 2 };
  if (shape === "circle" || shape === "ring") return svg("circle", { cx: x, cy: y, r, ...paint, fill: shape === "ring" ? "none" : paint.fill });
  if (shape === "square") return svg("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, ...paint });
  if (shape === "cross") return svg("path", { d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`, ...paint });
  const d = shape === "triangle" ? `M${x} ${y - r}L${x + r} ${y + r}L${x - r} ${y + r}Z` : `M${x} ${y - r - 1}L${x + r + 1} ${y}L${x} ${y + r + 1}L${x - r - 1} ${y}Z`;
  return svg("path", { d, ...paint });
}

function drawChart(points) {
  const chart = byId("plot");
  const width = Math.max(300, chart.parentElement.clientWidth - 32);
  const height = Math.min(440, Math.max(280, width * 0.5));
  const ink = colours();
  const { x: [xName, xLabel], y: [yName, yLabel] } = KINDS[state.kind];
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("aria-label", `${yLabel} against ${xLabel}: ${points.length} measurements; the table below has the numbers.`);
  if (!points.length) return chart.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no measurement with these filters"));
  const left = 46;
  const bottom = height - 40;
  const xs = extent(points.map((p) => p[xName]), 0.08);
  const spread = points.flatMap((p) => (state.kind === "accuracy" && p.interval ? p.interval : [p[yName]]));
  const ys = extent(spread, 0.05);
  if (state.kind === "throughput") [xs[0], ys[0]] = [0, 0];
  if (state.kind === "accuracy") ys[1] = Math.min(101, ys[1]);
  const px = (v) => left + ((v - xs[0]) / (xs[1] - xs[0])) * (width - left - 10);
  const py = (v) => bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (bottom - 24);
  const parts = [];
  for (const v of ticks(...ys)) parts.push(svg("line", { x1: left, x2: width - 10, y1: py(v), y2: py(v), stroke: ink.line }), svg("text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, v));
  for (const v of ticks(...xs)) parts.push(svg("text", { x: px(v), y: bottom + 17, "text-anchor": "middle" }, v));
  parts.push(svg("text", { x: width - 10, y: bottom + 34, "text-anchor": "end" }, xLabel), svg("text", { x: 0, y: 12 }, yLabel));
  const names = [...new Set(points.map((p) => p.method))].sort();
  if (state.kind === "throughput") parts.push(...lines(points, px, py, ink));
  points.forEach((point) => {
    const group = svg("g", { class: "point", style: "cursor:pointer" });
    const [x, y] = [px(point[xName]), py(point[yName])];
    if (state.kind === "accuracy" && point.interval) group.append(svg("line", { x1: x, x2: x, y1: py(point.interval[0]), y2: py(point.interval[1]), stroke: ink.edge }));
    const at = names.indexOf(point.method);
    group.append(mark(SHAPES[at % SHAPES.length], x, y, ink, at % 12 < SHAPES.length));
    if (point === state.picked) group.append(svg("circle", { cx: x, cy: y, r: 11, fill: "none", stroke: ink.focus, "stroke-width": 2.5 }));
    group.append(svg("title", {}, `${point.method} ${words(point)}: ${point[yName]} at ${point[xName]}`));
    group.addEventListener("click", () => choose(point));
    parts.push(group);
  });
  chart.replaceChildren(...parts);
  byId("plot-legend").replaceChildren(
    ...names.map((name, at) => {
      const small = svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" });
      small.append(mark(SHAPES[at % SHAPES.length], 8, 8, ink, at % 12 < SHAPES.length));
      return make("li", {}, small, name);
    }),
  );
}

/** Throughput of one setting over its batches. */
function lines(points, px, py, ink) {
  const groups = Map.groupBy
    ? Map.groupBy(points, (p) => `${p.file}${p.method}${p.device}${words(p)}`)
    : points.reduce((map, p) => map.set(`${p.file}${p.method}${p.device}${words(p)}`, [...(map.get(`${p.file}${p.method}${p.device}${words(p)}`) ?? []), p]), new Map());
  return [...groups.values()].filter((g) => g.length > 1).map((group) => {
    const sorted = [...group].sort((a, b) => a.batch - b.batch);
    return svg("polyline", { points: sorted.map((p) => `${px(p.batch)},${py(p.throughput)}`).join(" "), fill: "none", stroke: ink.edge });
  });
}

function drawTable(points) {
  const { x: [xName], y: [yName] } = KINDS[state.kind];
  const columns = state.kind === "accuracy" ? ["method", "settings", "problems", "right, %", "95 % interval", "tokens a pass", "rows a token", "model", "device"] : ["method", "settings", "batch", "tokens a second", "model", "device"];
  const sorted = [...points].sort((a, b) => (state.kind === "accuracy" ? b[xName] - a[xName] : a.method.localeCompare(b.method) || a[xName] - b[xName]));
  const cells = (p) =>
    state.kind === "accuracy"
      ? [p.method, words(p), p.problems, p.accuracy, p.interval ? p.interval.join(" to ") : "", p.tpf, p.rows_per_token ?? "", p.model, p.device]
      : [p.method, words(p), p.batch, p.throughput, p.synthetic ? `${p.model}, ${p.shape ?? ""} (made-up weights or commits)` : p.model, p.device];
  byId("table").replaceChildren(
    make("thead", {}, make("tr", {}, ...columns.map((c) => make("th", { scope: "col" }, c)))),
    make("tbody", {},
      ...sorted.map((point) => {
        const [first, ...rest] = cells(point);
        const button = make("button", { type: "button", class: "small", style: "min-height:1.8rem;padding:0 .5rem", "aria-pressed": String(point === state.picked), onclick: () => choose(point) }, first);
        return make("tr", {}, make("td", {}, button), ...rest.map((value) => make("td", { class: typeof value === "number" ? "n" : "" }, String(value))));
      })),
  );
  void yName;
}

function choose(point) {
  state.picked = state.picked === point ? null : point;
  draw();
}

function draw() {
  const points = shown();
  if (!points.includes(state.picked)) state.picked = null;
  drawChart(points);
  drawTable(points);
  const total = state.points.filter(KINDS[state.kind].has).length;
  const note = state.picked ? `${state.picked.method} (${words(state.picked) || "defaults"}), ${state.picked.date ?? "no date"}, ${state.picked.dtype ?? "?"}, from ${state.picked.file}. ${state.files[state.picked.file] ?? ""}` : "";
  byId("count").textContent = total ? `${points.length} of ${total} measurements. ${note}` : "No measurements of this kind in the files.";
}

function setKind(kind) {
  state.kind = kind;
  for (const button of byId("kinds").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === kind));
  buildFilters();
  draw();
}

async function start() {
  startTheme();
  try {
    const answer = await fetch("data/results.json");
    if (!answer.ok) throw new Error(`data/results.json: ${answer.status}`);
    const data = await answer.json();
    state.points = data.points.map(prepare);
    state.files = data.files;
    byId("skipped").replaceChildren(...Object.entries(data.skipped).map(([name, why]) => make("li", {}, `${name}: ${why}`)));
  } catch (error) {
    byId("error").textContent = `The results cannot be read: ${error.message}`;
    byId("error").hidden = false;
    return;
  }
  for (const button of byId("kinds").querySelectorAll("button")) button.addEventListener("click", () => setKind(button.value));
  setKind("accuracy");
  document.addEventListener("themechange", draw);
  new ResizeObserver(() => drawChart(shown())).observe(byId("plot").parentElement);
  started({ state, shown });
}

start();
