// The player: one recorded log, or two side by side as a race, on a common clock.

import { make } from "./dom.js";
import { Lane, laneLegend } from "./lane.js";

const CLOCKS = { passes: "forward pass", steps: "step", time: "recorded time" };
/** Units of each clock that pass in a second at speed 1. */
const RATE = { passes: 5, steps: 5, time: 1000 };
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16];

export class Player {
  /** @param {HTMLElement} root where it is built */
  constructor(root) {
    this.root = root;
    this.lanes = [];
    this.clock = "passes";
    this.speed = 1;
    this.t = 0;
    this.running = null;
    this.build();
  }

  build() {
    this.play = make("button", { type: "button", class: "main", "aria-pressed": "false", onclick: () => this.toggle() }, "Play");
    const icon = (label, text, by) => make("button", { type: "button", class: "icon", "aria-label": label, onclick: () => this.nudge(by) }, text);
    this.scrub = make("input", { type: "range", min: 0, max: 1, step: 1, value: 0, "aria-label": "Time", oninput: () => (this.pause(), this.go(Number(this.scrub.value))) });
    this.output = make("output", { class: "value small" });
    this.clocks = make("select", { "aria-label": "Clock", onchange: () => this.setClock(this.clocks.value) }, ...Object.entries(CLOCKS).map(([key, name]) => make("option", { value: key }, `by ${name}`)));
    this.speeds = make("select", { "aria-label": "Speed", onchange: () => (this.speed = Number(this.speeds.value)) }, ...SPEEDS.map((n) => make("option", { value: n, selected: n === 1 }, `${n}×`)));
    this.bar = make("div", { class: "bar", role: "group", "aria-label": "Time", hidden: true },
      this.play, icon("One back", "←", -1), icon("One on", "→", 1),
      make("div", { class: "grow" }, this.scrub), this.output, make("div", {}, this.clocks), make("div", {}, this.speeds));
    this.result = make("p", { class: "note", "aria-live": "polite", hidden: true });
    this.grid = make("div", { class: "lanes" });
    this.legend = make("details", { hidden: true }, make("summary", {}, "Legend"), laneLegend());
    this.root.replaceChildren(this.bar, this.result, this.grid, this.legend);
    document.addEventListener("themechange", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(this.grid);
  }

  /** Show logs, one or two, from their beginning. */
  show(logs) {
    this.pause();
    this.lanes = logs.map((log) => new Lane(log));
    this.grid.replaceChildren(...this.lanes.map((lane) => lane.element));
    this.grid.classList.toggle("two", logs.length > 1);
    this.bar.hidden = this.legend.hidden = logs.length === 0;
    this.setClock(this.clock);
    this.go(0);
  }

  setClock(clock) {
    const share = this.duration() ? this.t / this.duration() : 0;
    this.clock = clock;
    this.clocks.value = clock;
    this.scrub.max = this.duration();
    this.scrub.step = clock === "time" ? "any" : 1;
    this.go(share * this.duration());
  }

  duration() {
    return Math.max(0, ...this.lanes.map((lane) => lane.log.duration(this.clock)));
  }

  go(t) {
    this.t = Math.min(this.duration(), Math.max(0, t));
    this.scrub.value = this.t;
    const text = this.say();
    this.output.textContent = text;
    this.scrub.setAttribute("aria-valuetext", text);
    for (const lane of this.lanes) lane.draw(lane.log.frameAt(this.t, this.clock));
    this.race();
  }

  say() {
    const whole = this.duration();
    if (this.clock === "time") return `${(this.t / 1000).toFixed(2)} of ${(whole / 1000).toFixed(2)} s`;
    return `${this.clock === "steps" ? "step" : "pass"} ${Math.floor(this.t + 1e-9)} of ${whole}`;
  }

  /** Who is ahead, when two logs run. */
  race() {
    this.result.hidden = this.lanes.length < 2;
    if (this.lanes.length < 2) return;
    const unit = { passes: "forward passes", steps: "steps", time: "ms" }[this.clock];
    const ends = this.lanes.map((lane) => lane.log.duration(this.clock));
    const names = this.lanes.map((lane) => lane.log.header.method);
    const over = ends.map((end) => this.t >= end - 1e-6);
    const text =
      ends[0] === ends[1] && over[0]
        ? `Both need ${Math.round(ends[0])} ${unit}.`
        : over[0] || over[1]
          ? `${names[ends[0] < ends[1] ? 0 : 1]} ends first: ${Math.round(Math.min(...ends))} ${unit} against ${Math.round(Math.max(...ends))}.`
          : `Race by ${CLOCKS[this.clock]}: ${names.join(" against ")}.`;
    if (this.result.textContent !== text) this.result.textContent = text;
  }

  nudge(by) {
    this.pause();
    if (this.clock !== "time") return this.go(Math.round(this.t) + by);
    const ends = this.lanes.flatMap((lane) => lane.log.frames.map((frame) => frame.until)).sort((a, b) => a - b);
    const next = by > 0 ? ends.find((end) => end > this.t + 1e-6) : ends.findLast((end) => end < this.t - 1e-6);
    this.go(next ?? (by > 0 ? this.duration() : 0));
  }

  toggle() {
    if (this.running !== null) return this.pause();
    if (this.t >= this.duration()) this.go(0);
    this.play.textContent = "Pause";
    this.play.setAttribute("aria-pressed", "true");
    let last = null;
    const tick = (now) => {
      if (last !== null) this.go(this.t + ((now - last) / 1000) * RATE[this.clock] * this.speed);
      last = now;
      if (this.t >= this.duration()) return this.pause();
      this.running = requestAnimationFrame(tick);
    };
    this.running = requestAnimationFrame(tick);
  }

  pause() {
    if (this.running !== null) cancelAnimationFrame(this.running);
    this.running = null;
    this.play.textContent = "Play";
    this.play.setAttribute("aria-pressed", "false");
  }

  redraw() {
    for (const lane of this.lanes) lane.redraw();
  }
}
