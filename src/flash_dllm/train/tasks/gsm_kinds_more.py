"""More kinds of word problems (see `gsm_kind`)."""

from __future__ import annotations

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.gsm_kind import Numbers, kind


@kind(
    train=(
        "A farm has {a} hens, {b} cows and {c} goats. How many legs do the animals have [in total|together]?",
        "{N} counts {a} hens, {b} cows and {c} goats on the farm. How many legs are there?",
        "On {N}'s farm there are {b} cows, {c} goats and {a} hens. Find the number of legs.",
    ),
    held=(
        "If a hen has 2 legs and cows and goats have 4, how many legs do {a} hens, {b} cows and {c} goats "
        "make?",
    ),
    lines=(
        "[the|all the|these] hens [have|make|give] {E} legs.",
        "[the cows and goats are|there are|that makes|we count] {E} animals with four legs.",
        "[these animals|they|those] [have|make|give] {E} legs.",
        "[there are|all of them have|the animals have|we get] {E} legs [in total|together|in all].",
    ),
    end="[the number of legs|the total|the answer] is {A}",
)
def legs(d: Draw) -> Numbers:
    a, b, c = d.between(2, 20), d.between(2, 12), d.between(2, 12)
    return {"a": a, "b": b, "c": c}, [(a, "*", 2), (b, "+", c), (b + c, "*", 4), (2 * a, "+", 4 * (b + c))]


@kind(
    train=(
        "A hall has {a} rows with {b} chairs in each row. {c} chairs are broken and {e} new chairs are "
        "bought. How many "
        "good chairs are there?",
        "There are {a} rows of {b} chairs. {N} removes {c} old chairs and brings {e} new ones. How many "
        "chairs are "
        "there now?",
        "{N} sets up {a} rows of {b} chairs. {c} chairs are taken away, then {e} chairs are added. How "
        "many chairs are "
        "in the hall?",
    ),
    held=(
        "Take {c} chairs out of a hall with {b} chairs in each of its {a} rows, then carry {e} chairs in. "
        "How "
        "many chairs does the hall hold?",
    ),
    lines=(
        "[there are|the hall has|we count|we have] {E} chairs[| at first| at the start| in the rows].",
        "[there are|the hall has|that leaves|we have] {E} chairs [left|after that|without those].",
        "[there are|the hall has|we count|we have] {E} chairs [now|in the end|with the new ones].",
    ),
    end="[there are|the hall has] {A} chairs[| now| in the end]",
)
def chairs(d: Draw) -> Numbers:
    a, b = d.between(3, 12), d.between(4, 15)
    c, e = d.between(2, min(a * b - 2, 30)), d.between(2, 30)
    return {"a": a, "b": b, "c": c, "e": e}, [(a, "*", b), (a * b, "-", c), (a * b - c, "+", e)]


@kind(
    train=(
        "A {o} costs {a} dollars. Today it is {r} off. {N} buys {c} of them. How much does {he} pay?",
        "{N} buys {c} pieces of a {o} that costs {a} dollars. The shop takes {r} off each one. What does "
        "{he} pay "
        "[in total|for all]?",
        "In a sale each {o} is {r} off. The old price is {a} dollars. How many dollars does {N} pay for "
        "{c} of them?",
    ),
    held=(
        "{N} needs {c} of the same {o}. Without the sale one is {a} dollars, but {r} is taken off today. "
        "Find "
        "the bill.",
    ),
    lines=(
        "[the shop takes|the sale takes|they take] {E} dollars off [each one|one {o}|the price].",
        "[each one|one {o}|the new price] [costs|is] {E} dollars[| today| now| in the sale].",
        "[{N}|{he}] [pays|spends|needs] {E} dollars [for {c} of them|in total|for all|in all].",
    ),
    end="[{N}|{he}] [pays|spends] {A} dollars",
)
def sale(d: Draw) -> Numbers:
    part, word = d.pick(
        ((2, "half"), (4, "one quarter"), (5, "one fifth"), (10, "one tenth"), (3, "one third"))
    )
    off, c = d.between(2, 12), d.between(2, 8)
    a = part * off
    return {"a": a, "c": c, "r": word, "o": d.pick(words.OBJECTS)}, [
        (a, "/", part),
        (a, "-", off),
        (a - off, "*", c),
    ]


@kind(
    train=(
        "A machine makes {a} {u} an hour. It runs {b} hours a day for {c} days. {e} of the {u} are bad. "
        "How many good "
        "{u} are there?",
        "Every hour a machine makes {a} {u}. {N} runs it {b} hours a day for {c} days and throws away {e} "
        "bad ones. How "
        "many {u} are left?",
        "{N}'s machine works {b} hours a day and makes {a} {u} each hour. After {c} days, {e} {u} turn out "
        "bad. How many "
        "are good?",
    ),
    held=(
        "In {c} days of {b} hours, how many good {u} come from a machine that makes {a} per hour, if {e} "
        "have "
        "to be thrown away?",
    ),
    lines=(
        "[the machine|it] [makes|gives|produces] {E} {u} [a day|each day|every day|in one day].",
        "[the machine|it] [makes|gives|produces] {E} {u} [in {c} days|in all days|in that time].",
        "[there are|that leaves|we keep|we have] {E} [good {u}|{u} left|good ones].",
    ),
    end="[there are|we have] {A} good {u}",
)
def machine(d: Draw) -> Numbers:
    a, b, c = d.between(3, 12), d.between(2, 9), d.between(2, 6)
    e = d.between(2, min(a * b * c - 2, 40))
    return {"a": a, "b": b, "c": c, "e": e}, [(a, "*", b), (a * b, "*", c), (a * b * c, "-", e)]


@kind(
    train=(
        "A tank holds {a} liters of water. It loses {b} liters an hour for {c} hours. Then {N} adds {e} "
        "liters. How much "
        "water is in the tank?",
        "There are {a} liters in a tank. For {c} hours {b} liters leak out each hour, then {N} pours in "
        "{e} liters. How "
        "many liters are there now?",
        "{N} has a tank with {a} liters. It leaks {b} liters each hour. After {c} hours {he} adds {e} "
        "liters. How many "
        "liters does it hold?",
    ),
    held=(
        "Water leaks from a tank at {b} liters per hour. It had {a} liters. When {c} hours are over, {N} "
        "adds "
        "{e} liters. What is the amount now?",
    ),
    lines=(
        "[the tank|it] [loses|leaks] {E} liters [in {c} hours|in that time|in all].",
        "[the tank|it] [has|holds|keeps] {E} liters [left|after that|after the leak].",
        "[the tank|it] [has|holds|contains] {E} liters [now|in the end|at last].",
    ),
    end="[the tank|it] [has|holds] {A} liters",
)
def tank(d: Draw) -> Numbers:
    b, c = d.between(2, 12), d.between(2, 9)
    a, e = b * c + d.between(5, 99), d.between(5, 60)
    return {"a": a, "b": b, "c": c, "e": e}, [(b, "*", c), (a, "-", b * c), (a - b * c, "+", e)]


@kind(
    train=(
        "{N} picks {b} {fruit} from each of {a} trees and {e} {fruit} from each of {c} more trees. {r} "
        "{fruit} are bad. "
        "{he_} puts the rest in bags of {f}. How many bags are there?",
        "There are {a} trees with {b} {fruit} each and {c} trees with {e} {fruit} each. {N} picks them "
        "all, throws away "
        "{r}, and fills bags with {f} {fruit} each. How many bags does {he} fill?",
        "{N} gets {b} {fruit} from each of {a} big trees and {e} from each of {c} small trees. {he_} eats "
        "{r} and packs "
        "the rest {f} to a bag. How many bags are needed?",
    ),
    held=(
        "Bags hold {f} {fruit}. {N} harvests {a} trees ({b} {fruit} each) and {c} trees ({e} {fruit} "
        "each), and "
        "{r} are lost. How many bags does {he} fill?",
    ),
    lines=(
        "[the first|the {a}] trees [give|have|bring] {E} {fruit}.",
        "[the other|the {c}] trees [give|have|bring] {E} {fruit}.",
        "[{N}|{he}] [picks|gets|has] {E} {fruit} [in total|altogether|in all].",
        "[{N}|{he}] [keeps|has] {E} [good {fruit}|{fruit} left|of them].",
        "[{N}|{he}] [fills|needs|packs] {E} bags[| with them| in the end].",
    ),
    end="[{N}|{he}] [fills|needs] {A} bags",
)
def harvest(d: Draw) -> Numbers:
    a, b, c, e, f = d.between(2, 6), d.between(4, 12), d.between(2, 6), d.between(3, 10), d.between(2, 8)
    total = a * b + c * e
    r = total % f or f
    return {"a": a, "b": b, "c": c, "e": e, "r": r, "f": f, "fruit": d.pick(words.FRUIT)}, [
        (a, "*", b),
        (c, "*", e),
        (a * b, "+", c * e),
        (total, "-", r),
        (total - r, "/", f),
    ]


@kind(
    train=(
        "{N} works {a} hours for {b} dollars an hour and {c} extra hours for {e} dollars an hour. {he_} "
        "pays {f} dollars "
        "for the bus. How much does {he} keep?",
        "A {job} gets {b} dollars an hour for {a} hours and {e} dollars an hour for {c} extra hours, and "
        "spends {f} "
        "dollars on food. How many dollars are left?",
        "{N} is a {job}. {he_} works {a} hours at {b} dollars and {c} more hours at {e} dollars, then "
        "spends {f} dollars. "
        "What does {he} have left?",
    ),
    held=(
        "For each of {a} normal hours {N} earns {b} dollars, for each of {c} late hours {e} dollars. A "
        "meal takes "
        "{f} dollars of it. What is left of the pay?",
    ),
    lines=(
        "[the normal hours|the {a} hours|the first hours] [pay|give|bring] {E} dollars.",
        "[the extra hours|the {c} hours|the other hours] [pay|give|bring] {E} dollars.",
        "[the pay|the money|all of it together] [is|comes to|makes] {E} dollars.",
        "[what is left|the rest|the money kept] [is|comes to] {E} dollars[| in the end].",
    ),
    end="[the rest|what is left|the answer] is {A} dollars",
)
def wages(d: Draw) -> Numbers:
    a, b, c, e = d.between(3, 9), d.between(5, 15), d.between(2, 5), d.between(8, 20)
    total = a * b + c * e
    f = d.between(3, min(40, total - 1))
    return {"a": a, "b": b, "c": c, "e": e, "f": f, "job": d.pick(words.JOBS)}, [
        (a, "*", b),
        (c, "*", e),
        (a * b, "+", c * e),
        (total, "-", f),
    ]


@kind(
    train=(
        "{N} has {a} {u}. {M} has {b} more than {N}. {P} has {c} times as many as {M}. How many {u} do "
        "they have "
        "[together|in total]?",
        "{M} has {b} more {u} than {N}, who has {a}. {P} has {c} times as many {u} as {M}. How many {u} "
        "are there in "
        "total?",
        "{N} owns {a} {u}, {M} owns {b} more than that, and {P} owns {c} times as many as {M}. Find the "
        "total.",
    ),
    held=(
        "Add {b} to {N}'s {a} {u} and you have what {M} owns; {c} times that is what {P} owns. How many "
        "{u} do "
        "the three own?",
    ),
    lines=(
        "{M} [has|owns|holds] {E} {u}.",
        "{P} [has|owns|holds] {E} [{u}|of them|pieces].",
        "[{N} and {M}|the first two|these two] [have|own] {E} {u} [together|in total|in all].",
        "[all three|the three of them|they] [have|own] {E} {u} [together|in total|in all].",
    ),
    end="[they|all three] [have|own] {A} {u}",
)
def more_than(d: Draw) -> Numbers:
    a, b, c = d.between(3, 25), d.between(2, 15), d.between(2, 5)
    m = a + b
    return {"a": a, "b": b, "c": c}, [(a, "+", b), (m, "*", c), (a, "+", m), (a + m, "+", m * c)]


@kind(
    train=(
        "A bus has {a} people. At the first stop {b} get on and {c} get off. At the next stop {e} get on "
        "and {f} get "
        "off. How many people are on the bus?",
        "{N} drives a bus with {a} people. {b} people get on and {c} get off, later {e} get on and {f} get "
        "off. How many "
        "people are left on the bus?",
        "There are {a} people on {N}'s bus. First {b} people enter and {c} leave. Then {e} enter and {f} "
        "leave. How many "
        "are on the bus now?",
    ),
    held=(
        "Starting with {a} people, a bus takes in {b} and lets out {c}, and at a later stop takes in {e} "
        "and lets "
        "out {f}. Count the people on board.",
    ),
    lines=(
        "[the bus has|there are|we count] {E} people [after {b} get on|when {b} enter|with the new ones].",
        "[the bus has|there are|that leaves] {E} people [after {c} get off|when {c} leave|without those].",
        "[the bus has|there are|we count] {E} people [after {e} get on|when {e} enter|at the next stop].",
        "[the bus has|there are|that leaves] {E} people [in the end|now|on the bus|left].",
    ),
    end="[the bus has|there are] {A} people[| now]",
)
def bus(d: Draw) -> Numbers:
    a, b = d.between(5, 40), d.between(2, 20)
    c = d.between(2, a + b - 2)
    e = d.between(3, 20)
    f = d.between(1, a + b - c + e - 1)
    return {"a": a, "b": b, "c": c, "e": e, "f": f}, [
        (a, "+", b),
        (a + b, "-", c),
        (a + b - c, "+", e),
        (a + b - c + e, "-", f),
    ]
