"""Kinds of word problems (see `gsm_kind`)."""

from __future__ import annotations

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.gsm_kind import Numbers, kind


@kind(
    train=(
        "{N} sells {a} {u} in the morning and {b} times as many in the afternoon. Each one costs {c} "
        "dollars. How "
        "[much money|many dollars] does {N} get [in total|that day]?",
        "In the morning {N} sold {a} {u}. In the afternoon {he} sold {b} times as many. If one costs {c} "
        "dollars, how "
        "[many dollars|much] did {he} earn?",
        "At the market {N} sells {a} {u} before noon and {b} times that number after noon, for {c} dollars "
        "each. "
        "What does {he} earn [in all|that day]?",
    ),
    held=(
        "{c} dollars is the price of each of {N}'s {u}. {he_} sells {a} before lunch, and after lunch {b} "
        "times "
        "as many as before lunch. What is the total {he} takes in?",
    ),
    lines=(
        "[in the afternoon|after noon|later that day] [{N}|{he}] [sells|sold] {E} [{u}|of them|pieces].",
        "[{N}|{he}] [sells|sold] {E} [{u}|of them|pieces] [in total|that day|in all|altogether].",
        "[{N}|{he}] [earns|makes|gets|takes in] {E} dollars[| for them| in total| that day].",
    ),
    end="[{N}|{he}] [earns|makes|gets] {A} dollars",
)
def sell_twice(d: Draw) -> Numbers:
    a, b, c = d.between(3, 15), d.between(2, 4), d.between(2, 6)
    return {"a": a, "b": b, "c": c}, [(a, "*", b), (a, "+", a * b), (a + a * b, "*", c)]


@kind(
    train=(
        "{N} bakes {a} trays of {food} with {b} {food} on each tray. {he_} eats {c} and packs the rest in "
        "[bags|boxes] of {f}. How many [bags|boxes] does {he} [need|fill]?",
        "There are {a} trays with {b} {food} each. {N} gives {c} {food} to a friend and puts the rest in "
        "boxes of {f}. "
        "How many boxes are there?",
        "{N} makes {a} trays of {b} {food}. {c} of them burn. The others go into bags with {f} {food} "
        "each. How many "
        "bags [are needed|can {he} fill]?",
    ),
    held=(
        "A baker named {N} fills {a} trays, {b} {food} a tray. After {c} are thrown away, the rest are "
        "packed {f} "
        "to a box. Find the number of boxes.",
    ),
    lines=(
        "[{N}|{he}] [bakes|makes|has] {E} [{food}|of them|pieces][| at first| on the trays].",
        "[{N}|{he}] [has|keeps] {E} [{food}|of them|pieces] [left|to pack|for packing].",
        "[{N}|{he}] [needs|fills|packs|uses] {E} [of these|packs|in total|for the {food}].",
    ),
    end="[the number of packs|the answer|the count] is {A}",
)
def bake_pack(d: Draw) -> Numbers:
    a, b, f = d.between(2, 9), d.between(4, 12), d.between(2, 8)
    c = (a * b) % f or f
    return {"a": a, "b": b, "c": c, "f": f, "food": d.pick(words.FOOD)}, [
        (a, "*", b),
        (a * b, "-", c),
        (a * b - c, "/", f),
    ]


@kind(
    train=(
        "{N} buys {a} {g} for {b} dollars each and {c} {h} for {e} dollars each. {he_} pays with {p} "
        "dollars. How much "
        "change does {he} get?",
        "A shop sells {g} for {b} dollars and {h} for {e} dollars. {N} takes {a} {g} and {c} {h} and gives "
        "{p} dollars. "
        "How many dollars does {he} get back?",
        "{N} has {p} dollars. {he_} buys {a} {g} at {b} dollars each and {c} {h} at {e} dollars each. How "
        "many dollars "
        "are left?",
    ),
    held=(
        "With {p} dollars in {his} pocket, {N} pays for {a} {g} ({b} dollars each) and {c} {h} ({e} dollars "
        "each). What remains?",
    ),
    lines=(
        "[{N}|{he}] [pays|spends|gives] {E} dollars [for|on] [the|all the|{his}] {g}.",
        "[the {h} cost|{N} pays for the {h}|the price of the {h} is|{he} spends on the {h}] {E} dollars[| "
        "more].",
        "[{N}|{he}] [pays|spends] {E} dollars [in total|altogether|in all|for everything].",
        "[{N}|{he}] [gets back|has left|keeps|still has] {E} dollars[| in the end| of the money].",
    ),
    end="[{N}|{he}] [has|keeps] {A} dollars[| left]",
)
def two_goods(d: Draw) -> Numbers:
    g, h = d.some(words.GOODS, 2)
    a, b, c, e = d.between(2, 9), d.between(2, 9), d.between(2, 6), d.between(2, 12)
    spent = a * b + c * e
    p = spent + d.between(1, 40)
    return {"a": a, "b": b, "c": c, "e": e, "p": p, "g": g, "h": h}, [
        (a, "*", b),
        (c, "*", e),
        (a * b, "+", c * e),
        (p, "-", spent),
    ]


@kind(
    train=(
        "{N} saves {a} dollars [a|each|every] week for {b} weeks. {he_} already had {c} dollars. Then {he} "
        "spends {e} "
        "dollars on a {o}. How much money does {he} have [left|now]?",
        "{N} has {c} dollars. For {b} weeks {he} saves {a} dollars each week. Then {he} buys a {o} for {e} "
        "dollars. "
        "How many dollars are left?",
        "Each week {N} puts {a} dollars in a jar that already has {c} dollars. After {b} weeks {he} takes "
        "out {e} "
        "dollars for a {o}. How much is in the jar?",
    ),
    held=(
        "{N} wants a {o} for {e} dollars. {he_} starts with {c} dollars and adds {a} dollars weekly during "
        "{b} "
        "weeks. After buying it, how much money remains?",
    ),
    lines=(
        "[{N}|{he}] [saves|puts away|adds|collects] {E} dollars [in {b} weeks|over the weeks|in that time].",
        "[{N}|{he}] [has|owns|holds] {E} dollars [in total|altogether|before buying|in all].",
        "[{N}|{he}] [has|keeps|is left with|still has] {E} dollars[| after the {o}| after buying it].",
    ),
    end="[{N}|{he}] [has|keeps] {A} dollars[| left]",
)
def savings(d: Draw) -> Numbers:
    a, b, c = d.between(3, 15), d.between(3, 9), d.between(5, 60)
    e = d.between(5, a * b + c - 3)
    return {"a": a, "b": b, "c": c, "e": e, "o": d.pick(words.OBJECTS)}, [
        (a, "*", b),
        (c, "+", a * b),
        (a * b + c, "-", e),
    ]


@kind(
    train=(
        "{N} has {a} {pk} with {b} {u} in each. {he_} gives {c} {u} to {M} and shares the rest "
        "[equally|evenly] among "
        "{f} friends. How many {u} does each friend get?",
        "There are {b} {u} in each of {N}'s {a} {pk}. After giving {c} {u} to {M}, {he} splits the rest "
        "equally "
        "between {f} children. How many does each child get?",
        "{N} opens {a} {pk} of {b} {u} each. {c} {u} are for {M}. {f} friends share the other {u} equally. "
        "How many "
        "{u} are there for each friend?",
    ),
    held=(
        "{f} friends share what {N} has left after handing {c} {u} to {M}. If {N} began with {a} {pk} of "
        "{b} {u}, "
        "what does each of the friends receive?",
    ),
    lines=(
        "[{N}|{he}] [has|owns|starts with] {E} {u}[| in total| in the {pk}| in all].",
        "[{N}|{he}] [has|keeps] {E} {u} [left|after that|to share|after the gift].",
        "[each friend|every friend|each of them|each one] [gets|receives|takes] {E} {u}[| in the end].",
    ),
    end="[each friend|every friend|each of them] [gets|receives] {A} {u}",
)
def share_rest(d: Draw) -> Numbers:
    a, b, f = d.between(2, 9), d.between(4, 15), d.between(2, 9)
    c = (a * b) % f or f
    return {"a": a, "b": b, "c": c, "f": f, "pk": d.pick(words.PACKS)}, [
        (a, "*", b),
        (a * b, "-", c),
        (a * b - c, "/", f),
    ]


@kind(
    train=(
        "{N} has a book with {p} pages. {he_} reads {b} pages a day for {c} days. Then {he} reads {f} "
        "pages a day. How "
        "many more days does {he} need [to finish|for the rest]?",
        "A book has {p} pages. For {c} days {N} reads {b} pages every day. After that {he} reads {f} pages "
        "every day. "
        "In how many more days is the book finished?",
        "{N} reads a book of {p} pages. In the first {c} days {he} reads {b} pages each day, then {f} "
        "pages each day. "
        "How many days does the rest take?",
    ),
    held=(
        "During {c} days {N} read {b} pages daily of a {p} page book. From now on {he} manages {f} pages "
        "daily. "
        "How long until the book is done?",
    ),
    lines=(
        "[{N}|{he}] [reads|read|finishes] {E} pages [in {c} days|in the first days|at first|so far].",
        "[there are|the book has|{N} has|{he} has] {E} pages [left|to go|more to read].",
        "[{N}|{he}] [needs|reads for|takes] {E} [more days|days more|days].",
    ),
    end="[{N}|{he}] [needs|takes] {A} [more days|days]",
)
def reading(d: Draw) -> Numbers:
    b, c, f, q = d.between(4, 20), d.between(2, 9), d.between(4, 15), d.between(2, 12)
    p = b * c + f * q
    return {"p": p, "b": b, "c": c, "f": f}, [(b, "*", c), (p, "-", b * c), (f * q, "/", f)]


@kind(
    train=(
        "{N} is {a} years old. {M} is {b} times as old as {N}. {P} is {c} years younger than {M}. How old "
        "are they "
        "[together|in total]?",
        "{N} is {a}. {M} is {b} times as old, and {P} is {c} years younger than {M}. What is the sum of "
        "their ages?",
        "{M} is {b} times as old as {N}, who is {a} years old. {P} is {c} years younger than {M}. Find the "
        "sum of "
        "the three ages.",
    ),
    held=(
        "The age of {N} is {a}. Multiply it by {b} to get the age of {M}. {P} was born {c} years after "
        "{M}. Add "
        "the three ages.",
    ),
    lines=(
        "{M} is {E} [years old|years of age|years].",
        "{P} is {E} [years old|years of age|years].",
        "[{N} and {M}|the first two|these two] [are|have] {E} years [together|in total|in all].",
        "[all three|the three of them|they] [are|have] {E} years [together|in total|in all].",
    ),
    end="[the sum|the total|the answer] is {A}[| years]",
)
def ages(d: Draw) -> Numbers:
    a, b = d.between(4, 15), d.between(2, 4)
    m = a * b
    c = d.between(1, min(m - 1, 15))
    return {"a": a, "b": b, "c": c}, [(a, "*", b), (m, "-", c), (a, "+", m), (a + m, "+", m - c)]


@kind(
    train=(
        "{N}'s garden is {a} meters long and {b} meters wide. A fence costs {c} dollars a meter. How much "
        "does a fence "
        "around the garden cost?",
        "A field is {a} meters long and {b} meters wide. {N} puts a fence around it for {c} dollars per "
        "meter. What does "
        "{he} pay?",
        "{N} builds a fence around a yard of {a} by {b} meters. Each meter costs {c} dollars. How many "
        "dollars does "
        "{he} [need|pay]?",
    ),
    held=(
        "Fence is sold at {c} dollars for one meter. {N} must go all around a rectangle with sides {a} and "
        "{b} "
        "meters. What will it cost {him}?",
    ),
    lines=(
        "[one long and one short side|two of the sides|half of the way around] [are|make|give] {E} meters.",
        "[all sides|the whole way around|the four sides] [are|make|give] {E} meters[| in total| together].",
        "[{N}|{he}] [pays|needs|spends] {E} dollars [for the fence|in total|in all].",
    ),
    end="[the fence costs|{N} pays|{he} pays] {A} dollars",
)
def fence(d: Draw) -> Numbers:
    a, b, c = d.between(6, 30), d.between(3, 20), d.between(2, 6)
    return {"a": a, "b": b, "c": c}, [(a, "+", b), (a + b, "*", 2), (2 * (a + b), "*", c)]


@kind(
    train=(
        "{N} drives {a} hours at {b} kilometers per hour and then {c} hours at {e} kilometers per hour. "
        "How far does "
        "{he} drive [in total|in all]?",
        "For {a} hours {N} rides at {b} kilometers per hour. Then {he} rides {c} hours at {e} kilometers "
        "per hour. How "
        "many kilometers is the trip?",
        "A train with {N} goes {b} kilometers per hour for {a} hours, then {e} kilometers per hour for {c} "
        "hours. What "
        "is the total distance?",
    ),
    held=(
        "At {b} kilometers per hour {N} travels for {a} hours; the next {c} hours go at {e} kilometers per "
        "hour. "
        "Find the length of the trip.",
    ),
    lines=(
        "[{N}|{he}] [goes|travels|covers] {E} kilometers [in the first part|at first|in {a} hours].",
        "[{N}|{he}] [goes|travels|covers] {E} kilometers [in the second part|after that|in {c} hours].",
        "[{N}|{he}|the trip] [goes|travels|covers] {E} kilometers [in total|altogether|in all].",
    ),
    end="[the trip|the way|the distance] is {A} kilometers",
)
def travel(d: Draw) -> Numbers:
    a, c = d.between(2, 5), d.between(2, 6)
    b, e = 5 * d.between(4, 16), 5 * d.between(4, 16)
    return {"a": a, "b": b, "c": c, "e": e}, [(a, "*", b), (c, "*", e), (a * b, "+", c * e)]
