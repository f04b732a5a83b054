"""The simulation against a slow twin, against queueing theory, and its plans."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dllm.scale.curve import Curve, Sizes, read_answers, read_curve
from flash_dllm.scale.extras import ScaleError
from flash_dllm.scale.plan import Goal, Price, Workload, plan_row, replicas_for
from flash_dllm.scale.simulate import ROUTINGS, Fleet, Outcome, Trace, simulate
from tests.commands import Run

TICK = 0.01
"""Seconds of a step in the degenerate cases: short beside a service, so that steps look like flowing time."""


def flat(slots: int, seconds: float = TICK) -> Curve:
    """A step takes the same time however many slots are busy: slots are servers."""
    return Curve((1, slots) if slots > 1 else (1,), (seconds,) * min(slots, 2), slots)


def exponential(mean_steps: int) -> Sizes:
    """Steps whose time is exponential: quantiles of the distribution, as many as the table needs."""
    share = (np.arange(200_000) + 0.5) / 200_000
    steps = np.maximum(1, np.rint(-mean_steps * np.log1p(-share))).astype(np.int64)
    return Sizes(steps, steps)


def constant(steps: int) -> Sizes:
    return Sizes(np.array([steps]), np.array([steps]))


def mean_and_error(values: np.ndarray, batches: int = 25) -> tuple[float, float]:
    """The mean without the first tenth, and its standard error by batch means, since neighbours are alike."""
    kept = values[len(values) // 10 :]
    means = np.array([part.mean() for part in np.array_split(kept, batches)])
    return float(kept.mean()), float(means.std(ddof=1) / math.sqrt(batches))


def erlang_c(servers: int, offered: float) -> float:
    """The chance that an arrival of M/M/c waits (Erlang, 1917); ``offered`` is arrival rate times service time."""
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return servers * blocked / (servers - offered * (1 - blocked))


def slow_twin(curve: Curve, trace: Trace, max_queue: int | None) -> tuple[list[float], list[float]]:
    """One replica, one step after the other."""
    count = len(trace.arrivals)
    seated, ended = [math.nan] * count, [math.nan] * count
    queue: deque[int] = deque()
    live: dict[int, int] = {}
    now, at = 0.0, 0

    def arrive(until: float) -> None:
        nonlocal at
        while at < count and trace.arrivals[at] <= until:
            # What the queue holds beyond the free slots is what waits.
            if max_queue is None or len(queue) < max_queue + curve.slots - len(live):
                queue.append(at)
            at += 1

    while at < count or queue or live:
        if not live and not queue:
            now = max(now, float(trace.arrivals[at]))
            arrive(now)
        new = 0
        while queue and len(live) < curve.slots:
            request = queue.popleft()
            seated[request], live[request], new = now, int(trace.sizes.steps[request]), new + 1
        if not live:
            continue
        end = now + curve.step(len(live)) + new * curve.seat_seconds
        # Those that arrive at the boundary itself are seated there: strictly earlier ones find the slots of before.
        arrive(np.nextafter(end, 0))
        now = end
        for request in list(live):
            live[request] -= 1
            if not live[request]:
                del live[request]
                ended[request] = now
        arrive(now)
    return seated, ended


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 6)), min_size=1, max_size=25),
    st.integers(1, 4),
    st.floats(0, 0.5),
    st.none() | st.integers(0, 3),
)
def test_jumping_over_steps_changes_nothing(
    raw: list[tuple[float, int]], slots: int, seat: float, max_queue: int | None
) -> None:
    arrivals = np.cumsum([gap + 1e-3 for gap, _ in raw])
    steps = np.array([steps for _, steps in raw])
    curve = Curve((1, 2, 4), (0.3, 0.37, 0.61), slots, seat)
    trace = Trace(arrivals, Sizes(steps, steps))
    outcome = simulate(Fleet(1, curve, max_queue=max_queue), trace)
    seated, ended = (np.array(times) for times in slow_twin(curve, trace, max_queue))
    answered = ~np.isnan(ended)
    assert outcome.refused == (~answered).sum()
    np.testing.assert_allclose(outcome.queued, (seated - arrivals)[answered], atol=1e-6)
    np.testing.assert_allclose(outcome.latency, (ended - arrivals)[answered], atol=1e-6)
    # Little's law holds exactly: slot-seconds are the seats' lengths added up.
    held = float((ended - seated)[answered].sum())
    assert outcome.busy * slots * outcome.span == pytest.approx(held, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.5), (1, 0.8), (4, 0.7), (16, 0.9)])
def test_m_m_c(slots: int, load: float) -> None:
    """Slots as servers: the mean wait is Erlang's, up to the steps' grain and four standard errors."""
    service = 100 * TICK
    rate = load * slots / service
    trace = Trace.poisson(rate, 120_000, exponential(100), seed=slots)
    outcome = simulate(Fleet(1, flat(slots)), trace)
    mean, error = mean_and_error(outcome.queued)
    wanted = erlang_c(slots, rate * service) * service / (slots - rate * service)
    assert abs(mean - wanted) < 4 * error + TICK, (mean, wanted, error)
    assert error < 0.1 * wanted + TICK
    waits = float((outcome.queued > 2 * TICK).mean())
    assert waits == pytest.approx(erlang_c(slots, rate * service), abs=0.03)
    assert outcome.busy == pytest.approx(load, abs=0.02)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_d_1(load: float) -> None:
    """Services of one length wait half as long as exponential ones (Pollaczek and Khinchine)."""
    service = 50 * TICK
    trace = Trace.poisson(load / service, 100_000, constant(50), seed=2)
    mean, error = mean_and_error(simulate(Fleet(1, flat(1)), trace).queued)
    wanted = load * service / (2 * (1 - load))
    assert abs(mean - wanted) < 4 * error + TICK, (mean, wanted, error)


@pytest.mark.parametrize("sizes", [constant(50), exponential(50)], ids=["constant", "exponential"])
def test_processor_sharing(sizes: Sizes) -> None:
    """A step that takes as long as it has slots shares one processor: the mean latency is s / (1 - load), whatever
    the distribution."""
    load, slots, service = 0.6, 200, 50 * TICK
    curve = Curve((1, slots), (TICK, slots * TICK), slots)
    trace = Trace.poisson(load / service, 100_000, sizes, seed=3)
    mean, error = mean_and_error(simulate(Fleet(1, curve), trace).latency)
    wanted = service / (1 - load)
    assert abs(mean - wanted) < 4 * error + 4 * TICK, (mean, wanted, error)


def test_random_routing_makes_queues_of_their_own() -> None:
    """A Poisson stream that is split at random is Poisson: every replica is M/M/1."""
    service, load, replicas = 100 * TICK, 0.7, 8
    trace = Trace.poisson(load * replicas / service, 200_000, exponential(100), seed=4)
    mean, error = mean_and_error(simulate(Fleet(replicas, flat(1), "random"), trace).queued)
    wanted = load * service / (1 - load)
    assert abs(mean - wanted) < 4 * error + TICK, (mean, wanted, error)


def test_better_routing_waits_less() -> None:
    trace = Trace.poisson(0.85 * 10 * 4 / 0.5, 60_000, exponential(50), seed=5)
    waits = {r: simulate(Fleet(10, flat(4), r), trace).row()["queued_s"]["mean"] for r in ROUTINGS}
    assert waits["least"] < waits["two-choices"] < waits["round-robin"] < waits["random"]


def test_every_routing_keeps_every_request() -> None:
    trace = Trace.poisson(50.0, 2000, exponential(20), seed=6)
    for routing in ROUTINGS:
        for queue in (None, 0, 3):
            outcome = simulate(Fleet(3, flat(2), routing, queue), trace)
            assert len(outcome.latency) + outcome.refused == 2000
            assert (outcome.refused > 0) == (queue is not None)
            assert (outcome.queued >= -1e-9).all() and (outcome.latency > outcome.queued).all()
            again = simulate(Fleet(3, flat(2), routing, queue), trace)
            assert (again.latency == outcome.latency).all()


def test_a_fleet_of_thousands() -> None:
    """Least outstanding requests in a large fleet: nobody waits below full load."""
    curve = Curve((1, 8), (0.05, 0.08), 8)
    sizes = Sizes.assumed(tokens=200, tpf=4)
    rate = 0.7 * 2000 * curve.capacity(float(sizes.steps.mean()))
    outcome = simulate(Fleet(2000, curve), Trace.poisson(rate, 60_000, sizes, 1))
    assert outcome.row()["queued_s"]["p99"] < 0.1
    assert outcome.row()["answered"] == 60_000


def test_a_fleet_that_fills_up_is_left_out() -> None:
    """A short load on a large fleet: what came while it was empty is no sign of how it does."""
    curve = Curve((1, 8), (0.05, 0.10), 8)
    rate = 0.9 * 200 * curve.capacity(50)
    short = simulate(Fleet(200, curve), Trace.poisson(rate, 5000, constant(50), 1))
    long = simulate(Fleet(200, curve), Trace.poisson(rate, 60_000, constant(50), 1))
    assert short.warm_up > 0.4 and long.warm_up == 0.1
    assert short.row()["latency_s"]["p50"] == pytest.approx(long.row()["latency_s"]["p50"], rel=0.05)


def test_the_curve() -> None:
    curve = Curve((1, 4, 8), (0.1, 0.4, 0.4), 8, seat_seconds=0.05)
    assert [curve.step(b) for b in (1, 2, 4, 6, 8)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4])
    assert curve.capacity(10) == pytest.approx(1 / (10 * 0.4 / 8 + 0.05))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Curve((2, 4), (1.0, 1.0), 4), "must start at 1"),
        (lambda: Curve((1, 4), (1.0,), 4), "one time each"),
        (lambda: Curve((1, 4), (1.0, 2.0), 5), "slots=5: the curve was measured from 1 to 4"),
        (lambda: Curve((1,), (0.0,), 1), "must be positive"),
        (lambda: Curve((1,), (1.0,), 1, -1.0), "must not be negative"),
        (lambda: Sizes.of([]), "no answer"),
        (lambda: Sizes.of([(0, 1)]), "at least one step"),
        (lambda: Sizes.assumed(0.5, 2), "tokens=0.5"),
        (lambda: Fleet(0, flat(1)), "replicas=0"),
        (lambda: Fleet(1, flat(1), "fair"), "routing='fair'"),
        (lambda: Trace.poisson(0, 5, constant(1), 0), "rate=0"),
        (lambda: Workload(flat(1), constant(1), max_load=1.0), "max_load=1.0"),
        (lambda: Goal.parse("fast"), "write p99=5"),
        (lambda: Goal.parse("p99=0"), "write p99=5"),
    ],
)
def test_wrong_values(make: Any, said: str) -> None:
    with pytest.raises(ScaleError, match=said):
        make()


@given(st.floats(1, 2000), st.floats(0.5, 20), st.floats(0, 2))
def test_assumed_sizes_have_their_mean(tokens: float, tpf: float, spread: float) -> None:
    sizes = Sizes.assumed(tokens, tpf, spread)
    if tokens > 20:
        assert sizes.tokens.mean() == pytest.approx(tokens, rel=0.05)
        assert sizes.tokens.std() == pytest.approx(spread * tokens, rel=0.3, abs=1)
    assert (sizes.steps >= sizes.tokens / tpf - 1e-9).all() and sizes.steps.min() >= 1


WORK = Workload(Curve((1, 8), (0.05, 0.10), 8), Sizes.assumed(tokens=100, tpf=4), count=6000)


def test_a_plan_is_the_fewest_replicas() -> None:
    goal = Goal.parse("p99=5")
    replicas, outcome = replicas_for(WORK, 40.0, goal)
    assert goal.reached(outcome) <= 5
    assert goal.reached(WORK.run(replicas - 1, 40.0)) > 5 or replicas == WORK.fewest(40.0)
    assert replicas >= WORK.fewest(40.0) == math.ceil(40 / 0.9 / WORK.curve.capacity(WORK.sizes.steps.mean()))
    strict, _ = replicas_for(WORK, 40.0, Goal.parse("p99=4"))
    more, _ = replicas_for(WORK, 80.0, goal)
    assert strict >= replicas and more > replicas


def test_a_goal_out_of_reach() -> None:
    with pytest.raises(ScaleError, match="out of reach"):
        replicas_for(WORK, 1.0, Goal.parse("p99=1"))
    with pytest.raises(ScaleError, match="more than 3 replicas"):
        replicas_for(WORK, 1000.0, Goal.parse("p99=5"), most=3)


def test_refused_requests_miss_every_goal() -> None:
    none = np.array([1.0])
    assert Goal(99, 5).reached(Outcome(none, none, np.array([1]), refused=1, span=1, busy=1)) == math.inf


def test_cost() -> None:
    row = plan_row(WORK, 40.0, Goal.parse("p99=5"), Price(gpus=2, hour=3.0))
    assert row["gpus"] == 2 * row["replicas"] and row["cost_an_hour"] == 6.0 * row["replicas"]
    a_million = row["cost_an_hour"] / (40 * WORK.sizes.tokens.mean() * 3600 / 1e6)
    assert row["cost_a_million_tokens"] == pytest.approx(a_million)
    assert plan_row(WORK, 40.0, Goal.parse("p99=5"), Price())["cost_an_hour"] is None


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def bench_report(*methods: str) -> dict[str, Any]:
    rows = [
        {"method": m, "batch": b, "prompt": 100, "ms": 1.0, "wall_ms": 20.0 + b, "first_pass_ms": 30.0 + b}
        for m in methods
        for b in (1, 4, 8)
    ]
    return {"kind": "step", "rows": [*rows, {"method": "broken", "batch": 1, "ms": None}]}


def test_a_curve_from_bench_step(tmp_path: Path) -> None:
    curve, sizes = read_curve(write(tmp_path / "c.json", bench_report("flash+verify")))
    assert (curve.busy, curve.seconds, curve.slots) == ((1, 4, 8), (0.021, 0.024, 0.028), 8)
    assert curve.seat_seconds == pytest.approx(0.01)
    assert sizes is None
    two = write(tmp_path / "two.json", bench_report("a", "b"))
    assert read_curve(two, "b", slots=4)[0].slots == 4
    with pytest.raises(ScaleError, match="the file has a, b"):
        read_curve(two)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ("{}", "no curve in it"),
        ('{"curve": 3}', "no curve in it"),
    ],
)
def test_files_that_are_no_curve(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ScaleError, match=said):
        read_curve(tmp_path / "c.json")


def test_sizes_from_a_batch(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "usage": {"steps": 5, "completion_tokens": 9}},
        {"usage": {"steps": 7, "completion_tokens": 1}},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = read_answers(path)
    assert sizes.steps.tolist() == [5, 7] and sizes.tokens.tolist() == [9, 1]
    path.write_text('{"id": "a"}\n')
    with pytest.raises(ScaleError, match=r"a\.jsonl:1: no answer with its usage"):
        read_answers(path)


def test_the_command(run: Run, tmp_path: Path) -> None:
    curve = write(tmp_path / "c.json", bench_report("flash"))
    words = ("plan", curve, "--tokens", 60, "--tpf", 3, "--goal", "p95=2", "--gpu-hour", 2, "--rate", "5,50")
    outcome = run(*words, "--json", tmp_path / "plan.json")
    assert outcome.code == 0 and "requests/s" in outcome.out and "cost/h" in outcome.out, outcome.err
    report = json.loads((tmp_path / "plan.json").read_text())
    assert [row["rate"] for row in report["rows"]] == [5, 50]
    assert report["rows"][0]["replicas"] < report["rows"][1]["replicas"]
    assert all(row["latency_s"]["p90"] <= 2 for row in report["rows"])
    for bad, said in [
        (("plan", curve), "how long are answers?"),
        (("plan", curve, "--tokens", 60), "--tokens and --tpf go together"),
        (("plan", curve, "--tokens", 60, "--tpf", 3, "--rate", "x"), "--rate x"),
        (("plan", curve, "--tokens", 60, "--tpf", 3, "--slots", 9), "slots=9"),
        (("plan", tmp_path / "none.json"), "No such file"),
    ]:
        outcome = run(*bad)
        assert outcome.code == 2 and said in outcome.err, outcome.err
