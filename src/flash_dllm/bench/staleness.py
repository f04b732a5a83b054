"""How stale a cache is: the drift of each cached row against an exact recompute, and what it does to the output.

After the denoise pass of each step, every key and value that the cache holds is compared with what a pass over the
whole canvas (the tokens that this pass saw) would give: drift = ‖cached - exact‖ / ‖exact‖. A row's *share* is the
attention that the candidates' exact queries pay to it; *weighted* drift is the sum of share x value drift over the
positions of a layer, so it is large only where somebody looks. The effect on the output is the total variation
between the candidates' distributions from the cached pass and from the exact one.

*Capture* answers which rows are worth recomputing next: of the weighted drift of all known positions, how much sits in
the n rows that a criterion would choose. ``best`` chooses by share x drift itself, which no policy can know beforehand.
What a policy has just recomputed is fresh, so the capture of its own criterion is that of what it leaves behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_dllm.bench.exact import Exact, exact_pass
from flash_dllm.bench.stats import quantiles
from flash_dllm.bench.timing import BenchError
from flash_dllm.core.forward import Context
from flash_dllm.core.method import PassOut
from flash_dllm.core.rows import predictor
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Lanes, Plan
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.kernels.head_confidence import head_logits

KINDS = ("prompt", "committed", "candidate", "masked behind")
CRITERIA = ("best", "attention", "recent", "random")
NOTHING = 1e-5
"""Weighted drift below this is rounding."""
BINS = 20
"""Parts of a canvas by which drift by position is reported."""


@dataclass
class Means:
    """Running sums by an integer key: count, key drift, value drift, share, share x value drift."""

    sums: dict[int, Tensor] = field(
        default_factory=lambda: defaultdict(lambda: torch.zeros(5, dtype=torch.float64))
    )

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add ``values`` [N, 4] under ``keys`` [N]."""
        for key in keys.unique().tolist():
            mine = values[keys == key].double()
            self.sums[key] += torch.cat([torch.tensor([len(mine)], dtype=torch.float64), mine.sum(0).cpu()])

    def rows(self, name: str, passes: int) -> list[dict[str, Any]]:
        """One row a key; drifts are means over rows, shares are sums over positions, averaged over ``passes``."""
        found = []
        for key in sorted(self.sums):
            count, keys, values, share, weighted = self.sums[key].tolist()
            numbers = {
                "key_drift": keys / count, "value_drift": values / count, "attention_share": share / passes,
                "weighted_drift": weighted / passes,
            }  # fmt: skip
            found.append(
                {name: key, "rows": int(count), **{k: float(f"{v:.5g}") for k, v in numbers.items()}}
            )
        return found


@dataclass(frozen=True)
class Look:
    """One slot after the pass of one step: L positions, tensors on the host.

    ``known`` [L] bool held a token in this pass; ``done`` [L] bool was recomputed in it; ``age`` [L] int64, steps since
    each was; ``order`` [L] float32, when it was committed; ``kinds`` [L] int64 into :data:`KINDS`. ``keys``, ``values``
    and ``share`` [layers, L] float32: drifts and attention.
    """

    step: int
    known: Tensor
    done: Tensor
    age: Tensor
    order: Tensor
    kinds: Tensor
    keys: Tensor
    values: Tensor
    share: Tensor


class Meter:
    """Collects what :func:`watch` lets it see. It reads to the host and recomputes, so it is slow.

    Args:
        engine: any policy.
        every: measure every so many steps of a request.
        budgets: numbers of rows for the capture.
    """

    def __init__(self, engine: Engine, every: int = 1, budgets: Sequence[int] = (8, 32)) -> None:
        self.engine, self.every, self.budgets = engine, every, tuple(budgets)
        self.layers = engine.model.config.n_layers
        names = ("layer", "kind", "place", "step", "age", "kept", "recomputed")
        self.means = {name: Means() for name in names}
        self.capture: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.rank: list[list[float]] = [[] for _ in range(self.layers)]
        self.variation: dict[int, list[float]] = defaultdict(list)
        self.flips: list[bool] = []
        self.passes = 0
        self._age: dict[int, Tensor] = {}

    def look(self, cand: Candidates, out: PassOut) -> None:
        """See what the denoise pass of a step has left, before its commits and before any other pass."""
        state = self.engine.state
        steps = state.step.tolist()
        for slot in self.engine.scheduler.main_slots():
            if not int(out.recomputed[slot]):
                continue
            total = int(state.total[slot])
            done = self._recomputed(out, slot, total)
            age = self._age.get(slot) if steps[slot] else None
            self._age[slot] = torch.where(done, 0, 1 + (torch.zeros(total).long() if age is None else age))
            if steps[slot] % self.every == 0:
                self._measure(cand, out, slot, done)

    def _recomputed(self, out: PassOut, slot: int, total: int) -> Tensor:
        """Positions whose keys the pass has rewritten (delta loop: in the last layer), [L] bool."""
        if out.rows is None:
            assert out.marks is not None
            return out.marks[slot, :total].cpu()
        rows, base = out.rows, self.engine.decoder.ctx.kv.base
        mine = rows.valid & (rows.slot == slot) & (rows.place >= base)
        flags = torch.zeros(total, dtype=torch.bool)
        flags[rows.pos[mine].cpu()] = True
        return flags

    def _measure(self, cand: Candidates, out: PassOut, slot: int, done: Tensor) -> None:
        model, state, total = self.engine.model, self.engine.state, len(done)
        valid = cand.valid[slot]
        if not bool(valid.any()):
            return
        pos = cand.pos[slot][valid]
        exact = exact_pass(model, state.ids[slot, :total], predictor(pos, model.config.shift))
        known, place = state.known[slot, :total].cpu(), torch.arange(total)
        kinds = torch.where(known, torch.where(place < int(state.first[slot]), 0, 1), 3)
        kinds[pos.cpu()] = 2
        keys, values = self._drifts(exact, slot, total)
        order = state.committed_at[slot, :total].cpu().float()
        step = int(state.step[slot])
        look = Look(step, known, done, self._age[slot], order, kinds, keys, values, exact.attention.cpu())
        self._sum(look)
        self._choose(look)
        self._output(out.hidden[slot, : len(valid)][valid], step, exact)
        self.passes += 1

    def _drifts(self, exact: Exact, slot: int, total: int) -> tuple[Tensor, Tensor]:
        """Relative drift of every cached key and value, each [layers, L] float32."""
        kv = self.engine.decoder.ctx.kv
        found = []
        for cached, right in ((kv.keys, exact.keys), (kv.values, exact.values)):
            mine = (
                torch.stack([layer[slot, kv.base : kv.base + total] for layer in cached]).float().flatten(2)
            )
            wide = right.float().flatten(2)
            found.append(((mine - wide).norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-12)).cpu())
        return found[0], found[1]

    def _sum(self, look: Look) -> None:
        cells = torch.stack([look.keys, look.values, look.share, look.share * look.values], -1)
        layers, total = self.layers, len(look.known)
        flat = cells.flatten(0, 1)
        age = torch.where(look.age > 0, 1 + look.age.clamp_min(1).float().log2().floor().long(), 0)
        by = {
            "layer": torch.arange(layers).repeat_interleave(total), "kind": look.kinds.repeat(layers),
            "place": (torch.arange(total) * BINS // total).repeat(layers),
            "step": torch.full((layers * total,), look.step), "age": age.repeat(layers),
        }  # fmt: skip
        for name, keys in by.items():
            self.means[name].add(keys, flat)
        for name, flags in (("kept", ~look.done), ("recomputed", look.done)):
            picked = cells[:, flags]
            self.means[name].add(
                torch.arange(layers).repeat_interleave(picked.shape[1]), picked.flatten(0, 1)
            )

    def _choose(self, look: Look) -> None:
        known = look.known
        for layer in range(self.layers):
            found = rank_correlation(look.share[layer, known], look.values[layer, known])
            if found is not None:
                self.rank[layer].append(found)
        harm = (look.share * look.values).mean(0)[known]
        total = float(harm.sum())
        if total <= NOTHING:
            return
        noise = torch.rand(len(harm), generator=torch.Generator().manual_seed(look.step))
        by = {
            "best": harm,
            "attention": look.share.mean(0)[known],
            "recent": look.order[known],
            "random": noise,
        }
        for budget in self.budgets:
            for name in CRITERIA:
                picked = by[name].sort(descending=True, stable=True).indices[:budget]
                self.capture[budget, name].append(float(harm[picked].sum()) / total)

    def _output(self, cached: Tensor, step: int, exact: Exact) -> None:
        head = self.engine.model.head
        ours, right = (head_logits(h, head).softmax(-1) for h in (cached, exact.hidden))
        self.variation[step] += (0.5 * (ours - right).abs().sum(-1)).tolist()
        self.flips += (ours.argmax(-1) != right.argmax(-1)).tolist()

    def report(self) -> dict[str, Any]:
        """Everything that was seen, as plain numbers.

        Raises:
            BenchError: nothing was.
        """
        if not self.passes:
            raise BenchError("staleness: no pass was measured")
        everything = [v for values in self.variation.values() for v in values]
        kinds = [
            {**row, "kind": KINDS[row["kind"]]}
            for row in self.means["kind"].rows("kind", self.passes * self.layers)
        ]
        return {
            "passes": self.passes, "candidates": len(everything),
            "total_variation": {k: round(v, 6) for k, v in quantiles(everything).items()},
            "argmax_changed": round(sum(self.flips) / len(self.flips), 6),
            "variation_by_step": [
                {"step": step, "candidates": len(v), "mean": round(sum(v) / len(v), 6)}
                for step, v in sorted(self.variation.items())
            ],
            "by_layer": self._rows("layer"), "kept_by_layer": self._rows("kept"),
            "recomputed_by_layer": self._rows("recomputed"), "by_kind": kinds, "by_place": self._rows("place"),
            "by_step": self._rows("step"), "by_age": self._rows("age"),
            "rank_correlation_by_layer": [round(sum(r) / len(r), 4) if r else None for r in self.rank],
            "capture": [
                {"rows": budget, "criterion": name, "share": round(sum(v) / len(v), 4), "passes": len(v)}
                for (budget, name), v in sorted(self.capture.items())
            ],
        }  # fmt: skip

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Sums by ``name``; those over all layers are averaged over layers."""
        per = self.passes if name in ("layer", "kept", "recomputed") else self.passes * self.layers
        label = "layer" if name in ("kept", "recomputed") else name
        return self.means[name].rows(label, per)


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Spearman's rank correlation of [N] and [N]; None where one of them has no spread."""
    x, y = (t.argsort().argsort().double() for t in (a, b))
    if len(x) < 3 or float(a.max()) == float(a.min()) or float(b.max()) == float(b.min()):
        return None
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def watch(engine: Engine, requests: Sequence[Request], meter: Meter) -> None:
    """Decode requests and let ``meter`` look after the denoise pass of every step."""
    policy = engine.method.cache
    plain = policy.run

    def run(ctx: Context, state: State, lanes: Lanes, cand: Candidates, plan: Plan | None) -> PassOut:
        out = plain(ctx, state, lanes, cand, plan)
        meter.look(cand, out)
        return out

    vars(policy)["run"] = run
    try:
        for item in requests:
            engine.add(item)
        while not engine.idle:
            engine.step()
    finally:
        del vars(policy)["run"]
