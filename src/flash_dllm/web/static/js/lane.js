// One log on the page: canvas of tokens, grid of steps, what verification said, and the slots of the batch.

import { make } from "./dom.js";
import { REASONS, RECOMPUTED } from "./log.js";
import { colours, hatch, sharp } from "./theme.js";

const BINS = [0.5, 0.7, 0.9];
const GRID_MOST = 340;
const SLOT = 14;

/** Which of four shades a confidence has. */
export const bin = (confidence) => BINS.filter((edge) => (confidence ?? 0) >= edge).length;

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export class Lane {
  constructor(log, { title } = {}) {
    this.log = log;
    this.frame = -1;
    this.mode = "tokens";
    this.pointed = null;
    this.cache = {};
    this.build(title ?? log.name);
    this.choose([...log.requests.values()][0] ?? null);
  }

  build(title) {
    const { header } = this.log;
    this.counters = make("div", { class: "counters" });
    this.tokens = make("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Canvas: tokens of the answer" });
    this.verdict = make("p", { class: "small", style: "min-height: 3em; margin: 0 0 .6rem" });
    this.grid = make("canvas", { class: "wide", tabindex: 0, role: "img", "aria-label": "Step by position" });
    this.gantt = make("canvas", { class: "wide", tabindex: 0, role: "img", "aria-label": "Slots of the batch over time" });
    this.cell = make("p", { class: "small soft", "aria-live": "polite", style: "min-height: 1.5em; margin: .3rem 0 .6rem" });
    this.select = make("select", { "aria-label": "Request", onchange: () => this.choose(this.log.requests.get(this.select.value)) });
    this.modes = make("select", { "aria-label": "Grid shows", onchange: () => ((this.mode = this.modes.value), this.redraw()) },
      make("option", { value: "tokens" }, "what happened to the tokens"),
      make("option", { value: "rows" }, "rows recomputed, and why"));
    this.slotsPart = make("div", {}, make("h3", {}, "Slots of the batch"), this.gantt);
    this.element = make("article", { class: "card lane" },
      make("h2", {}, header ? header.method : title),
      make("p", { class: "small soft", style: "margin:0 0 .4rem; overflow-wrap:anywhere" }, header ? `${title}: ${header.model}, ${header.device}, ${header.dtype ?? "?"}, ${this.log.slots} ${this.log.slots === 1 ? "slot" : "slots"}` : title),
      this.counters,
      make("div", { class: "row small", style: "margin-top:.5rem" },
        (this.selectBox = make("label", { style: "flex: 1 1 9rem" }, "Request", this.select)),
        make("label", { style: "flex: 2 1 12rem" }, "Grid shows", this.modes)),
      this.tokens, this.verdict, this.grid, this.cell, this.slotsPart);
    this.grid.addEventListener("pointermove", (e) => this.point(e));
    this.grid.addEventListener("pointerdown", (e) => this.point(e));
    this.grid.addEventListener("pointerleave", () => this.aim(null));
    this.grid.addEventListener("blur", () => this.aim(null));
    this.grid.addEventListener("keydown", (e) => this.key(e));
    this.gantt.addEventListener("pointerdown", (e) => this.pickSlot(e));
    this.gantt.addEventListener("keydown", (e) => this.slotKey(e));
    this.list();
  }

  list() {
    const all = [...this.log.requests.values()];
    this.select.replaceChildren(...all.map((r) => make("option", { value: r.id }, r.slot === null ? r.id : `${r.id} (slot ${r.slot})`)));
    this.selectBox.hidden = all.length < 2;
    this.slotsPart.hidden = all.length < 2;
  }

  choose(request) {
    this.request = request;
    if (request) this.select.value = request.id;
    this.spans = null;
    this.pointed = null;
    this.redraw();
  }

  /** Everything that was drawn before is drawn anew: theme, size, request or log changed. */
  redraw() {
    this.cache = {};
    this.draw(this.frame);
  }

  draw(frame) {
    this.frame = frame;
    if (!this.request || !this.element.isConnected) return;
    this.ink = this.cache.ink ??= Object.fromEntries(
      ["c0", "c1", "c2", "c3", "sunk", "guess", "accepted", "rejected", "draft", "ink", "edge", "line", "soft", "focus", "card", "sweep", "verify", "step", "refill", "fresh", "wrong", "wrong-line", "paper"].map((name) => [name, colours()[name]]),
    );
    this.index = this.request.indexAt(frame);
    this.drawTokens();
    this.scrollToAnswer();
    this.drawCounters();
    this.drawVerdict();
    this.drawGrid();
    if (!this.slotsPart.hidden) this.drawSlots();
  }

  // Tokens --------------------------------------------------------------------------------------------------------

  drawTokens() {
    const { request, log } = this;
    if (!this.spans) {
      this.spans = request.ids.map(() => ({ element: make("span"), key: "" }));
      this.tokens.replaceChildren(...this.spans.map((s) => s.element));
      this.scrolled = false;
    }
    this.spans.forEach((span, pos) => {
      const seen = request.at(pos, this.index);
      const shade = seen.confidence === null ? 0 : bin(seen.confidence);
      const key = `${seen.state}${seen.token}${shade}${seen.now}`;
      if (span.key === key) return;
      span.key = key;
      const { element } = span;
      element.className = seen.now && seen.state !== "guess" ? `${seen.state} now` : seen.state;
      element.textContent = seen.token === null ? "□" : shown(log.text(seen.token));
      element.title = seen.confidence === null ? seen.state : `position ${pos}: ${seen.state}, ${seen.confidence.toFixed(3)}`;
      element.style.cssText = seen.state === "committed" || seen.state === "accepted" ? `--t: var(--c${shade}); --ti: var(--c${shade}-ink)` : "";
    });
  }

  /** Bring the answer's beginning into sight where the canvas is longer than its box. */
  scrollToAnswer() {
    const first = this.spans[this.request.masked.indexOf(1)]?.element;
    if (this.scrolled || !first) return;
    this.scrolled = true;
    this.tokens.scrollTop = Math.max(0, first.offsetTop - this.tokens.offsetTop - 48);
  }

  drawCounters() {
    const { request, log } = this;
    const step = request.steps[this.index];
    const tokens = step?.committed ?? 0;
    const nfe = step?.nfe ?? 0;
    const over = request.end !== null && this.frame >= request.lastFrame;
    const ms = request.steps.slice(0, this.index + 1).reduce((sum, s) => sum + s.ms, 0);
    const values = [
      [String(tokens), "tokens committed"],
      [String(nfe), "forward passes"],
      [nfe ? (tokens / nfe).toFixed(2) : "-", "committed a pass"],
      [tokens ? Math.round((step?.total ?? 0) / tokens).toString() : "-", "rows a commit"],
      [`${(ms / 1000).toFixed(2)} s`, "as recorded"],
      [over ? "done" : `${this.frame + 1}/${log.frames.length}`, over ? `ended: ${request.end.reason}` : "batch step"],
    ];
    this.counterCells ??= values.map(() => make("div", {}, make("b"), make("span")));
    if (!this.counters.children.length) this.counters.append(...this.counterCells);
    values.forEach(([value, name], i) => {
      const [b, span] = this.counterCells[i].children;
      if (b.textContent !== value) b.textContent = value;
      if (span.textContent !== name) span.textContent = name;
      b.className = value === "done" ? "done" : "";
    });
  }

  drawVerdict() {
    const step = this.request.steps[this.index];
    if (this.verdictOf === step) return;
    this.verdictOf = step;
    if (!step) return this.verdict.replaceChildren("Before the first step.");
    const kinds = new Array(RECOMPUTED.length).fill(0);
    for (const kind of step.why) kinds[kind] += 1;
    const why = RECOMPUTED.slice(1).map((name, i) => [kinds[i + 1], REASONS[name]]).filter(([n]) => n).map(([n, name]) => `${name} ${n}`);
    const tested = step.marks.filter((m) => m[3] === "accepted" || m[3] === "rejected");
    const all = kinds[1] === this.request.length ? "every row" : why.join(", ") || "none";
    const rows = `Step ${step.step}: ${step.rows} rows (${all})`;
    const verify = step.verifyRows ? `; verify pass ${step.verifyRows} rows` : "; and a verify pass";
    const parts = [make("span", {}, step.verify ? `${rows}${verify}. ` : step.extra ? `${rows}; ${step.extra} rows beside the canvas. ` : `${rows}. `)];
    for (const [, token, confidence, state] of tested) {
      parts.push(make("span", { class: state === "accepted" ? "tag ok" : "tag no" }, `${state === "accepted" ? "✓" : "×"} ${shown(this.log.text(token)).trim() || "·"} ${(confidence ?? 0).toFixed(2)}`), " ");
    }
    this.verdict.replaceChildren(...parts);
  }

  // Grid ----------------------------------------------------------------------------------------------------------

  gridSize() {
    const steps = Math.max(1, this.request.steps.length);
    return { steps, tall: Math.max(1, Math.min(10, Math.floor(GRID_MOST / steps))) };
  }

  /** One pixel a cell, scaled when it is drawn. */
  gridImage() {
    const { request, ink } = this;
    const { steps } = this.gridSize();
    const canvas = document.createElement("canvas");
    canvas.width = request.length;
    canvas.height = steps;
    const context = canvas.getContext("2d");
    const image = context.createImageData(request.length, steps);
    const put = (x, y, [r, g, b]) => image.data.set([r, g, b, 255], 4 * (y * request.length + x));
    const colour = Object.fromEntries(Object.entries(ink).filter(([, v]) => v.startsWith("#")).map(([k, v]) => [k, rgb(v)]));
    for (let pos = 0; pos < request.length; pos++) {
      const paint = this.mode === "rows" ? this.rowColours(pos, colour) : this.tokenColours(pos, colour);
      for (let step = 0; step < steps; step++) put(pos, step, paint(step));
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }

  rowColours(pos, colour) {
    const kinds = [colour.sunk, colour.sweep, colour.fresh, colour.guess, colour.draft, colour.verify];
    return (step) => kinds[this.request.steps[step]?.why[pos] ?? 0];
  }

  tokenColours(pos, colour) {
    const { request } = this;
    if (!request.masked[pos]) return () => colour.line;
    const marks = request.marks[pos];
    let next = 0;
    let last = null;
    return (step) => {
      while (next < marks.length && marks[next][0] <= step) last = marks[next++];
      if (!last) return colour.sunk;
      const [when, , confidence, state] = last;
      if (state === "committed" || state === "accepted") return state === "accepted" && when === step ? colour.accepted : colour[`c${bin(confidence)}`];
      if (state === "rejected" && when === step) return colour.rejected;
      if (state === "draft" && when === step) return colour.draft;
      return colour.guess;
    };
  }

  drawGrid() {
    const { steps, tall } = this.gridSize();
    this.cache.grid ??= this.gridImage();
    const { context, width } = sharp(this.grid, 14 + steps * tall + 2);
    const { ink, request } = this;
    const wide = width / request.length;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cache.grid, 0, 14, width, steps * tall);
    const done = this.index + 1;
    context.fillStyle = ink.card;
    context.globalAlpha = 0.72;
    context.fillRect(0, 14 + done * tall, width, (steps - done) * tall);
    context.globalAlpha = 1;
    if (this.mode === "tokens" && tall >= 5 && wide >= 3) this.crossRejected(context, wide, tall, done);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink.soft;
    const first = request.masked.indexOf(1);
    context.fillText("prompt", 0, 10);
    if (first >= 0 && first * wide < width - 60) context.fillText("answer", first * wide + (first * wide < 44 ? 44 - first * wide : 0), 10);
    context.fillStyle = ink.ink;
    if (done > 0) context.fillRect(0, 14 + done * tall - 1, width, 1.5);
    if (this.pointed) {
      context.strokeStyle = ink.focus;
      context.lineWidth = 2;
      context.strokeRect(this.pointed.pos * wide - 1, 14 + this.pointed.step * tall - 1, wide + 2, tall + 2);
    }
    this.grid.setAttribute("aria-label", `Step by position, ${this.mode === "rows" ? "rows recomputed" : "tokens"}: ${done} of ${steps} steps. Arrow keys read single cells.`);
  }

  crossRejected(context, wide, tall, done) {
    context.strokeStyle = this.ink["wrong-line"];
    context.lineWidth = 1;
    context.beginPath();
    this.request.steps.slice(0, done).forEach((step, y) => {
      for (const [pos, , , state] of step.marks) {
        if (state !== "rejected") continue;
        context.moveTo(pos * wide + 0.5, 14 + y * tall + 1);
        context.lineTo((pos + 1) * wide - 0.5, 14 + (y + 1) * tall - 1);
      }
    });
    context.stroke();
  }

  point(event) {
    const box = this.grid.getBoundingClientRect();
    const { tall } = this.gridSize();
    const pos = Math.floor(((event.clientX - box.left) / box.width) * this.request.length);
    const step = Math.floor((event.clientY - box.top - 14) / tall);
    this.aim(step >= 0 && step <= this.index && pos >= 0 && pos < this.request.length ? { pos, step } : null);
  }

  key(event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by || this.index < 0) return;
    event.preventDefault();
    const from = this.pointed ?? { pos: Math.max(0, this.request.masked.indexOf(1)) - by[0], step: this.index - by[1] };
    this.aim({
      pos: Math.min(this.request.length - 1, Math.max(0, from.pos + by[0])),
      step: Math.min(this.index, Math.max(0, from.step + by[1])),
    });
  }

  aim(pointed) {
    if (!pointed && !this.pointed) return;
    this.pointed = pointed;
    this.drawGrid();
    this.cell.textContent = pointed ? this.describe(pointed) : "";
  }

  describe({ pos, step }) {
    const seen = this.request.at(pos, step);
    const made = this.request.steps[step];
    const why = RECOMPUTED[made.why[pos]];
    const token = seen.token === null ? "MASK" : `"${shown(this.log.text(seen.token))}"`;
    const sure = seen.confidence === null ? "" : ` at ${seen.confidence.toFixed(3)}`;
    const row = why === "none" ? "not recomputed" : `recomputed (${REASONS[why]})`;
    return `Step ${made.step}, position ${pos}: ${token}, ${seen.state}${sure}; row ${row}.`;
  }

  // Slots ---------------------------------------------------------------------------------------------------------

  slotsImage(width) {
    const { log, ink } = this;
    const scale = window.devicePixelRatio || 1;
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(log.slots * SLOT * scale));
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const sweep = hatch(context, ink.sweep, ink.paper, 3);
    const total = log.duration("time") || 1;
    log.frames.forEach((frame) => {
      const x = (width * (frame.until - frame.ms)) / total;
      const wide = (width * frame.ms) / total;
      for (const { request, index, slot } of frame.steps) {
        const step = request.steps[index];
        context.fillStyle = step.why.length && step.why.every((kind) => kind === 1) && (index === 0 || !this.alwaysFull(request)) ? sweep : ink.step;
        context.fillRect(x, slot * SLOT + 1, Math.max(0.5, wide - (wide > 3 ? 0.6 : 0)), SLOT - 3);
        if (step.verify) {
          context.fillStyle = ink.verify;
          context.fillRect(x, slot * SLOT + SLOT - 6, Math.max(0.5, wide - (wide > 3 ? 0.6 : 0)), 4);
        }
        if (index === 0) {
          context.fillStyle = ink.refill;
          context.fillRect(x, slot * SLOT, 2, SLOT - 1);
        }
      }
    });
    return canvas;
  }

  alwaysFull(request) {
    return (request.alwaysFull ??= request.steps.every((step) => step.why.every((kind) => kind === 1)));
  }

  slotsGeometry(width) {
    const left = 26;
    const bars = Math.max(54, width * 0.14);
    return { left, chart: width - left - bars - 8, bars };
  }

  drawSlots() {
    const { log, ink } = this;
    const { context, width } = sharp(this.gantt, log.slots * SLOT + 20);
    const { left, chart, bars } = this.slotsGeometry(width);
    this.cache.slots ??= this.slotsImage(chart);
    context.font = "10px system-ui, sans-serif";
    context.fillStyle = ink.soft;
    for (let slot = 0; slot < log.slots; slot++) context.fillText(String(slot), 2, slot * SLOT + 11);
    context.drawImage(this.cache.slots, left, 0, chart, log.slots * SLOT);
    const now = this.frame < 0 ? 0 : log.frames[this.frame].until;
    const total = log.duration("time") || 1;
    context.fillStyle = ink.ink;
    context.fillRect(left + (chart * now) / total - 0.75, 0, 1.5, log.slots * SLOT);
    this.tenants().forEach((tenant, slot) => {
      const x = left + chart + 8;
      context.strokeStyle = tenant === this.request ? ink.focus : ink.edge;
      context.lineWidth = tenant === this.request ? 2 : 1;
      context.strokeRect(x + 0.5, slot * SLOT + 1.5, bars - 2, SLOT - 4);
      if (!tenant) return;
      const index = tenant.indexAt(this.frame);
      const share = index < 0 ? 0 : tenant.steps[index].committed / Math.max(1, tenant.wanted);
      context.fillStyle = ink.fresh;
      context.fillRect(x + 1, slot * SLOT + 2, (bars - 3) * share, SLOT - 5);
    });
    context.fillStyle = ink.soft;
    context.fillText("0 s", left, log.slots * SLOT + 14);
    const end = `${(total / 1000).toFixed(1)} s`;
    context.fillText(end, left + chart - context.measureText(end).width, log.slots * SLOT + 14);
    context.fillText("filled", left + chart + 8, log.slots * SLOT + 14);
    this.gantt.setAttribute("aria-label", `Slots of the batch over time: ${log.slots} slots, ${log.requests.size} requests, at ${(now / 1000).toFixed(2)} of ${(total / 1000).toFixed(2)} seconds. Arrow keys choose the request of a slot.`);
  }

  /** Who is in each slot now: the last request that began there. */
  tenants() {
    const out = new Array(this.log.slots).fill(null);
    for (const request of this.log.requests.values()) {
      if (request.slot !== null && request.firstFrame <= Math.max(0, this.frame)) out[request.slot] = request;
    }
    return out;
  }

  pickSlot(event) {
    const box = this.gantt.getBoundingClientRect();
    const slot = Math.floor((event.clientY - box.top) / SLOT);
    const { left, chart } = this.slotsGeometry(box.width);
    const share = (event.clientX - box.left - left) / chart;
    const at = share <= 1 ? this.log.frameAt(share * this.log.duration("time"), "time") : this.frame;
    const mine = [...this.log.requests.values()].filter((r) => r.slot === slot && r.firstFrame <= Math.max(0, at + 1));
    if (mine.length) this.choose(mine.at(-1));
  }

  slotKey(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const tenants = this.tenants();
    const slot = Math.min(tenants.length - 1, Math.max(0, this.request.slot + by));
    if (tenants[slot]) this.choose(tenants[slot]);
  }
}

function shown(text) {
  return text.replace(/\n/g, "↵\n");
}

/** Legend of lanes. */
export function laneLegend() {
  const chip = (state, text, style = "") => make("li", {}, make("span", { class: "tokens", style: "padding:0 .25rem;margin:0;display:inline;background:none" }, make("span", { class: state, style }, text)));
  const item = (entry, words) => (entry.append(words), entry);
  const sure = (n, words) => item(chip("committed", "word", `--t: var(--c${n}); --ti: var(--c${n}-ink)`), words);
  const box = (colour, words) => make("li", {}, make("span", { class: "swatch", style: `background:var(--${colour});border:1px solid var(--edge)` }), words);
  return make("div", {},
    make("h3", {}, "Tokens"),
    make("ul", { class: "legend" },
      item(chip("mask", "□"), "mask"), item(chip("guess", "word"), "guess"), item(chip("rejected", "word"), "draft rejected by verification"),
      item(chip("accepted", "word", "--t: var(--c2); --ti: var(--c2-ink)"), "draft accepted"),
      sure(0, "committed below .5 sure"), sure(1, ".5 to .7"), sure(2, ".7 to .9"), sure(3, ".9 and more"), item(chip("committed now", "word", "--t: var(--c3); --ti: var(--c3-ink)"), "in this step")),
    make("h3", {}, "Rows recomputed"),
    make("ul", { class: "legend" }, box("sweep", "every row (first pass, refill, refresh)"), box("fresh", "candidates"), box("guess", "other masks (look-ahead)"), box("draft", "fresh commits"), box("verify", "tokens again (tracked)"), box("sunk", "served from the cache")),
    make("h3", {}, "Slots"),
    make("ul", { class: "legend" }, box("refill", "a request takes the slot"), make("li", {}, make("span", { class: "swatch", style: "background:repeating-linear-gradient(135deg,var(--sweep) 0 3px,var(--paper) 3px 5px);border:1px solid var(--edge)" }), "sweep"), box("step", "step"), box("verify", "verify pass")));
}
