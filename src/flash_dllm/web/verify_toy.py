"""The verify toy: the engine's own commit rule, search order, acceptance rules and bounds on a made-up window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_dllm.core.method import Search, Second
from flash_dllm.core.noise import CounterNoise
from flash_dllm.core.state import Canvas, State
from flash_dllm.core.step import confidence_bound
from flash_dllm.core.types import Candidates, Draft
from flash_dllm.methods.fast_dllm import Threshold
from flash_dllm.methods.verify import accept_prefix, most_confident

SEARCH = 8


@dataclass(frozen=True)
class Place:
    """A position of the window.

    Attributes:
        token: the draft's text.
        draft: confidence of the draft, its probability in the first pass.
        view: probability of the draft in its mask view.
        agrees: the mask view's argmax is the draft. A probability above one half implies it.
    """

    token: str
    draft: float
    view: float
    agrees: bool = True


EXAMPLE = (
    Place("Half", 0.97, 0.98),
    Place("of", 0.99, 0.99),
    Place("48", 0.95, 0.97),
    Place("is", 0.98, 0.99),
    Place("24", 0.86, 0.98),
    Place("rolls", 0.64, 0.72),
    Place(".", 0.93, 0.95),
    Place("In", 0.47, 0.66),
    Place("all", 0.55, 0.58),
    Place("she", 0.71, 0.92),
    Place("sold", 0.76, 0.94),
    Place("48", 0.69, 0.91),
    Place("+", 0.91, 0.96),
    Place("24", 0.82, 0.96),
    Place("=", 0.42, 0.88),
    Place("72", 0.36, 0.45, False),
)
"""The window of the page: 16 candidates of one step."""


@dataclass(frozen=True)
class Outcome:
    """What a step does with a window. Indices are those of the window.

    Attributes:
        confident: committed by confidence.
        search: drafts under test, in order.
        running: running product of the mask views' probabilities along ``search``.
        paper, product: how many of ``search`` each rule accepts.
        bounds: total variation bounds: of the tokens committed by confidence together (1: none), and of what
            each rule accepted; ``paper_worst`` and ``product_worst`` are what gamma alone promises.
    """

    confident: list[int]
    search: list[int]
    running: list[float]
    paper: int
    product: int
    bounds: dict[str, float]


def _accepted(state: State, search: Search, second: Second, rule: int) -> tuple[int, float]:
    state.num["rule"][0] = rule
    taken = accept_prefix(state, search, second)
    return int(taken.sum()), float(1 - torch.where(taken, second.prob_draft, 1.0).prod())


def outcome(window: tuple[Place, ...], epsilon: float, gamma: float) -> Outcome:
    """One step of threshold and verification over ``window``, by the engine's rules.

    The token committed because every step commits at least one counts as committed by confidence.
    """
    n = len(window)
    state = State(1, n)
    state.load(0, Canvas([0] * n, [True] * n, (), {"epsilon": epsilon, "gamma": gamma}))
    pos = torch.arange(n)[None]
    cand = Candidates(pos, torch.ones(1, n, dtype=torch.bool))
    prob = torch.tensor([[place.draft for place in window]])
    token = torch.arange(1, n + 1)[None]
    draft = Draft(token, prob, prob)
    take = Threshold().commit(state, cand, draft, CounterNoise())
    bound = float(confidence_bound(prob, take))
    state.commit(pos, token, prob, take)
    search = most_confident(state, cand, draft, take, SEARCH)
    live = search.valid[0]
    view = torch.tensor([[place.view for place in window]]).gather(1, search.pos)
    agrees = torch.tensor([[place.agrees or place.view > 0.5 for place in window]]).gather(1, search.pos)
    second = Second(torch.where(agrees, search.token, 0), view, view)
    paper, paper_bound = _accepted(state, search, second, 1)
    product, product_bound = _accepted(state, search, second, 0)
    return Outcome(
        take[0].nonzero().flatten().tolist(),
        search.pos[0][live].tolist(),
        [round(float(p), 4) for p in view.cumprod(1)[0][live]],
        paper,
        product,
        {
            "confident": bound,
            "paper": paper_bound,
            "product": product_bound,
            "paper_worst": 1 - gamma**paper,
            "product_worst": 1 - gamma if product else 0.0,
        },
    )
