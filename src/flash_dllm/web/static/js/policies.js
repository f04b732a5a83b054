// The cache policies of the engine on a fixed schedule, without a model. The engine's own run of the same settings is
// in data/toys.json, and a test compares the two for many more; flash_dllm/web/cache_toy.py says what is scripted.

const MASKED = Infinity;
const PINNED = 1e30;

/** Indices by descending key, ties to the lower index, those flagged only. */
function bestFirst(keys, flags, count) {
  return [...keys.keys()]
    .filter((i) => flags[i])
    .sort((a, b) => keys[b] - keys[a] || a - b)
    .slice(0, count);
}

function mix(word) {
  let x = word >>> 0;
  x = Math.imul(x ^ (x >>> 16), 0x7feb352d) >>> 0;
  x = Math.imul(x ^ (x >>> 15), 0x846ca68b) >>> 0;
  return (x ^ (x >>> 16)) >>> 0;
}

/** The engine's counter noise: a number in (0, 1) from integers. */
export function counterUniform(...words) {
  let first = 0x2545f491;
  let second = 0x9e3779b1;
  for (const word of words) {
    for (const part of [word >>> 0, Math.floor(word / 2 ** 32) >>> 0]) {
      first = mix(first ^ part);
      second = mix((second + Math.imul(part, 0x85ebca77)) >>> 0);
    }
  }
  return (first * 2 ** 20 + (second >>> 12) + 0.5) / 2 ** 52;
}

class Run {
  constructor(data, setting) {
    Object.assign(this, data, setting.options);
    this.length = data.script.commit_at.length;
    this.blockLength = setting.numbers.block_length ?? 32;
    this.committedAt = data.script.commit_at.map((step) => (step < 0 ? -1 : MASKED));
    this.fresh = new Array(this.length).fill(false);
    this.score = new Array(this.length).fill(0);
    this.tracked = new Set();
    this.step = 0;
    this.blockIndex = -1;
    this.blockStep = 0;
  }

  positions(test) {
    return this.committedAt.map((_, i) => i).filter(test);
  }

  get all() {
    return this.positions(() => true);
  }

  masked(pos) {
    return this.committedAt[pos] === MASKED;
  }

  leftmost(count) {
    return this.positions((i) => this.masked(i)).slice(0, count);
  }

  /** Enter the block of the first masked position. */
  enter(size) {
    const block = Math.floor((this.committedAt.indexOf(MASKED) - this.prompt) / size);
    if (block !== this.blockIndex) this.blockStep = 0;
    this.blockIndex = block;
    return this.prompt + block * size;
  }

  commit() {
    this.script.commit_at.forEach((when, pos) => {
      if (when !== this.step) return;
      this.committedAt[pos] = this.step;
      this.fresh[pos] = true;
    });
    this.score = this.script.score[this.step];
    this.step += 1;
    this.blockStep += 1;
  }
}

const same = (rows) => (run) => new Array(run.layers).fill(rows(run));

function blockRows(after) {
  return same((run) => {
    const start = run.enter(run.blockLength);
    if (run.blockStep === 0) return run.all;
    const end = after ? run.length : start + run.blockLength;
    return run.positions((i) => i >= start && i < end);
  });
}

function flashKeys(run) {
  const by = {
    attention: () => run.score,
    recent: () => run.committedAt,
    random: () => run.all.map((i) => Math.fround(counterUniform(0, run.step, i, -2))),
    none: () => run.all.map(() => 0),
  }[run.track_by]();
  return by.map((key, i) => (run.fresh[i] ? PINNED : key));
}

function flashRows(run) {
  const due = run.step === 0 || (run.refresh_every > 0 && run.step % run.refresh_every === 0);
  const pool = run.all.map((i) => (run.track_by === "none" ? run.fresh[i] : !run.masked(i)));
  const rows = due
    ? run.all
    : [...run.leftmost(run.window + run.lookahead), ...bestFirst(flashKeys(run), pool, run.track)];
  for (const pos of rows) run.fresh[pos] = false;
  return rows;
}

function dkvRows(run) {
  if (run.step <= 1 || run.step % run.refresh === 0) return run.all;
  return run.positions((i) => !(run.committedAt[i] < run.step - 1));
}

function dllmLayers(run) {
  const answerDue = run.step % run.kr === 0;
  const promptDue = run.step % run.kp === 0;
  const answer = (i) => i >= run.prompt;
  const fixed = run.positions((i) => (answer(i) ? answerDue : promptDue));
  const share = answerDue ? 0 : Math.floor((run.length - run.prompt) * run.rho);
  const moved = run.script.moved[run.step].map(Math.fround);
  const voted = bestFirst(moved, run.all.map(answer), share);
  const deep = [...new Set([...fixed, ...voted])];
  return [run.all, ...new Array(run.layers - 1).fill(deep)];
}

function elasticLayers(run) {
  let full = run.step === 0 || run.drift > 1;
  const fed = [
    ...new Set([
      ...run.leftmost(run.window),
      ...run.tracked,
      ...run.positions((i) => run.committedAt[i] === run.step - 1 && run.step > 0),
    ]),
  ];
  const known = run.all.map((i) => !run.masked(i));
  const layers = run.script.similarity[run.step].map((similarity) => {
    const rows = full ? run.all : fed;
    full ||= run.tracked.size > 0 && Math.fround(similarity) < Math.fround(run.drift);
    return rows;
  });
  run.tracked = new Set(bestFirst(run.script.score[run.step], known, run.track_num));
  return layers;
}

const LAYERS_OF = {
  none: same((run) => run.all),
  dual: blockRows(false),
  prefix: blockRows(true),
  flash: same(flashRows),
  "dkv-decode": same(dkvRows),
  "dllm-cache": dllmLayers,
  elastic: elasticLayers,
};

/** What a policy recomputes: positions in the last layer and rows (mean over the layers, rounded up), by step. */
export function runPolicy(data, setting) {
  const run = new Run(data, setting);
  const recomputed = [];
  const rows = [];
  while (run.step < data.script.score.length) {
    const layers = LAYERS_OF[setting.policy](run);
    recomputed.push([...layers.at(-1)].sort((a, b) => a - b));
    rows.push(Math.ceil(layers.reduce((sum, layer) => sum + layer.length, 0) / layers.length));
    run.commit();
  }
  return { recomputed, rows };
}

/**
 * What each pass finds in the cache: by step, `age` (steps since the row was recomputed), `wrong` (a committed token
 * whose row was last computed while it was still MASK) and `masked`.
 */
export function staleness(script, recomputed) {
  const last = script.commit_at.map(() => 0);
  return recomputed.map((rows, step) => {
    for (const pos of rows) last[pos] = step;
    return script.commit_at.map((when, pos) => ({
      age: step - last[pos],
      masked: when >= step,
      wrong: when >= 0 && when < step && last[pos] <= when,
    }));
  });
}
