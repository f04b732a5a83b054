// The playground: a prompt, a method, and the canvas while the server fills it in.

import { byId, make } from "./dom.js";
import { Lane, laneLegend } from "./lane.js";
import { Log } from "./log.js";
import { playerFile, save } from "./share.js";
import { started, startTheme } from "./theme.js";

const NUMBERS = ["max_tokens", "temperature", "seed"];
const OWN = ["epsilon", "gamma", "block_length"];
const UNKNOWN = -1;

const state = { model: null, stopper: null, lane: null, log: null };

async function find() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.status === 401 || answer.status === 403) {
      byId("key-field").hidden = false;
      return "The server wants a key: enter it and reload the models.";
    }
    if (!answer.ok || !answer.headers.get("content-type")?.includes("json")) return null;
    const { data } = await answer.json();
    if (!data?.length) return null;
    state.model = data[0];
    return "";
  } catch {
    return null;
  }
}

function headers() {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function connect() {
  const problem = await find();
  byId("alone").hidden = problem !== null;
  byId("form").hidden = problem === null;
  if (problem) complain(problem);
  if (problem !== "") return;
  byId("error").hidden = true;
  const methods = state.model.methods ?? state.model.diffusion?.methods ?? [];
  byId("method").replaceChildren(...methods.map((name) => make("option", { value: name }, name)));
  byId("method-field").hidden = methods.length === 0;
  byId("model").textContent = state.model.id;
}

function complain(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

/** The request, as the form says. */
export function request(form, model) {
  const value = (name) => form.elements[name].value.trim();
  const mode = value("mode");
  const body = { model, stream: true, stream_options: { include_usage: true }, diffusion: { stream: "canvas" } };
  for (const name of NUMBERS) if (value(name) !== "") body[name] = Number(value(name));
  for (const name of OWN) if (value(name) !== "") body.diffusion[name] = Number(value(name));
  if (value("method")) body.diffusion.method = value("method");
  const prompt = form.elements.prompt.value;
  if (mode === "chat") return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }];
  if (mode === "infill") body.diffusion.infill = true;
  return ["/v1/completions", { ...body, prompt }];
}

/** Events of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value.replaceAll("\r\n", "\n");
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Turns chunks of the canvas stream into events of a log, so that the player can show and keep them. */
class Recorder {
  constructor(model, method, prompt) {
    this.log = new Log("playground");
    this.kept = [];
    this.model = model;
    this.method = method;
    this.prompt = prompt;
    this.named = new Set();
    this.last = performance.now();
  }

  write(event) {
    this.log.add(event, `event ${this.kept.length + 1}`);
    this.kept.push(JSON.stringify(event));
    this.log.lines = `${this.kept.join("\n")}\n`;
  }

  begin({ length, masked }) {
    this.write({ event: "header", format: "flash-dllm-trace", version: 1, model: this.model, method: this.method, params: {}, device: "server", dtype: "as served", slots: 1, versions: {}, mask_id: UNKNOWN - 1 });
    this.write({ event: "tokens", text: { [UNKNOWN]: "▪" } });
    this.write({ event: "request", request: "playground", ids: new Array(length).fill(UNKNOWN), masked, params: {} });
    this.last = performance.now();
  }

  step(seen) {
    const now = performance.now();
    const text = {};
    seen.tokens.forEach((id, i) => {
      if (seen.texts && !this.named.has(id)) text[id] = seen.texts[i];
      this.named.add(id);
    });
    if (Object.keys(text).length) this.write({ event: "tokens", text });
    const marks = seen.positions.map((pos, i) => [pos, seen.tokens[i], seen.confidences[i], seen.states[i]]);
    this.write({ event: "step", request: "playground", slot: 0, step: seen.step - 1, ms: Math.round((now - this.last) * 1000) / 1000, passes: seen.passes, marks });
    this.last = now;
  }

  end(reason, seen) {
    this.write({ event: "end", request: "playground", reason: reason ?? "stop", steps: seen?.steps ?? 0, nfe: seen?.nfe ?? 0, rows: seen?.rows ?? 0, seconds: seen?.decode_seconds ?? 0, ids: [] });
  }
}

function usageLine(ending, usage, seconds) {
  const own = ending?.diffusion ?? {};
  const tokens = usage?.completion_tokens ?? own.token_ids?.length ?? 0;
  const rate = own.decode_seconds ? tokens / own.decode_seconds : tokens / seconds;
  const parts = [
    [tokens, "answer tokens"],
    [own.nfe ?? "?", "forward passes (NFE)"],
    [own.tpf?.toFixed(2) ?? "?", "tokens a pass (TPF)"],
    [rate.toFixed(1), "tokens/s"],
    [`${seconds.toFixed(2)} s`, "with waiting"],
  ];
  byId("usage").replaceChildren(...parts.map(([value, name]) => make("div", {}, make("b", {}, String(value)), make("span", {}, name))));
  const bound = own.certificate;
  byId("certificate").textContent = bound
    ? `Certificate: total variation at most ${bound.total_variation.toFixed(3)}${bound.vacuous ? " (says nothing: the step bounds add up to 1)" : ""}.`
    : "";
}

async function run(event) {
  event.preventDefault();
  if (state.stopper) return state.stopper.abort();
  complain("");
  const form = byId("form");
  if (!form.elements.prompt.value.trim()) return complain("The prompt is empty.");
  const [path, body] = request(form, state.model.id);
  state.stopper = new AbortController();
  byId("go").textContent = "Stop";
  byId("text").textContent = "";
  byId("usage").replaceChildren();
  byId("share").hidden = true;
  const began = performance.now();
  try {
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: state.stopper.signal });
    if (!response.ok) {
      const said = await response.json().catch(() => null);
      throw new Error(said?.error?.message ?? `${response.status} ${response.statusText}`);
    }
    await follow(response, new Recorder(state.model.id, body.diffusion.method ?? "default", body.prompt), began);
  } catch (error) {
    complain(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    state.stopper = null;
    byId("go").textContent = "Generate";
    byId("share").hidden = !state.log?.frames.length;
  }
}

async function follow(response, recorder, began) {
  let ending = null;
  let usage = null;
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const text = choice.delta?.content ?? choice.text ?? "";
    if (text) byId("text").textContent += text;
    const seen = choice.diffusion;
    if (seen?.event === "start") start(recorder, seen);
    else if (seen?.event === "step") step(recorder, seen);
    if (choice.finish_reason) ending = choice;
  }
  if (!recorder.log.header) throw new Error("the server sent no canvas");
  recorder.end(ending?.finish_reason, ending?.diffusion);
  state.lane.draw(recorder.log.frames.length - 1);
  usageLine(ending, usage, (performance.now() - began) / 1000);
}

function start(recorder, seen) {
  recorder.begin(seen);
  state.log = recorder.log;
  state.lane = new Lane(recorder.log, { title: "Live" });
  byId("live").replaceChildren(state.lane.element);
  state.lane.redraw();
}

function step(recorder, seen) {
  recorder.step(seen);
  state.lane.cache = {};
  state.lane.draw(recorder.log.frames.length - 1);
}

function main() {
  startTheme();
  byId("form").addEventListener("submit", run);
  byId("reload").addEventListener("click", connect);
  byId("legend-place").append(laneLegend());
  byId("mode").addEventListener("change", () => {
    byId("prompt").placeholder = byId("mode").value === "infill" ? "Karl has a purple ring. The ring of Karl is {{1}}." : "";
  });
  byId("share").addEventListener("click", async () => {
    try {
      save("playground.html", await playerFile([state.log]));
    } catch (error) {
      complain(error.message);
    }
  });
  document.addEventListener("themechange", () => state.lane?.redraw());
  connect().finally(() => started({ state }));
}

main();
