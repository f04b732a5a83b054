// Light, dark or as the system has it; what canvases draw with.

const ORDER = ["auto", "light", "dark"];
const KEY = "flash-dllm-theme";

function stored() {
  try {
    const value = localStorage.getItem(KEY);
    return ORDER.includes(value) ? value : "auto";
  } catch {
    return "auto"; // a file opened from disk may have no storage
  }
}

function apply(value) {
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  const button = document.getElementById("theme");
  if (button) button.textContent = `Theme: ${value}`;
  document.dispatchEvent(new Event("themechange"));
}

export function startTheme() {
  let value = stored();
  apply(value);
  document.getElementById("theme")?.addEventListener("click", () => {
    value = ORDER[(ORDER.indexOf(value) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, value);
    } catch {
      // it holds for this page then
    }
    apply(value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(value));
}

/** The page's script has done its start; `handles` is what a console or a test may reach. */
export function started(handles = {}) {
  window.toy = handles;
  document.documentElement.dataset.ready = "";
}

/** The colours of the stylesheet by name, as they are now. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${String(name)}`).trim() });
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** A colour between two `#rrggbb`, share 0 gives the first. */
export function between(from, to, share) {
  const a = channels(from);
  const b = channels(to);
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * share)).join(" ")})`;
}

/** Diagonal lines, so that what is wrong is told by more than its colour. */
export function hatch(context, ground, line, gap = 4) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = gap * 2;
  const draw = tile.getContext("2d");
  draw.fillStyle = ground;
  draw.fillRect(0, 0, gap * 2, gap * 2);
  draw.strokeStyle = line;
  draw.lineWidth = 1.4;
  draw.beginPath();
  for (const shift of [-gap * 2, 0, gap * 2]) {
    draw.moveTo(shift, gap * 2);
    draw.lineTo(shift + gap * 2, 0);
  }
  draw.stroke();
  return context.createPattern(tile, "repeat");
}

/** Make a canvas as sharp as the screen; returns its context and its size in CSS pixels. */
export function sharp(canvas, height) {
  const width = Math.max(1, Math.round(canvas.clientWidth || canvas.parentElement?.clientWidth || 300));
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
