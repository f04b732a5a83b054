"""Named recipes: a model's shape, its objective's constants, and how its schedule is split into stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flash_dllm.train.model import Shape
from flash_dllm.train.optim import Rates
from flash_dllm.train.schedule import Curve


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that defines a training run but the time. `tokens` a step; `stages` maps a name to its
    schedule span.

    Stages A and B make up one schedule. C continues a finished model, usually on changed data: the optimizer
    starts anew from its weights, and the rates from where B began.
    """

    name: str
    shape: Shape
    rates: Rates = field(default_factory=Rates)
    curve: Curve = field(default_factory=Curve)
    tokens: int = 92_160
    free_form: float = 0.05
    stages: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"A": (0.0, 0.55), "B": (0.55, 1.0), "C": (0.55, 1.0)}
    )
    reserve: float = 50.0
    eval_samples: int = 1000
    log_every: int = 50
    seed: int = 1

    @property
    def capacity(self) -> int:
        """Scored tokens a step. Half of the maskable ones are hidden on average, so 60 % of all is never
        exceeded.
        """
        return self.tokens if self.shape.causal else int(self.tokens * 0.6)


SMOKE = Recipe(
    "smoke",
    Shape("llada", d_model=64, layers=2, heads=2, kv_heads=2, ffn=128, max_length=1024),
    rates=Rates(muon=0.02, adam=1e-2),
    tokens=1536,
    log_every=10,
    reserve=8.0,
    eval_samples=22,
)
"""Small enough for a CPU; its twins in the other layouts below."""

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny-llada", Shape("llada", d_model=384, layers=8, heads=6, kv_heads=6, ffn=1024)),
        Recipe("tiny-dream", Shape("dream", d_model=256, layers=7, heads=4, kv_heads=2, ffn=576, eps=1e-6)),
        Recipe(
            "tiny-guide",
            Shape("qwen2", d_model=192, layers=5, heads=6, kv_heads=2, ffn=512, eps=1e-6),
            stages={"A": (0.0, 1.0)},
            free_form=0.0,
        ),
        SMOKE,
        replace(
            SMOKE,
            name="smoke-dream",
            shape=Shape("dream", d_model=64, layers=2, heads=4, kv_heads=2, ffn=128, eps=1e-6),
        ),
        replace(
            SMOKE,
            name="smoke-guide",
            shape=Shape("qwen2", d_model=64, layers=2, heads=4, kv_heads=2, ffn=128, eps=1e-6),
            stages={"A": (0.0, 1.0)},
            free_form=0.0,
        ),
    )
}
