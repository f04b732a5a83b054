// The verify step of the engine on a window of made-up confidences: commit by confidence, search order, both rules,
// bounds. flash_dllm/web/verify_toy.py runs the engine's own classes; a test compares the two.

const f32 = Math.fround;

/** Indices by descending confidence, ties to the lower position. */
function order(window, open) {
  return [...window.keys()].filter(open).sort((a, b) => f32(window[b].draft) - f32(window[a].draft) || a - b);
}

/** Fast-dLLM's bound on tokens committed together: 1 means none. */
function together(probabilities) {
  const n = probabilities.length;
  if (n === 0) return 0;
  const delta = 1 - Math.min(...probabilities);
  if (n === 1) return delta;
  return (n + 1) * delta <= 1 ? Math.min(1, ((3 * n - 1) / 2) * delta) : 1;
}

const agrees = (place) => place.agrees || place.view > 0.5;

function prefix(list, test) {
  const stop = list.findIndex((entry, k) => !test(entry, k));
  return stop < 0 ? list.length : stop;
}

/** What a step does with a window; fields as in the Python `Outcome`, and why each rule stops. */
export function decide(window, epsilon, gamma, searchSize = 8) {
  const sure = [...window.keys()].filter((i) => f32(window[i].draft) >= f32(epsilon));
  const forced = sure.length === 0 && window.length > 0;
  const confident = forced ? order(window, () => true).slice(0, 1) : sure;
  const search = order(window, (i) => !confident.includes(i)).slice(0, searchSize);
  let product = 1;
  const running = search.map((i) => (product = f32(product * f32(window[i].view))));
  const g = f32(gamma);
  const paper = prefix(search, (i) => agrees(window[i]) && f32(window[i].view) >= g);
  const strict = prefix(search, (_, k) => running[k] >= g);
  const bound = (count) => (count ? 1 - running[count - 1] : 0);
  return {
    confident,
    forced,
    search,
    running,
    paper,
    product: strict,
    bounds: {
      confident: together(confident.map((i) => window[i].draft)),
      paper: bound(paper),
      product: bound(strict),
      paper_worst: 1 - gamma ** paper,
      product_worst: strict ? 1 - gamma : 0,
    },
    stops: { paper: paperStop(window, search, paper, gamma), product: productStop(window, search, running, strict, gamma) },
  };
}

function paperStop(window, search, count, gamma) {
  if (count === search.length) return search.length ? "all drafts accepted" : "nothing to test";
  const place = window[search[count]];
  if (f32(place.view) < f32(gamma)) return `"${place.token}" has ${place.view.toFixed(2)}, below ${gamma.toFixed(2)}`;
  return `the view's top token is not "${place.token}"`;
}

function productStop(window, search, running, count, gamma) {
  if (count === search.length) return search.length ? "all drafts accepted" : "nothing to test";
  const token = window[search[count]].token;
  return `at "${token}" the running product is ${running[count].toFixed(3)}, below ${gamma.toFixed(2)}`;
}
