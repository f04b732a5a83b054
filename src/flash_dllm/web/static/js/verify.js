// The verify toy and the visibility of its views.

import { byId, make, slider } from "./dom.js";
import { decide } from "./rules.js";
import { colours, started, startTheme } from "./theme.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const TOP = 22;
const FOOT = 74;

const VIEW_TEXT = {
  paper:
    "As published: a mask view sees the drafts before it, the mask rows from its own on, and the context. A later mask row has read this draft, and one layer on this mask view reads that row: it sees its own draft.",
  "leak-free":
    "Mask views see the originals of later positions instead of each other. Nothing that has read a draft is read by its judge. The price: the context has not seen the drafts, so the view understates.",
  branch:
    "A copy of the whole window for each draft, with the drafts before it written. A copy sees itself and the context. Only positions outside the window have not seen the drafts.",
};

const svg = (name, attributes = {}, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

const state = { data: null, window: [], epsilon: 0.9, gamma: 0.8, picked: 0, dragging: null };
const controls = {};

function fate(result, index) {
  const k = result.search.indexOf(index);
  if (result.confident.includes(index)) return "confident";
  if (k < 0) return "untested";
  if (k < result.product) return "both";
  return k < result.paper ? "paper" : "rejected";
}

const FATES = {
  confident: ["committed by confidence", "C"],
  both: ["accepted by both rules", "✓"],
  paper: ["by the paper's rule only", "p"],
  rejected: ["not accepted", "×"],
  untested: ["not tested", ""],
};

// The chart -----------------------------------------------------------------------------------------------------

function geometry() {
  const chart = byId("chart");
  const width = Math.max(280, Math.round(chart.parentElement.clientWidth - 2 * 13));
  const left = 30;
  return { chart, width, left, column: (width - left) / state.window.length };
}

const yOf = (value) => TOP + HEIGHT * (1 - value);

function drawChart(result) {
  const { chart, width, left, column } = geometry();
  const ink = colours();
  chart.setAttribute("viewBox", `0 0 ${width} ${TOP + HEIGHT + FOOT}`);
  chart.setAttribute(
    "aria-label",
    "Window of candidates: " +
      state.window.map((p, i) => `${p.token}: ${p.draft.toFixed(2)}, view ${p.view.toFixed(2)}, ${FATES[fate(result, i)][0]}`).join("; "),
  );
  const parts = [patterns(ink)];
  for (const value of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(svg("line", { x1: left, x2: width, y1: yOf(value), y2: yOf(value), stroke: ink.line }));
    parts.push(svg("text", { x: left - 6, y: yOf(value) + 4, "text-anchor": "end" }, value === 0.25 || value === 0.75 ? "" : value));
  }
  state.window.forEach((place, index) => parts.push(...columnOf(place, index, result, { left, column }, ink)));
  for (const [value, name, dash, anchor] of [[state.epsilon, "ε", "", "end"], [state.gamma, "γ", "6 4", "end"]]) {
    parts.push(svg("line", { x1: left, x2: width, y1: yOf(value), y2: yOf(value), stroke: ink.ink, "stroke-width": 1.4, "stroke-dasharray": dash }));
    parts.push(svg("text", { x: left - 6, y: yOf(value) + (state.epsilon >= state.gamma === (name === "ε") ? 0 : 9), "text-anchor": anchor, style: "font-weight:700;fill:var(--ink)" }, name));
  }
  chart.replaceChildren(...parts);
}

function patterns(ink) {
  const defs = svg("defs");
  const pattern = svg("pattern", { id: "lines", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svg("rect", { width: 6, height: 6, fill: ink.card }), svg("rect", { width: 2.2, height: 6, fill: ink.verify }));
  defs.append(pattern);
  return defs;
}

function columnOf(place, index, result, { left, column }, ink) {
  const x = left + index * column;
  const kind = fate(result, index);
  const bar = Math.max(4, column * 0.36);
  const out = [];
  if (index === state.picked) out.push(svg("rect", { class: "picked", x, y: 0, width: column, height: TOP + HEIGHT + FOOT, rx: 4 }));
  const view = kind === "confident" || kind === "untested";
  out.push(
    svg("rect", { x: x + column * 0.1, y: yOf(place.draft), width: bar, height: HEIGHT * place.draft, fill: kind === "confident" ? ink.fresh : ink.guess, rx: 1 }),
    svg("rect", { x: x + column * 0.52, y: yOf(place.view), width: bar, height: HEIGHT * place.view, fill: "url(#lines)", stroke: ink.verify, rx: 1, opacity: view ? 0.25 : 1 }),
    svg("text", { x: x + column / 2, y: TOP + HEIGHT + 16, "text-anchor": "middle", style: "font-weight:700;fill:var(--ink)" }, FATES[kind][1]),
    svg("text", { class: "token", x: 0, y: 0, transform: `translate(${x + column / 2 + 4} ${TOP + HEIGHT + 26}) rotate(-90)`, "text-anchor": "end" }, place.token),
  );
  return out;
}

function drag(event) {
  const { chart, width, left, column } = geometry();
  const box = chart.getBoundingClientRect();
  const scale = width / box.width;
  const x = (event.clientX - box.left) * scale - left;
  const y = (event.clientY - box.top) * scale;
  if (event.type === "pointerdown") {
    const index = Math.floor(x / column);
    if (index < 0 || index >= state.window.length) return;
    state.dragging = { index, field: x / column - index < 0.5 ? "draft" : "view" };
    pick(index);
    if (y > TOP + HEIGHT) state.dragging = null;
    chart.setPointerCapture(event.pointerId);
  }
  if (!state.dragging) return;
  const value = Math.min(1, Math.max(0, 1 - (y - TOP) / HEIGHT));
  state.window[state.dragging.index][state.dragging.field] = Math.round(value * 100) / 100;
  refresh();
}

// Words and numbers ---------------------------------------------------------------------------------------------

function card(title, count, unit, bound, promise, why) {
  return make(
    "div",
    { class: "card", "data-count": count },
    make("h2", {}, title),
    make("div", { class: "big num" }, `${count} `, make("span", { class: "small soft", style: "letter-spacing:0;font-weight:400" }, unit)),
    make("p", { class: "small", style: "margin:.4rem 0 0" }, why),
    make("p", { class: "small soft num", style: "margin:.2rem 0 0" }, bound, promise ? make("br") : "", promise ?? ""),
  );
}

function drawVerdicts(result) {
  const { bounds } = result;
  const fixed = (value) => value.toFixed(3);
  const rest = (count) => (count ? `within ${fixed(bounds[count])} of what the views say` : "");
  byId("verdicts").replaceChildren(
    card(
      "By confidence",
      result.confident.length,
      result.confident.length === 1 ? "token committed" : "tokens committed",
      bounds.confident < 1 ? `within ${fixed(bounds.confident)} of the joint distribution` : "no bound: (n + 1) δ is above 1",
      null,
      result.forced ? "None reaches ε; a step commits at least the best one." : `At least ε = ${state.epsilon.toFixed(2)} sure in the first pass.`,
    ),
    card("The paper's rule", result.paper, "drafts accepted", rest(result.paper && "paper"), result.paper ? make("span", {}, "γ alone promises 1 − γ", make("sup", {}, String(result.paper)), ` = ${fixed(bounds.paper_worst)}`) : null, `Stops: ${result.stops.paper}.`),
    card("The product rule", result.product, "drafts accepted", rest(result.product && "product"), result.product ? `γ alone promises 1 − γ = ${fixed(bounds.product_worst)}` : null, `Stops: ${result.stops.product}.`),
  );
}

function drawWalk(result) {
  const head = make("tr", {}, ...["no.", "draft", "first pass", "its view", "product", "paper", "product rule"].map((t, i) => make("th", { scope: "col", class: i > 1 && i < 5 ? "n" : "" }, t)));
  const tag = (k, count) => (k < count ? make("span", { class: "tag ok" }, "accepted") : make("span", { class: "tag no" }, k === count ? "fails" : "after"));
  const rows = result.search.map((index, k) => {
    const place = state.window[index];
    return make(
      "tr",
      { class: k === result.paper || k === result.product ? "stop" : "" },
      make("td", { class: "n soft" }, String(k + 1)),
      make("td", { class: "mono" }, place.token),
      make("td", { class: "n" }, place.draft.toFixed(2)),
      make("td", { class: "n" }, place.view.toFixed(2)),
      make("td", { class: "n" }, result.running[k].toFixed(3)),
      make("td", {}, tag(k, result.paper)),
      make("td", {}, tag(k, result.product)),
    );
  });
  byId("walk").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

function drawLegend() {
  const ink = colours();
  const swatch = (style) => make("span", { class: "swatch", style: `${style};border:1px solid ${ink.line}` });
  const item = (mark, text) => make("li", {}, mark, text);
  const glyph = (text) => make("strong", { class: "mono" }, text);
  byId("chart-legend").replaceChildren(
    item(swatch(`background:${ink.fresh}`), "draft, committed by confidence"),
    item(swatch(`background:${ink.guess}`), "draft below ε"),
    item(swatch(`background:repeating-linear-gradient(135deg, ${ink.verify} 0 2px, ${ink.card} 2px 5px)`), "its mask view"),
    ...["confident", "both", "paper", "rejected"].map((kind) => item(glyph(FATES[kind][1]), FATES[kind][0])),
  );
}

function refresh() {
  const result = decide(state.window, state.epsilon, state.gamma, state.data.verify.search);
  drawChart(result);
  drawVerdicts(result);
  drawWalk(result);
  const place = state.window[state.picked];
  controls.draft.set(place.draft);
  controls.view.set(place.view);
  byId("agrees").checked = place.agrees || place.view > 0.5;
  byId("agrees").disabled = place.view > 0.5;
  controls.pick.value = String(state.picked);
}

function pick(index) {
  state.picked = index;
  refresh();
}

function build() {
  const fixed = (value) => value.toFixed(2);
  const threshold = (id, name, label) => {
    const made = slider({ label, min: 0.3, max: 1, step: 0.01, value: state[name], show: fixed, change: (v) => ((state[name] = v), refresh()) });
    byId(id).replaceChildren(...made.field.children);
    controls[name] = made;
  };
  threshold("epsilon", "epsilon", "ε, commit by confidence from");
  threshold("gamma", "gamma", "γ, accept from");
  const edit = (field, label) => {
    controls[field] = slider({ label, min: 0, max: 1, step: 0.01, value: 0, show: fixed, change: (v) => ((state.window[state.picked][field] = v), refresh()) });
    byId(`edit-${field}`).replaceChildren(controls[field].field);
  };
  edit("draft", "Draft confidence");
  edit("view", "Mask view");
  controls.pick = make("select", { id: "picked", onchange: (e) => pick(Number(e.target.value)) }, ...state.window.map((p, i) => make("option", { value: i }, `${i}: ${p.token}`)));
  byId("pick").replaceChildren(make("div", { class: "field" }, make("label", { for: "picked" }, "Position"), controls.pick));
  byId("agrees").addEventListener("change", (e) => ((state.window[state.picked].agrees = e.target.checked), refresh()));
  for (const kind of ["pointerdown", "pointermove"]) byId("chart").addEventListener(kind, drag);
  for (const kind of ["pointerup", "pointercancel"]) byId("chart").addEventListener(kind, () => (state.dragging = null));
  byId("reset").addEventListener("click", reset);
}

function reset() {
  const { window: given, epsilon, gamma } = state.data.verify;
  Object.assign(state, { window: structuredClone(given), epsilon, gamma, picked: 5 });
  controls.epsilon?.set(epsilon);
  controls.gamma?.set(gamma);
  if (controls.epsilon) refresh();
}

// Views ---------------------------------------------------------------------------------------------------------

const SUB = ["₁", "₂", "₃", "₄"];

function nameOf(line) {
  const at = `position ${line.pos}`;
  if (line.kind === "context") return line.token < 0 ? `token, ${at}` : `mask, ${at}`;
  if (line.kind === "original") return `canvas mask of i${SUB[line.k]}`;
  if (line.kind === "copy") {
    const what = line.token > 0 ? `draft i${SUB[line.token - 1]}` : "mask";
    return `copy ${line.k + 1}: ${what}, ${at}`;
  }
  return `${line.kind} of i${SUB[line.k]}`;
}

function drawViews() {
  const data = state.data.views[state.views];
  const leak = data.leaks[state.hop] ?? [];
  const hops = new Set();
  const column = new Map(data.keys.map((key, i) => [key.row, i]));
  leak.slice(1).forEach((row, i) => hops.add(`${row},${column.get(data.rows[leak[i]].row)}`));
  const head = make("tr", {}, make("th", {}, make("span", { class: "away" }, "row")), ...data.keys.map((key) => make("th", { scope: "col" }, make("span", {}, nameOf(key)))));
  const rows = data.rows.map((row, i) => {
    const judge = data.judges.indexOf(i);
    const label = judge >= 0 ? `${nameOf(row)} (judge)` : nameOf(row);
    const cells = data.keys.map((_, j) => {
      const hop = hops.has(`${i},${j}`);
      const order = hop ? leak.indexOf(i) : 0;
      return make("td", { class: hop ? "hop" : data.sees[i][j] ? "sees" : "" }, hop ? String(order) : data.sees[i][j] ? "●" : make("span", { class: "away" }, "no"));
    });
    return make("tr", {}, make("th", { scope: "row", class: judge >= 0 ? "judge" : "" }, label), ...cells);
  });
  byId("matrix").replaceChildren(make("caption", { class: "away" }, `Visibility, ${state.views} views`), make("thead", {}, head), make("tbody", {}, ...rows));
  byId("view-text").textContent = `${VIEW_TEXT[state.views]} ${sayLeak(data, leak)}`;
  for (const button of byId("hops").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.value) === state.hop));
    button.disabled = !data.leaks[Number(button.value)].length;
  }
  for (const button of byId("views").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === state.views));
}

function sayLeak(data, leak) {
  if (data.leaks.every((way) => !way.length)) return "No draft reaches its own judge, at any depth.";
  if (!leak.length) return `The judge of i${SUB[state.hop]} is the last one: no later mask row carries its draft.`;
  const names = leak.map((row) => nameOf(data.rows[row]));
  return `Layer 1: ${names[1]} reads ${names[0]}. Layer 2: ${names[2]} reads ${names[1]}.`;
}

function buildViews() {
  state.views = "paper";
  state.hop = 0;
  byId("views").append(
    ...Object.keys(state.data.views).map((name) =>
      make("button", { type: "button", value: name, onclick: () => ((state.views = name), drawViews()) }, name),
    ),
  );
  byId("hops").append(
    ...state.data.views.paper.leaks.map((_, k) =>
      make("button", { type: "button", value: k, onclick: () => ((state.hop = k), drawViews()) }, `i${SUB[k]}`),
    ),
  );
  drawViews();
}

async function start() {
  startTheme();
  state.data = await (await fetch("data/toys.json")).json();
  reset();
  build();
  refresh();
  drawLegend();
  buildViews();
  document.addEventListener("themechange", () => (refresh(), drawLegend()));
  new ResizeObserver(() => refresh()).observe(byId("chart").parentElement);
  started({ state });
}

start();
