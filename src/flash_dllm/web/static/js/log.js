// Event logs (docs/trace.md): reading them, and what a player needs to know about each step.

const FORMAT = "flash-dllm-trace";
const VERSION = 1;
const STATES = ["guess", "draft", "accepted", "rejected", "committed"];
const isText = (v) => typeof v === "string";
const isNumber = (v) => typeof v === "number" && Number.isFinite(v);
const isObject = (v) => v !== null && typeof v === "object" && !Array.isArray(v);
const FIELDS = {
  header: { format: isText, version: isNumber, model: isText, method: isText, params: isObject, device: isText, versions: isObject, mask_id: isNumber },
  request: { request: isText, ids: Array.isArray, masked: Array.isArray, params: isObject },
  tokens: { text: isObject },
  step: { request: isText, slot: isNumber, step: isNumber, ms: isNumber, passes: Array.isArray, marks: Array.isArray },
  end: { request: isText, reason: isText, steps: isNumber, nfe: isNumber, rows: isNumber, seconds: isNumber, ids: Array.isArray },
};

/** A log that cannot be read; the message names the line. */
export class LogError extends Error {}

export const RECOMPUTED = ["none", "sweep", "candidate", "ahead", "fresh", "known"];
export const REASONS = {
  sweep: "every row",
  candidate: "candidates",
  ahead: "other masks",
  fresh: "fresh commits",
  known: "tokens again",
};

/** A log that grows event by event; the playground feeds one from a stream. */
export class Log {
  constructor(name = "log") {
    this.name = name;
    this.header = null;
    this.texts = new Map();
    this.requests = new Map();
    /** Steps of the batch: {ms, steps: [{request, index}], passes, first, until}; cumulated at its end. */
    this.frames = [];
    this.slots = 0;
    this.lines = [];
    this.closed = true;
  }

  add(event, where) {
    check(event, where);
    if (!this.header && event.event !== "header") throw new LogError(`${where}: not an event log (${FORMAT})`);
    this["on" + event.event](event, where);
  }

  onheader(event, where) {
    if (event.format !== FORMAT) throw new LogError(`${where}: not an event log (${FORMAT})`);
    if (event.version !== VERSION) throw new LogError(`${where}: version ${event.version} of the log; this page reads ${VERSION}`);
    if (this.header) throw new LogError(`${where}: a second header`);
    this.header = event;
    this.slots = event.slots ?? 1;
  }

  ontokens(event) {
    for (const [id, text] of Object.entries(event.text)) this.texts.set(Number(id), String(text));
  }

  onrequest(event, where) {
    const open = this.requests.get(event.request);
    if (open && !open.end) throw new LogError(`${where}: request "${event.request}" is there twice`);
    this.requests.set(event.request, new Request(event, where));
    this.closed = true;
  }

  open(event, where) {
    const request = this.requests.get(event.request);
    if (!request || request.end) throw new LogError(`${where}: ${event.event} of request "${event.request}", which is not open`);
    return request;
  }

  onstep(event, where) {
    const request = this.open(event, where);
    let frame = this.frames.at(-1);
    // A batch's step logs each slot once, with one time for all of them.
    if (!frame || this.closed || frame.ms !== event.ms || frame.steps.some((s) => s.slot === event.slot)) {
      const before = frame ?? { until: 0, passesUntil: 0 };
      frame = { ms: event.ms, steps: [], passes: 0, until: before.until + event.ms, passesFrom: before.passesUntil, passesUntil: before.passesUntil };
      this.frames.push(frame);
      this.closed = false;
    }
    const index = request.add(event, this.frames.length - 1, where);
    frame.steps.push({ request, index, slot: event.slot });
    frame.passes = Math.max(frame.passes, event.passes.length);
    frame.passesUntil = frame.passesFrom + frame.passes;
    this.slots = Math.max(this.slots, event.slot + 1);
  }

  onend(event, where) {
    const request = this.open(event, where);
    request.end = event;
    request.lastFrame = this.frames.length - 1;
    this.closed = true;
  }

  text(id) {
    return this.texts.get(id) ?? `[${id}]`;
  }

  /** How long the log is on a clock: `steps`, `passes` or `time` (ms). */
  duration(clock) {
    const last = this.frames.at(-1);
    if (!last) return 0;
    return { steps: this.frames.length, passes: last.passesUntil, time: last.until }[clock];
  }

  /** The last batch step that has ended at `t`, -1 before the first. */
  frameAt(t, clock) {
    if (clock === "steps") return Math.min(this.frames.length, Math.floor(t + 1e-9)) - 1;
    const end = clock === "time" ? "until" : "passesUntil";
    let low = -1;
    let high = this.frames.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.frames[middle][end] <= t + 1e-6) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

class Request {
  constructor(event, where) {
    Object.assign(this, { id: event.request, ids: event.ids, params: event.params, end: null, steps: [] });
    this.length = event.ids.length;
    this.masked = new Uint8Array(this.length);
    for (const range of event.masked) {
      if (!Array.isArray(range) || range.length !== 2) throw new LogError(`${where}: masked range ${JSON.stringify(range)} is not [start, end)`);
      this.masked.fill(1, range[0], range[1]);
    }
    this.wanted = this.masked.reduce((sum, flag) => sum + flag, 0);
    this.frames = [];
    this.slot = null;
    this.firstFrame = null;
    this.lastFrame = null;
    /** Marks of each position in order of time: [step index, token, confidence, state]. */
    this.marks = Array.from({ length: this.length }, () => []);
    this.committedAt = new Int32Array(this.length).fill(-1).map((_, i) => (this.masked[i] ? 1 << 30 : -1));
    this.touched = new Uint8Array(this.length).fill(1);
  }

  add(event, frame, where) {
    const index = this.steps.length;
    this.slot ??= event.slot;
    this.firstFrame ??= frame;
    const candidates = new Set();
    for (const [pos] of event.marks) {
      if (!Number.isInteger(pos) || pos < 0 || pos >= this.length) throw new LogError(`${where}: mark at position ${pos} of a canvas of ${this.length}`);
      candidates.add(pos);
    }
    const made = { step: event.step, ms: event.ms, marks: event.marks, extra: 0, verifyRows: 0, verify: false, why: this.reasons(event, candidates, where) };
    made.rows = made.why.reduce((sum, kind) => sum + (kind > 0), 0);
    for (const pass of event.passes) {
      made.extra += pass.extra?.length ?? 0;
      if (pass.kind !== "verify") continue;
      made.verify = true;
      made.verifyRows += count(pass.rows) + (pass.extra?.length ?? 0);
    }
    made.passes = event.passes.length;
    const before = this.steps.at(-1) ?? { committed: 0, nfe: 0, total: 0 };
    made.committed = before.committed;
    for (const [pos, token, confidence, state] of event.marks) {
      this.marks[pos].push([index, token, confidence, state]);
      if (state !== "committed" && state !== "accepted") continue;
      if (this.committedAt[pos] > index) made.committed += 1;
      this.committedAt[pos] = index;
      this.touched[pos] = 0;
    }
    made.nfe = before.nfe + made.passes;
    made.total = before.total + made.rows + made.verifyRows;
    this.steps.push(made);
    this.frames.push(frame);
    return index;
  }

  /** Why each position was recomputed in the denoise passes of a step: indices into RECOMPUTED. */
  reasons(event, candidates, where) {
    const why = new Uint8Array(this.length);
    for (const pass of event.passes) {
      if (pass.kind === "verify") continue;
      for (const range of pass.rows) {
        if (!Array.isArray(range) || range.length !== 2) throw new LogError(`${where}: rows ${JSON.stringify(range)} are not [start, end)`);
        for (let pos = range[0]; pos < Math.min(range[1], this.length); pos++) {
          if (pass.full) why[pos] = 1;
          else if (this.committedAt[pos] === 1 << 30) why[pos] = candidates.has(pos) ? 2 : 3;
          else why[pos] = this.touched[pos] ? 5 : 4;
          this.touched[pos] = 1;
        }
      }
    }
    return why;
  }

  /** The request's step at a batch step: its index, -1 before its first. */
  indexAt(frame) {
    let low = -1;
    let high = this.frames.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.frames[middle] <= frame) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** What a position shows after step `index`: {token, confidence, state, now}. */
  at(pos, index) {
    if (!this.masked[pos]) return { token: this.ids[pos], confidence: null, state: "prompt", now: false };
    const marks = this.marks[pos];
    let found = null;
    for (let i = marks.length - 1; i >= 0; i--) {
      if (marks[i][0] <= index) {
        found = marks[i];
        break;
      }
    }
    if (!found) return { token: null, confidence: null, state: "mask", now: false };
    const now = found[0] === index;
    const passing = found[3] === "rejected" || found[3] === "draft";
    return { token: found[1], confidence: found[2], state: passing && !now ? "guess" : found[3], now };
  }
}

const count = (ranges) => ranges.reduce((sum, [start, end]) => sum + end - start, 0);
const short = (value) => JSON.stringify(value)?.slice(0, 60);

function check(event, where) {
  if (!isObject(event) || !isText(event.event)) throw new LogError(`${where}: not an event`);
  const fields = Object.hasOwn(FIELDS, event.event) ? FIELDS[event.event] : null;
  if (!fields) throw new LogError(`${where}: unknown event "${event.event}"; known: ${Object.keys(FIELDS).join(", ")}`);
  for (const [name, right] of Object.entries(fields)) {
    if (!(name in event)) throw new LogError(`${where}: ${event.event} without "${name}"`);
    if (!right(event[name])) throw new LogError(`${where}: ${event.event} with ${name}=${short(event[name])}`);
  }
  for (const mark of event.marks ?? []) {
    if (!(Array.isArray(mark) && mark.length === 4 && STATES.includes(mark[3])))
      throw new LogError(`${where}: mark ${short(mark)} is not [position, token, confidence, state]`);
  }
  for (const pass of event.passes ?? []) {
    if (!(isObject(pass) && isText(pass.kind) && Array.isArray(pass.rows))) throw new LogError(`${where}: pass ${short(pass)} has no kind or rows`);
  }
}

/** Read a whole log. Throws LogError. */
export function parseLog(text, name = "log") {
  const log = new Log(name);
  text.split("\n").forEach((line, index) => {
    if (!line.trim()) return;
    const where = `${name}, line ${index + 1}`;
    let event;
    try {
      event = JSON.parse(line);
    } catch {
      throw new LogError(`${where}: not a line of JSON; the log is broken or cut off here`);
    }
    log.add(event, where);
  });
  if (!log.header) throw new LogError(`${name}: empty, not an event log`);
  log.lines = text.endsWith("\n") ? text : `${text}\n`;
  return log;
}
