"""More kinds of word problems (see `gsm_kind`)."""

from __future__ import annotations

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.gsm_kind import Numbers, kind


@kind(
    train=(
        "{a} guests come to {N}'s party. Each guest eats {b} slices of pizza. A pizza has {c} slices and "
        "costs {e} "
        "dollars. How much do the pizzas cost?",
        "{N} has {a} guests and each one eats {b} slices. There are {c} slices in a pizza, and a pizza "
        "costs {e} dollars. "
        "How many dollars does {he} [need|pay]?",
        "At a party {a} people eat {b} slices of pizza each. {N} buys pizzas with {c} slices for {e} "
        "dollars each. What "
        "does {he} pay?",
    ),
    held=(
        "Pizzas of {c} slices are {e} dollars. {N} wants {b} slices for each of {a} people. How much money "
        "is "
        "that?",
    ),
    lines=(
        "[the guests|the people|they] [eat|need|take] {E} slices[| in total| in all| together].",
        "[{N}|{he}] [buys|needs|orders] {E} pizzas[| for them| for the party].",
        "[{N}|{he}] [pays|spends|needs] {E} dollars [for the pizzas|in total|for them].",
    ),
    end="[{N}|{he}] [pays|spends] {A} dollars",
)
def pizza(d: Draw) -> Numbers:
    b, c, e = d.between(2, 4), d.pick((4, 6, 8, 12)), d.between(5, 12)
    pizzas = d.between(2, 9)
    while pizzas * c % b:
        pizzas += 1
    return {"a": pizzas * c // b, "b": b, "c": c, "e": e}, [
        (pizzas * c // b, "*", b),
        (pizzas * c, "/", c),
        (pizzas, "*", e),
    ]


@kind(
    train=(
        "{N} has {a} albums with {b} stamps in each. {M} gives {him} {c} stamps. {he_} sells half of all "
        "{his} stamps. "
        "How many stamps does {he} have left?",
        "There are {b} stamps in each of {N}'s {a} albums. {he_} gets {c} more from {M} and then sells "
        "half of them all. "
        "How many stamps are left?",
        "{N} keeps {a} albums of {b} stamps and finds {c} more stamps. Then {he} gives half of all stamps "
        "to {M}. How "
        "many stamps does {he} keep?",
    ),
    held=(
        "After getting {c} stamps from {M}, {N}, who had {a} albums of {b} stamps, parts with half of "
        "everything. "
        "What number remains?",
    ),
    lines=(
        "[{N}|{he}] [has|owns|starts with] {E} stamps[| in the albums| at first| at the start].",
        "[{N}|{he}] [has|owns|holds] {E} stamps [in total|with the new ones|in all].",
        "[{N}|{he}] [has|keeps|is left with] {E} stamps[| in the end| after that| left].",
    ),
    end="[{N}|{he}] [has|keeps] {A} stamps",
)
def stamps(d: Draw) -> Numbers:
    a, b = d.between(2, 9), d.between(5, 20)
    c = 2 * d.between(2, 20) + (a * b) % 2
    return {"a": a, "b": b, "c": c}, [(a, "*", b), (a * b, "+", c), (a * b + c, "/", 2)]


@kind(
    train=(
        "A recipe for {a} people needs {b} eggs. {N} cooks for {p} people. {he_} has {c} eggs. How many "
        "eggs must {he} "
        "buy?",
        "{N} has {c} eggs and cooks for {p} people. The recipe for {a} people takes {b} eggs. How many "
        "more eggs does "
        "{he} need?",
        "For {a} people a recipe uses {b} eggs. How many eggs must {N} buy for {p} people if {he} already "
        "has {c}?",
    ),
    held=(
        "{p} people are coming. {N} finds {c} eggs at home, and {his} recipe asks for {b} eggs for every {a} "
        "people. How many are missing?",
    ),
    lines=(
        "[{N}|{he}] [makes|cooks|needs] {E} times the recipe.",
        "[{N}|{he}|that] [uses|needs|takes] {E} eggs[| in total| in all| for it].",
        "[{N}|{he}] [must buy|has to buy|still needs|lacks] {E} eggs[| more| at the shop].",
    ),
    end="[{N}|{he}] [buys|needs] {A} eggs",
)
def recipe(d: Draw) -> Numbers:
    a, b, k = d.between(2, 6), d.between(2, 9), d.between(2, 9)
    c = d.between(1, b * k - 1)
    return {"a": a, "b": b, "c": c, "p": a * k}, [(a * k, "/", a), (k, "*", b), (k * b, "-", c)]


@kind(
    train=(
        "{N} cuts a rope of {p} meters into {b} equal pieces. {he_} uses {c} pieces for a {o}. How many "
        "meters of rope "
        "are left?",
        "A rope is {p} meters long. {N} cuts it into {b} equal pieces and uses {c} of them. How long is "
        "the rest?",
        "{b} equal pieces are cut from a rope of {p} meters. {N} takes {c} pieces. How many meters remain?",
    ),
    held=(
        "{N} needs {c} of the {b} equal parts of a {p} meter rope. What length of rope does {he} not use?",
    ),
    lines=(
        "[each piece|every piece|one piece|a piece] [is|measures|has] {E} meters[| long].",
        "[{N}|{he}] [uses|takes|needs] {E} meters[| of rope| in total| of it].",
        "[the rest|what is left|the rope left] [is|measures|has] {E} meters[| long].",
    ),
    end="[the rest|what is left] is {A} meters[| long]",
)
def rope(d: Draw) -> Numbers:
    b, size = d.between(3, 12), d.between(2, 12)
    c = d.between(2, b - 1)
    return {"p": b * size, "b": b, "c": c, "o": d.pick(words.OBJECTS)}, [
        (b * size, "/", b),
        (size, "*", c),
        (b * size, "-", size * c),
    ]


@kind(
    train=(
        "A plant is {a} centimeters tall. It grows {b} centimeters a week for {c} weeks. Then {N} cuts off "
        "{e} "
        "centimeters. How tall is it?",
        "{N}'s plant is {a} centimeters tall and grows {b} centimeters each week. After {c} weeks {he} "
        "cuts {e} "
        "centimeters. How tall is the plant now?",
        "Each week a plant grows {b} centimeters. It was {a} centimeters tall. After {c} weeks {N} trims {e} "
        "centimeters. What is its height?",
    ),
    held=(
        "Starting at {a} centimeters, {N}'s plant gains {b} centimeters weekly. {c} weeks later {he} "
        "removes {e} "
        "centimeters. Find its height.",
    ),
    lines=(
        "[the plant|it] [grows|gains] {E} centimeters [in {c} weeks|in that time|in all].",
        "[the plant|it] [is|measures|reaches] {E} centimeters [before the cut|then|after {c} weeks].",
        "[the plant|it] [is|measures] {E} centimeters [now|tall|in the end|after the cut].",
    ),
    end="[the plant|it] [is|measures] {A} centimeters",
)
def plant(d: Draw) -> Numbers:
    a, b, c = d.between(5, 60), d.between(2, 12), d.between(2, 9)
    e = d.between(2, 20)
    e = min(e, a + b * c - 1)
    return {"a": a, "b": b, "c": c, "e": e}, [(b, "*", c), (a, "+", b * c), (a + b * c, "-", e)]


@kind(
    train=(
        "{N} runs {a} laps of {b} meters each day. {he_} wants to run {p} meters in {c} days. How many "
        "meters are "
        "missing?",
        "Every day {N} swims {a} laps of {b} meters. In {c} days {his} goal is {p} meters. How many meters "
        "more does "
        "{he} need?",
        "{N}'s goal is {p} meters in {c} days. Each day {he} runs {a} laps, and one lap is {b} meters. How "
        "many meters "
        "does {he} lack?",
    ),
    held=(
        "A lap is {b} meters. Running {a} laps daily for {c} days, by how many meters does {N} miss {his} "
        "goal of "
        "{p} meters?",
    ),
    lines=(
        "[{N}|{he}] [does|covers|makes] {E} meters [a day|each day|every day|daily].",
        "[{N}|{he}] [does|covers|makes] {E} meters [in {c} days|in all days|in total].",
        "[{N}|{he}] [lacks|misses|still needs] {E} meters[| more| for the goal].",
    ),
    end="[{N}|{he}] [lacks|misses] {A} meters",
)
def laps(d: Draw) -> Numbers:
    a, b, c = d.between(2, 9), d.pick((10, 20, 25, 30, 40, 50)), d.between(2, 5)
    p = a * b * c + 10 * d.between(1, 15)
    return {"a": a, "b": b, "c": c, "p": p}, [(a, "*", b), (a * b, "*", c), (p, "-", a * b * c)]


@kind(
    train=(
        "{N} saves {a} dollars a week and {M} saves {b} dollars a week. After {c} weeks they buy a {o} for "
        "{e} dollars. "
        "How much is left?",
        "Each week {N} puts aside {a} dollars and {M} {b} dollars. They save for {c} weeks and then pay "
        "{e} dollars for "
        "a {o}. How many dollars remain?",
        "Together {N} and {M} save for {c} weeks, {N} {a} dollars and {M} {b} dollars a week. They spend "
        "{e} dollars on "
        "a {o}. What is left?",
    ),
    held=(
        "For {c} weeks, {a} dollars from {N} and {b} dollars from {M} go into one box. A {o} takes {e} "
        "dollars out. "
        "How much stays in?",
    ),
    lines=(
        "[they|{N} and {M}|the two] [save|collect|put away] {E} dollars [a week|each week|every week].",
        "[they|{N} and {M}|the two] [save|collect|put away] {E} dollars [in {c} weeks|in that time|in "
        "total].",
        "[they|{N} and {M}|the two] [have|keep] {E} dollars [left|after buying it|in the end].",
    ),
    end="[they|{N} and {M}] [have|keep] {A} dollars",
)
def two_savers(d: Draw) -> Numbers:
    a, b, c = d.between(3, 15), d.between(3, 15), d.between(2, 8)
    e = d.between(4, (a + b) * c - 1)
    return {"a": a, "b": b, "c": c, "e": e, "o": d.pick(words.OBJECTS)}, [
        (a, "+", b),
        (a + b, "*", c),
        ((a + b) * c, "-", e),
    ]


@kind(
    train=(
        "A garage has {a} floors with {b} places each. {c} cars are inside and {e} of them leave. How many "
        "places are "
        "free?",
        "There are {a} floors in a garage and {b} places on each floor. {c} cars are parked, then {e} "
        "leave. How many "
        "free places are there?",
        "{N}'s garage has {a} floors of {b} places. Of {c} cars inside, {e} drive away. How many places "
        "are free now?",
    ),
    held=(
        "{e} of the {c} cars in {N}'s garage leave. With {b} places on each of {a} floors, how many places "
        "have no "
        "car?",
    ),
    lines=(
        "[the garage|it] [has|offers|holds] {E} places[| in total| in all| for cars].",
        "[there are|that leaves|the garage keeps] {E} cars [inside|in it|left].",
        "[there are|the garage has|we get] {E} [free places|places free|empty places].",
    ),
    end="[there are|the garage has] {A} free places",
)
def garage(d: Draw) -> Numbers:
    a, b = d.between(2, 6), d.between(8, 30)
    c = d.between(5, a * b - 1)
    e = d.between(2, c - 1)
    return {"a": a, "b": b, "c": c, "e": e}, [(a, "*", b), (c, "-", e), (a * b, "-", c - e)]


@kind(
    train=(
        "{N} has {a} {u} and finds {b} more. How many {u} does {he} have if {he} then loses {c}?",
        "{N} had {a} {u}. {M} gave {him} {b} more, and {he} lost {c}. How many {u} does {he} have now?",
        "First {N} has {a} {u}. Then {he} buys {b} {u} and gives {c} {u} to {M}. How many {u} are left?",
    ),
    held=(
        "{c} of {N}'s {u} are gone. Before that {he} had {a} and got {b} from {M}. How many are still there?",
    ),
    lines=(
        "[{N}|{he}] [has|owns|holds] {E} {u}[| with the new ones| then| in total].",
        "[{N}|{he}] [has|keeps|is left with] {E} {u}[| now| in the end| left].",
    ),
    end="[{N}|{he}] [has|keeps] {A} {u}",
)
def plus_minus(d: Draw) -> Numbers:
    a, b = d.between(5, 90), d.between(3, 60)
    c = d.between(2, a + b - 1)
    return {"a": a, "b": b, "c": c}, [(a, "+", b), (a + b, "-", c)]
