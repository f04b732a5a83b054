"""Log-likelihood of a text under a masked diffusion model, by LLaDA's Monte Carlo estimate (arXiv 2502.09992).

With l of the n target tokens masked at random, l uniform in 1..n, the expected sum of the masked tokens'
log-probabilities times n / l is a lower bound on log p(target | context). The samples of one batch take their l evenly
spaced over 1..n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dllm.eval.errors import EvalError
from flash_dllm.llm import LLM
from flash_dllm.models.reference import forward

SAMPLES = 128
"""LLaDA's own number of random maskings."""


class Likelihood:
    """Scores continuations.

    Args:
        llm: the model.
        samples: random maskings of each target.
        batch: of them in one pass.
        seed: of the maskings; a target's do not depend on the other targets.
    """

    def __init__(self, llm: LLM, samples: int = SAMPLES, batch: int = 16, seed: int = 0) -> None:
        if samples < 1 or batch < 1:
            raise EvalError(f"samples={samples}, batch={batch}: both must be at least 1")
        self.llm, self.samples, self.batch, self.seed = llm, samples, min(batch, samples), seed
        self.model, self.mask_id = llm.loaded.model, llm.mask_id

    def log_prob(self, context: list[int], target: list[int]) -> float:
        """The estimate of log p(target | context), in nats; 0 for an empty target.

        Raises:
            EvalError: the two together are longer than ``max_model_len``, or the weights are quantised or split.
        """
        self._check(context, target)
        n = len(target)
        if not n:
            return 0.0
        noise = torch.Generator().manual_seed(self.seed)
        total, left = 0.0, self.samples
        while left:
            batch = min(self.batch, left)
            counts = self._counts(n, batch, noise)
            # The first l of a random order of the targets are masked.
            order = torch.rand(batch, n, generator=noise).argsort(1).argsort(1)
            hidden = (order < counts[:, None]).to(self.model.device)
            logs = self._target_logs(context, target, hidden)
            weight = (n / counts).to(logs)
            total += float(((logs * hidden).sum(1) * weight).sum())
            left -= batch
        return total / self.samples

    @staticmethod
    def _counts(n: int, batch: int, noise: torch.Generator) -> Tensor:
        """How many targets each sample of a batch masks, [batch] int64 in 1..n."""
        start = float(torch.rand(1, generator=noise))
        spread = (start + torch.arange(batch) / batch) % 1.0
        return (spread * n).floor().long().clamp_max(n - 1) + 1

    @torch.inference_mode()
    def _target_logs(self, context: list[int], target: list[int], hidden: Tensor) -> Tensor:
        """Log-probability of each target token where those of ``hidden`` [B, n] are masked, [B, n] float32."""
        wanted = torch.tensor(target, device=hidden.device).expand(len(hidden), -1)
        logits = self._logits(context, wanted, hidden)
        return logits.float().log_softmax(-1).gather(-1, wanted[..., None]).squeeze(-1)

    def _logits(self, context: list[int], target: Tensor, hidden: Tensor) -> Tensor:
        batch, n = hidden.shape
        start = len(context)
        before = torch.tensor(context, dtype=torch.int64, device=hidden.device).expand(batch, -1)
        ids = torch.cat([before, torch.where(hidden, self.mask_id, target)], 1)
        rows = torch.arange(start, start + n, device=hidden.device)
        if self.model.config.shift:
            rows = (rows - 1).clamp_min(0)
        return forward(self.model, ids, rows=rows.expand(batch, -1))

    @torch.inference_mode()
    def is_greedy(self, context: list[int], target: list[int]) -> bool:
        """Whether greedy decoding, the surest position first, gives ``target``; at most one pass a token."""
        self._check(context, target)
        device = self.model.device
        wanted = torch.tensor([target], dtype=torch.int64, device=device)
        hidden = torch.ones(1, len(target), dtype=torch.bool, device=device)
        while bool(hidden.any()):
            logits = self._logits(context, wanted, hidden).float()
            logits[..., self.mask_id] = float("-inf")
            prob, token = logits.softmax(-1).max(-1)
            at = prob.masked_fill(~hidden, -1.0).argmax(1)
            if int(token[0, at]) != target[int(at)]:
                return False
            hidden[0, at] = False
        return True

    def _check(self, context: list[int], target: list[int]) -> None:
        args = self.llm.args
        if args.quantization is not None or args.tensor_parallel_size > 1:
            raise EvalError(
                f"a likelihood is a plain forward of whole weights, not with quantization={args.quantization!r}, "
                f"tensor_parallel_size={args.tensor_parallel_size}"
            )
        total = len(context) + len(target)
        if total > self.llm.max_model_len:
            raise EvalError(
                f"a context of {len(context)} tokens and a continuation of {len(target)} need {total} positions, more "
                f"than max_model_len={self.llm.max_model_len}"
            )
