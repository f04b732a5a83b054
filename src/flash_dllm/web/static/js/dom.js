// Small functions for elements.

/** An element; text goes in as text, never as markup. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "-";
}

let fields = 0;

/** A labelled range with its value beside the label. */
export function slider({ label, min, max, step, value, show = String, change, hint }) {
  const id = `field-${++fields}`;
  const output = make("output", { for: id }, show(value));
  const input = make("input", { type: "range", id, min, max, step, value, "aria-valuetext": show(value) });
  const set = (next) => {
    input.value = next;
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", show(Number(input.value)));
  };
  input.addEventListener("input", () => {
    set(input.value);
    change(Number(input.value));
  });
  const field = make("div", { class: "field", title: hint }, make("label", { for: id }, `${label} `, output), input);
  return { field, input, set };
}

/** A labelled choice. */
export function choice({ label, options, value, change, hint }) {
  const id = `field-${++fields}`;
  const select = make(
    "select",
    { id },
    ...options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)),
  );
  select.addEventListener("change", () => change(select.value));
  return { field: make("div", { class: "field", title: hint }, make("label", { for: id }, label), select), select };
}

/** Play, pause and scrub over `count` places; calls `show(index)`. */
export function transport({ play, back, next, scrub, output, count, show, label, pace = () => 450 }) {
  let at = 0;
  let timer = null;
  const stop = () => {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const go = (index) => {
    at = Math.min(count() - 1, Math.max(0, index));
    scrub.max = count() - 1;
    scrub.value = at;
    const text = label(at);
    scrub.setAttribute("aria-valuetext", text);
    output.textContent = text;
    show(at);
  };
  const tick = () => {
    if (at >= count() - 1) return stop();
    go(at + 1);
    timer = setTimeout(tick, pace());
  };
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (at >= count() - 1) go(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setTimeout(tick, pace());
  });
  back.addEventListener("click", () => (stop(), go(at - 1)));
  next.addEventListener("click", () => (stop(), go(at + 1)));
  scrub.addEventListener("input", () => (stop(), go(Number(scrub.value))));
  return { go, stop, now: () => at };
}
