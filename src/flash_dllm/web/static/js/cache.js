// The cache toy.

import { byId, choice, make, percent, slider, transport } from "./dom.js";
import { runPolicy, staleness } from "./policies.js";
import { between, colours, hatch, sharp, started, startTheme, still } from "./theme.js";

const TITLES = {
  none: ["No cache", "every row, every step"],
  dual: ["Block refresh", "Fast-dLLM, dual cache"],
  prefix: ["Block refresh", "Fast-dLLM, prefix cache"],
  flash: ["Flash-Cache", "window, look-ahead, budget"],
  "dkv-decode": ["dKV-Cache", "kept from one step after decoding"],
  "dllm-cache": ["dLLM-Cache", "at intervals, then what moved"],
  elastic: ["Elastic-Cache", "deeper layers when attention drifts"],
};
const CELL = 12;
const HEAD = 16;

const TRACKING = [
  ["attention", "attention"],
  ["recent", "most recent"],
  ["random", "random"],
  ["none", "fresh commits only"],
];

/** Controls of a policy: [kind, option, label, settings]. */
const CONTROLS = {
  none: [],
  dual: [
    ["choice", "policy", "Inside a block", { options: [["dual", "the block"], ["prefix", "block and all behind"]] }],
    ["choice", "block_length", "Block length", { options: [["8", "8"], ["16", "16"], ["32", "32"]], number: true }],
  ],
  flash: [
    ["slider", "track", "Budget", { min: 0, max: 16, step: 1 }],
    ["slider", "lookahead", "Look-ahead", { min: 0, max: 16, step: 1 }],
    ["choice", "track_by", "Track by", { options: TRACKING }],
    ["slider", "refresh_every", "Full refresh", { min: 0, max: 8, step: 1, show: (n) => (n ? `every ${n}` : "never") }],
  ],
  "dkv-decode": [["slider", "refresh", "Full refresh", { min: 1, max: 16, step: 1, show: (n) => `every ${n}` }]],
  "dllm-cache": [
    ["slider", "kr", "Answer", { min: 1, max: 16, step: 1, show: (n) => `every ${n}` }],
    ["slider", "rho", "In between", { min: 0, max: 1, step: 0.05, show: (n) => percent(n, 1) }],
    ["slider", "kp", "Prompt", { min: 1, max: 50, step: 1, show: (n) => `every ${n}` }],
  ],
  elastic: [
    ["slider", "drift", "Refresh below", { min: 0.7, max: 1.01, step: 0.01, show: (n) => n.toFixed(2) }],
    ["slider", "track_num", "Tracked", { min: 1, max: 8, step: 1 }],
  ],
};

class Panel {
  constructor(data, entry) {
    this.data = data;
    this.setting = structuredClone(entry.setting);
    this.kind = entry.setting.policy;
    this.pointed = null;
    this.build();
    this.compute();
  }

  build() {
    const [title, about] = TITLES[this.kind];
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": title });
    this.facts = make("p", { class: "num", style: "margin: .5rem 0 0" });
    this.cell = make("p", { class: "cell", "aria-live": "polite" });
    const options = make("div", { class: "options" });
    for (const control of CONTROLS[this.kind]) options.append(this.control(...control));
    if (!CONTROLS[this.kind].length) options.append(make("p", { class: "small soft" }, "Nothing to set: this is what the others save."));
    this.element = make(
      "article",
      { class: "card policy", "data-policy": this.kind },
      make("header", {}, make("h2", {}, title), make("div", { class: "small soft" }, about)),
      this.canvas,
      this.facts,
      this.cell,
      options,
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.aim(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.aim(null));
  }

  control(kind, name, label, settings) {
    const { options, numbers } = this.setting;
    const value = name === "policy" ? this.setting.policy : name in numbers ? numbers[name] : options[name];
    const change = (next) => {
      if (name === "policy") this.setting.policy = next;
      else if (name in numbers) numbers[name] = Number(next);
      else options[name] = next;
      this.compute();
      this.draw();
    };
    const given = { label, change, ...settings, value: kind === "choice" ? String(value) : value };
    const made = (kind === "choice" ? choice : slider)(given).field;
    made.dataset.option = name;
    return made;
  }

  compute() {
    this.run = runPolicy(this.data, this.setting);
    this.cells = staleness(this.data.script, this.run.recomputed);
  }

  get whole() {
    return this.data.script.commit_at.length;
  }

  geometry(width) {
    const grid = Math.round(width * 0.8);
    return { cell: grid / this.whole, bars: grid + 8, room: width - grid - 8 };
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const pos = Math.floor((event.clientX - box.left) / this.geometry(box.width).cell);
    const step = Math.floor((event.clientY - box.top - HEAD) / CELL);
    this.aim(pos >= 0 && pos < this.whole && step >= 0 && step <= this.at ? { pos, step } : null);
  }

  key(event) {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const { pos, step } = this.pointed ?? { pos: this.data.prompt - by[0], step: this.at - by[1] };
    this.aim({
      pos: Math.min(this.whole - 1, Math.max(0, pos + by[0])),
      step: Math.min(this.at, Math.max(0, step + by[1])),
    });
  }

  aim(pointed) {
    this.pointed = pointed;
    this.draw();
  }

  show(step) {
    this.at = step;
    if (this.pointed && this.pointed.step > step) this.pointed = null;
    this.draw();
  }

  say() {
    const { rows } = this.run;
    const total = rows.slice(0, this.at + 1).reduce((sum, n) => sum + n, 0);
    const full = this.whole * (this.at + 1);
    const now = this.cells[this.at];
    const wrong = now.filter((cell) => cell.wrong).length;
    const oldest = Math.max(...now.map((cell) => cell.age));
    this.facts.replaceChildren(
      make("span", { class: "total", "data-total": total, "data-wrong": wrong }, percent(total, full)),
      ` of no cache: ${total} of ${full} rows`,
      make("br"),
      make("span", { class: "small soft" }, `this step ${rows[this.at]} rows; oldest row ${oldest} ${oldest === 1 ? "step" : "steps"}`),
      make("br"),
      wrong
        ? make("span", { class: "small bad" }, `${wrong} tokens on the key of MASK`)
        : make("span", { class: "small soft" }, "no token on the key of MASK"),
    );
    this.canvas.setAttribute(
      "aria-label",
      `${TITLES[this.kind][0]}: position by step. ${total} of ${full} rows recomputed up to step ${this.at}, ` +
        `${wrong} committed tokens on the key of MASK. Arrow keys read single cells.`,
    );
    this.cell.textContent = this.pointed ? this.describe(this.pointed) : "";
  }

  describe({ pos, step }) {
    const cell = this.cells[step][pos];
    const when = this.data.script.commit_at[pos];
    const what = when < 0 ? "prompt" : cell.masked ? "still MASK" : `token, committed in step ${when}`;
    const age = cell.age === 0 ? "recomputed in this step" : `its row is ${cell.age} steps old`;
    return `Step ${step}, position ${pos} (${what}): ${age}${cell.wrong ? ", from when it was MASK" : ""}.`;
  }

  draw() {
    if (this.at === undefined || !this.canvas.isConnected) return;
    const steps = this.cells.length;
    const { context, width } = sharp(this.canvas, HEAD + steps * CELL + 2);
    const ink = colours();
    const { cell, bars, room } = this.geometry(width);
    const wrong = hatch(context, ink.wrong, ink["wrong-line"]);
    this.head(context, ink, cell, bars);
    for (let step = 0; step < steps; step++) {
      const y = HEAD + step * CELL;
      if (step > this.at) {
        context.fillStyle = ink.sunk;
        context.globalAlpha = 0.55;
        context.fillRect(0, y + CELL / 2 - 0.5, this.whole * cell, 1);
        context.globalAlpha = 1;
        continue;
      }
      this.cells[step].forEach((state, pos) => {
        context.fillStyle = state.wrong ? wrong : shade(state.age, ink);
        const tall = state.masked ? 4 : CELL - 2;
        context.fillRect(pos * cell + 0.3, y + (CELL - tall) / 2, Math.max(1, cell - 0.8), tall);
      });
      context.fillStyle = step === this.at ? ink.ink : ink.edge;
      context.fillRect(bars, y + 2, (room * this.run.rows[step]) / this.whole, CELL - 4);
    }
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.2;
    context.strokeRect(0.6, HEAD + this.at * CELL, this.whole * cell - 0.6, CELL);
    if (this.pointed) {
      context.strokeStyle = ink.focus;
      context.lineWidth = 2;
      context.strokeRect(this.pointed.pos * cell, HEAD + this.pointed.step * CELL, cell, CELL);
    }
    context.globalAlpha = 1;
    this.say();
  }

  head(context, ink, cell, bars) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = ink.soft;
    context.textBaseline = "alphabetic";
    context.fillText("prompt", 0, 10);
    context.fillText("answer", this.data.prompt * cell + 3, 10);
    context.fillText("rows", bars, 10);
    context.fillStyle = ink.edge;
    context.fillRect(this.data.prompt * cell - 0.5, 0, 1, HEAD + this.cells.length * CELL);
  }
}

/** Work is ink: what was just computed is strong, what is old fades. */
function shade(age, ink) {
  if (age === 0) return ink.fresh;
  return between(ink.fresh, ink.old, Math.min(1, 0.42 + 0.58 * (Math.log(age) / Math.log(15))));
}

function legend(ink) {
  const entries = [
    ["recomputed in this step", (c) => fill(c, shade(0, ink))],
    ["1 step old", (c) => fill(c, shade(1, ink))],
    ["4 steps", (c) => fill(c, shade(4, ink))],
    ["15 steps", (c) => fill(c, shade(15, ink))],
    ["a token on the key of MASK", (c) => fill(c, hatch(c, ink.wrong, ink["wrong-line"]))],
    ["thin: still MASK", (c) => fill(c, shade(0, ink), 4)],
  ];
  const fill = (context, style, tall = 12) => {
    context.fillStyle = style;
    context.fillRect(1, (16 - tall) / 2, 24, tall);
  };
  byId("legend").replaceChildren(
    ...entries.map(([text, paint]) => {
      const canvas = make("canvas", { width: 26, height: 16, "aria-hidden": "true" });
      canvas.style.outline = `1px solid ${ink.line}`;
      paint(canvas.getContext("2d"));
      return make("li", {}, canvas, text);
    }),
  );
}

async function start() {
  startTheme();
  const data = (await (await fetch("data/toys.json")).json()).cache;
  const panels = data.runs.map((entry) => new Panel(data, entry));
  byId("policies").append(...panels.map((panel) => panel.element));
  const steps = data.script.score.length;
  const commits = (step) => data.script.commit_at.filter((when) => when === step).length;
  const time = transport({
    play: byId("play"),
    back: byId("back"),
    next: byId("next"),
    scrub: byId("scrub"),
    output: byId("when"),
    count: () => steps,
    label: (step) => `step ${step} of ${steps - 1}: ${commits(step)} committed`,
    show: (step) => panels.forEach((panel) => panel.show(step)),
    pace: () => (still() ? 900 : 450),
  });
  const redraw = () => {
    legend(colours());
    panels.forEach((panel) => panel.draw());
  };
  document.addEventListener("themechange", redraw);
  new ResizeObserver(redraw).observe(byId("policies"));
  time.go(steps - 1);
  redraw();
  started({ panels, time });
}

start();
