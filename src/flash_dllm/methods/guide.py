"""The autoregressive guide of :mod:`.flashdlm`: a causal model that reads the canvases of all slots.

Causal order is the visibility interval [pos, inf) of each key place and rank = pos of each row. Cost:
the guide's weights, its K and V of every slot, and one pass for every :meth:`Guide.run`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.core.cache import KVCache
from flash_dllm.core.forward import Context, compact
from flash_dllm.core.rows import rectangle
from flash_dllm.core.state import State
from flash_dllm.core.types import NEVER, Plan, View
from flash_dllm.models.layers import Model

from . import MethodError


@dataclass
class Guide:
    """A causal model with an exact cache of what it has read.

    ``read`` [S] int64 counts the leading positions whose keys belong to the canvas as it is; ``passes`` [S]
    int64 counts passes in which a row of the slot was read. ``vocab_map``: see :class:`.flashdlm.Guided`.
    """

    ctx: Context
    vocab_map: Tensor
    read: Tensor
    passes: Tensor

    @classmethod
    def bind(cls, model: Model, vocab_map: Tensor | None, ctx: Context, state: State) -> Guide:
        """Allocate for the slots of ``state``; refuse a guide that cannot read its canvases."""
        config, rows = model.config, ctx.model.config.vocab_size
        if not config.causal:
            raise MethodError(f"guide: a {config.family} model is not causal; the guide must be (qwen2)")
        if vocab_map is None and config.vocab_size != rows:
            raise MethodError(
                f"guide: its vocabulary has {config.vocab_size} rows, the diffusion model's {rows}; "
                "give guide_map (see vocabulary_map) where the tokenizers differ"
            )
        if vocab_map is not None and (len(vocab_map) != rows or int(vocab_map.max()) >= config.vocab_size):
            raise MethodError(f"guide_map: needs {rows} entries below the guide's {config.vocab_size} rows")
        if state.positions > config.max_positions:
            longest = config.max_positions
            raise MethodError(f"guide: reads {longest} positions, the canvases have {state.positions}")
        if model.device != ctx.model.device:
            raise MethodError(f"guide: is on {model.device}, the diffusion model on {ctx.model.device}")
        kv = KVCache.allocate(config, state.slots, state.positions, 0, model.embed)
        zeros = torch.zeros_like(state.step)
        ids = (torch.arange(rows) if vocab_map is None else vocab_map).to(state.device)
        return cls(Context.build(model, kv, state.positions), ids, zeros, zeros.clone())

    def run(self, state: State, text: Tensor, pos: Tensor, valid: Tensor) -> Tensor:
        """Read ``text`` [S, L] at ``pos`` [S, R] where ``valid``; all before it must have been read.

        Returns:
            Final normed hidden states, [S, R, d].
        """
        base, places = self.ctx.kv.base, self.ctx.kv.places
        slots = tuple(valid.any(1).nonzero()[:, 0].tolist())
        end = torch.where(valid, pos + 1, 0).amax(1)
        token = self.vocab_map[text.gather(1, torch.where(valid, pos, 0))]
        # A token that the guide does not know is read as its end of text.
        token = torch.where(token < 0, (*self.ctx.model.config.eos_ids, 0)[0], token)
        rows = rectangle(
            state, base, slots, base + int(end.max()), pos, valid, token=token, rank=pos.to(torch.int32)
        )
        lo = (torch.arange(places, device=state.device) - base).clamp_min(0).expand(state.slots, places)
        hi = torch.zeros_like(lo)
        hi[:, base:] = torch.where(state.order < end[:, None], NEVER, 0)
        lane = torch.zeros_like(state.step)
        lane[list(slots)] = torch.arange(len(slots), device=state.device)
        reads = lane[:, None] * pos.shape[1] + torch.arange(pos.shape[1], device=state.device)
        self.passes.add_(valid.any(1))
        view = View(lo.to(torch.int32), hi.to(torch.int32), (base + end).to(torch.int32))
        return compact(self.ctx, Plan(rows, view, reads)).hidden


def vocabulary_map(ids: dict[str, int], guide_ids: dict[str, int], rows: int) -> Tensor:
    """Map a diffusion model's ids to a guide's by the spelling of the tokens.

    Args:
        ids: token -> id of the diffusion model's tokenizer; ``guide_ids`` of the guide's.
        rows: embedding rows of the diffusion model.

    Returns:
        [rows] int64, -1 where the guide has no such token.

    Raises:
        MethodError: they share no token.
    """
    out = torch.full((rows,), -1, dtype=torch.int64)
    for token, index in ids.items():
        if token in guide_ids and index < rows:
            out[index] = guide_ids[token]
    if int(out.max()) < 0:
        raise MethodError("guide: its tokenizer shares no token with the diffusion model's")
    return out
