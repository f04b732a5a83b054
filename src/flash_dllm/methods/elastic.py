"""Elastic-Cache (arXiv 2510.14973): deeper layers refresh when the most attended tokens drift.

A pass recomputes the window (the beta leftmost masks), what the last step decoded, and the tracked tokens.
Layer by layer the attention that a tracked token pays now is compared with what it paid before this pass;
where the similarity falls below ``drift`` (the paper's gamma), all layers above are recomputed for every
position, from the layer inputs kept for that. Masks behind the window keep their old keys
(``block_caching``; off: all masks are fed). The next tracked tokens are, in each layer, the ``track_num``
decoded ones that the window attends to most.

Where paper and code differ, by name: ``similarity="heads"`` (default, the code) takes the cosine over heads
for each tracked row and key and averages it; ``"keys"`` (the paper) the cosine of each head's attention row
over the keys. The tracking queries are this step's window (the code; the paper's listing has the last
step's). In both, the layer that finds the drift is not itself refreshed. ``drift`` above 1 fires whatever
there is to compare, so nothing is: every pass is a sweep, and the answer that of ``none``. For Dream the row
before a window position, which predicts it, is fed as well; that is ours, as its sampler could not be had.
The authors decode one request; here slots drift each at its own layer.

Defaults (LLaDA): window 16 (GSM8K 32), drift 0.9, track_num 1, epsilon 0.9, block_caching on; Dream: GSM8K
window 32, HumanEval drift 0.98. Not graphable: rows join in the middle of a pass and one number a layer
goes to the host.

Cost a step and slot: window + decoded + tracked rows up to the drifting layer, T rows above it; the rows
reported are the mean over layers. Bytes: a layer input and a query for every position and layer beside K
and V, so twice those of a plain cache (heads = KV heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_dllm.core.forward import Context
from flash_dllm.core.growing import Growing, LayerStore
from flash_dllm.core.method import CachePolicy, PassOut
from flash_dllm.core.select import highest, leftmost, most
from flash_dllm.core.state import State
from flash_dllm.core.types import Candidates, Lanes, Plan
from flash_dllm.models.config import ModelConfig
from flash_dllm.models.inspection import row_bytes

SIMILARITIES = ("heads", "keys")


class ElasticCache(CachePolicy):
    """See the module.

    Args:
        drift: similarity below which the layers above are refreshed; above 1 every pass is a sweep.
        track_num: tokens tracked in each layer.
        block_caching: masks behind the candidates keep their old keys.
        similarity: ``heads`` or ``keys``.
    """

    name = "elastic"
    graphable = False
    sync = True
    supports_cfg = False
    loop = "growing"

    def __init__(
        self,
        drift: float = 0.9,
        track_num: int = 1,
        block_caching: bool = True,
        similarity: str = "heads",
    ) -> None:
        if similarity not in SIMILARITIES:
            raise ValueError(f"similarity={similarity!r} is not known; one of {', '.join(SIMILARITIES)}")
        if track_num < 1:
            raise ValueError(f"track_num={track_num}: at least 1")
        self.drift, self.track_num = drift, track_num
        self.block_caching, self.similarity = block_caching, similarity
        self.store: LayerStore | None = None

    def bytes_per_position(self, config: ModelConfig, size: int) -> int:
        """Inputs and queries of every layer, and the activations: all rows of all slots may pass at once."""
        stored = (config.d_model + config.n_heads * config.head_dim) * config.n_layers
        return stored * size + row_bytes(config, size)

    def due(self, state: State) -> Tensor | None:
        return super().due(state) if self.drift > 1 else None

    def run(self, ctx: Context, state: State, lanes: Lanes, cand: Candidates, plan: Plan | None) -> PassOut:
        if self.store is None or self.store.inputs[0].shape[:2] != (state.slots, state.positions + 1):
            self.store = LayerStore.allocate(ctx, state)
            self.tracked = torch.zeros_like(state.masked)
        live = torch.zeros(state.slots, 1, dtype=torch.bool, device=state.device)
        live[lanes.live] = True
        inside, masks = state.inside & live, state.wanted & live
        window = spread(cand.pos, cand.valid, state.positions) if self.block_caching else masks
        fed = window | self.tracked | (state.committed_at == state.step[:, None] - 1)
        if ctx.model.config.shift:
            fed[:, :-1] |= window[:, 1:]
        self.seen = self.watcher(ctx, state, lanes, fed & inside)
        self.seen.watch(self, inside, masks, window)
        out = self.seen.run(cand)
        self.tracked.copy_(torch.stack(self.seen.most_attended).any(0))
        return out

    def watcher(self, ctx: Context, state: State, lanes: Lanes, fed: Tensor) -> Drift:
        """The pass over the rows ``fed`` [S, L]."""
        assert self.store is not None
        return Drift(ctx, state, lanes, fed, self.store)


def spread(pos: Tensor, take: Tensor, length: int) -> Tensor:
    """The positions [S, K] that are taken, as flags [S, length]."""
    flags = torch.zeros(pos.shape[0], length + 1, dtype=torch.bool, device=pos.device)
    return flags.scatter_(1, torch.where(take, pos, length), True)[:, :length]


class Drift(Growing):
    """A pass that compares and tracks.

    Attributes:
        first_full: first refreshed layer of each slot, the number of layers for none.
        similarity: [S] float32 a layer, NaN where nothing was compared.
        most_attended: [S, L] bool a layer.
    """

    def watch(self, policy: ElasticCache, inside: Tensor, masks: Tensor, window: Tensor) -> None:
        """What the pass looks at, each [S, L] bool: the canvases, what is masked in them, the masks fed."""
        n_layers = len(self.ctx.model.layers)
        self.policy, self.inside, self.known = policy, inside, inside & ~masks
        self.tracked, self.window = _places(policy.tracked & inside), _places(window)
        self.first_full = [0 if s in self.full else n_layers for s in range(self.state.slots)]
        self.similarity: list[Tensor] = []
        self.most_attended: list[Tensor] = []

    def before(self, index: int, queries: Tensor, keys: Tensor) -> None:
        self.was = self._weights(queries, keys, self.tracked[0]) if self.few else None

    def after(self, index: int, queries: Tensor, keys: Tensor) -> list[int]:
        self.most_attended.append(self._track(queries, keys))
        similarity = torch.full((self.state.slots,), float("nan"), device=keys.device)
        if self.was is not None:
            each = self._compare(self.was, self._weights(queries, keys, self.tracked[0]))
            similarity[self.few] = each[self.few]
        self.similarity.append(similarity)
        drifted: list[bool] = (similarity < self.policy.drift).tolist()
        grown = [s for s in self.few if drifted[s]]
        for slot in grown:
            self.first_full[slot] = index + 1
        return grown

    def _weights(self, queries: Tensor, keys: Tensor, pos: Tensor) -> Tensor:
        """Attention of the queries at ``pos`` [S, R] over every position, [S, H, R, L] float32."""
        slots, rows = pos.shape
        keys = keys[:, self.ctx.kv.base :].float()
        lane = torch.arange(slots, device=pos.device)[:, None]
        group = queries.shape[-2] // keys.shape[2]
        picked = queries[lane, pos].float().view(slots, rows, keys.shape[2], group, keys.shape[3])
        logits = torch.einsum("srgad,stgd->sgart", picked, keys).flatten(1, 2) / keys.shape[3] ** 0.5
        weights: Tensor = logits.masked_fill(~self.inside[:, None, None], float("-inf")).softmax(-1)
        return weights

    def _compare(self, was: Tensor, now: Tensor) -> Tensor:
        """Mean cosine of the tracked rows' attention [S, H, R, L], [S] float32; NaN where none is tracked."""
        valid = self.tracked[1]
        if self.policy.similarity == "keys":
            each, counted = F.cosine_similarity(was, now, dim=-1).mean(1), valid
        else:
            each, counted = F.cosine_similarity(was, now, dim=1), valid[..., None] & self.inside[:, None]
        return torch.where(counted, each, 0.0).flatten(1).sum(1) / counted.flatten(1).sum(1)

    def _track(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The known positions that the masks fed attend to most, [S, L] bool."""
        pos, valid = self.window
        weight = self._weights(queries, keys, pos)
        weight = torch.where(valid[:, None, :, None], weight, 0.0).sum((1, 2))
        return spread(*highest(weight, self.known, self.policy.track_num), self.state.positions)


def _places(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Flagged positions, ``(pos, valid)`` [S, most in a slot]."""
    return leftmost(flags, most(flags))
