"""Further ways to ask each kind of word problem, by the kind's name (training side only)."""

from __future__ import annotations

MORE: dict[str, tuple[str, ...]] = {
    "sell_twice": (
        "{N}'s {u} cost {c} dollars each. [Before noon|In the morning] {he} sold {a}, [after noon|later] "
        "{b} times as "
        "many. [Find|What is] the money {he} made[.|?]",
        "{a} {u} were sold by {N} in the morning, and {b} times that many in the afternoon. The price of "
        "one is {c} "
        "dollars. What did {N} earn?",
    ),
    "bake_pack": (
        "After baking {a} trays with {b} {food} on each, {N} loses {c} of them. [A box|A bag] takes {f} "
        "{food}. How "
        "many does {N} need for the rest?",
        "{f} {food} fit into a bag. {N} has {a} trays of {b} {food}, but {c} are eaten. Find the number of "
        "bags.",
    ),
    "two_goods": (
        "{N} pays {p} dollars for {a} {g} and {c} {h}. The {g} are {b} dollars each, the {h} {e} dollars "
        "each. What "
        "change [does {he} get|is there]?",
        "One of the {g} costs {b} dollars, one of the {h} {e} dollars. If {N} takes {a} and {c} of them "
        "and has {p} "
        "dollars, how much [stays|is left]?",
    ),
    "savings": (
        "A {o} costs {e} dollars. {N} owns {c} dollars and saves {a} dollars [a|per] week for {b} weeks. "
        "What is left "
        "when {he} has bought it?",
        "For {b} weeks {N} adds {a} dollars [a week|weekly] to the {c} dollars {he} has. Then {e} dollars "
        "go for a "
        "{o}. How many dollars remain?",
    ),
    "share_rest": (
        "{c} of {N}'s {u} go to {M}; the others are split among {f} friends. {N} had {a} {pk} of {b} {u}. "
        "What does "
        "each friend [get|receive]?",
        "From {a} {pk} with {b} {u} each, {N} hands {c} {u} to {M}. {f} children get equal parts of the "
        "rest. How "
        "many {u} [is that each|does each one receive]?",
    ),
    "reading": (
        "{N} wants to read {p} pages. For {c} days {he} managed {b} pages [a day|daily]. With {f} pages [a "
        "day|daily] "
        "from now on, how many days remain?",
        "With {b} pages each day, {N} read for {c} days in a book of {p} pages. The rest goes at {f} pages "
        "a day. How "
        "long does it take?",
    ),
    "ages": (
        "{P} is {c} years younger than {M}, and {M} is {b} times as old as {N}. {N} is {a} years old. What "
        "do the "
        "three ages [add up to|make together]?",
        "Take {N}, who is {a} years old. {M} has {b} times that age, {P} is {c} years younger than {M}. "
        "Add all ages.",
    ),
    "fence": (
        "How much must {N} pay for a fence around {a} by {b} meters of land, if one meter is {c} dollars?",
        "One meter of fence costs {c} dollars. {N} needs it for all sides of a garden, {a} meters long and "
        "{b} meters "
        "wide. Find the cost.",
    ),
    "travel": (
        "{N} is on the road for {a} hours at {b} and for {c} hours at {e} kilometers per hour. How long is "
        "the way?",
        "First {N} goes {b} kilometers per hour for {a} hours, after that {e} kilometers per hour for {c} "
        "hours. Find "
        "the distance.",
    ),
    "legs": (
        "Count the legs of {a} hens, {b} cows and {c} goats.",
        "There are {c} goats, {b} cows and {a} hens in the yard. How many legs do they [have|make] in all?",
    ),
    "chairs": (
        "In a hall stand {a} rows of {b} chairs. {c} of the chairs go and {e} others come. How many are "
        "there then?",
        "{N} counts {a} rows, {b} chairs a row. Then {c} chairs leave the hall and {e} come in. Find the "
        "number of "
        "chairs.",
    ),
    "sale": (
        "{N} wants {c} of a {o}. One costs {a} dollars, but {r} of the price is taken off. What is the bill?",
        "Without the sale a {o} is {a} dollars, with it {r} less. How much are {c} of them for {N}?",
    ),
    "machine": (
        "For {c} days {N}'s machine runs {b} hours daily and makes {a} {u} per hour. {e} {u} are thrown "
        "away. How many "
        "stay?",
        "A machine can make {a} {u} in an hour. It works {c} days, {b} hours each, and {e} of the {u} are "
        "no good. "
        "Find the number of good ones.",
    ),
    "tank": (
        "{b} liters an hour leak from {N}'s tank of {a} liters. {c} hours later {e} liters are poured in. "
        "What does "
        "it hold now?",
        "At the start a tank has {a} liters. In each of {c} hours {b} liters are lost. Later {N} adds {e} "
        "liters. Find "
        "the liters in it.",
    ),
    "harvest": (
        "{a} trees give {N} {b} {fruit} each, {c} others give {e} each. Of all these {r} are lost. With "
        "{f} {fruit} in "
        "a bag, how many bags are filled?",
        "{N} fills bags with {f} {fruit}. {a} trees have {b} {fruit}, {c} trees have {e}, and {r} {fruit} "
        "are thrown "
        "away. Find the number of bags.",
    ),
    "wages": (
        "{N} earns {b} dollars in each of {a} hours and {e} dollars in each of {c} extra hours. Lunch "
        "costs {f} "
        "dollars. What is left?",
        "The {job} works {a} hours for {b} dollars each and {c} hours for {e} dollars each. {f} dollars go "
        "away for "
        "food. How much stays?",
    ),
    "more_than": (
        "{N} counts {a} {u}. {M} has {b} more, and {P} has {c} times what {M} has. How many {u} is that in "
        "total?",
        "How many {u} do {N}, {M} and {P} have, if {N} has {a}, {M} has {b} more than {N}, and {P} {c} "
        "times as many "
        "as {M}?",
    ),
    "bus": (
        "A bus with {a} people stops: {b} enter, {c} leave. It stops again: {e} enter, {f} leave. How many "
        "are inside?",
        "{a} people are on a bus. {b} more come and {c} go, then {e} come and {f} go. Find the number of "
        "people.",
    ),
    "pizza": (
        "Each of {a} people wants {b} slices. {N} orders pizzas of {c} slices at {e} dollars. How much is "
        "the bill?",
        "{N} orders pizza for {a} guests, {b} slices for each. One pizza is cut into {c} slices and costs "
        "{e} dollars. "
        "Find the price of all.",
    ),
    "stamps": (
        "{N}'s {a} albums hold {b} stamps each. {c} stamps come from {M}. Half of all the stamps are sold. "
        "What is "
        "left?",
        "With {a} albums of {b} stamps and {c} stamps from {M}, {N} decides to sell half of all. How many "
        "stay with "
        "{him}?",
    ),
    "recipe": (
        "{N} needs a meal for {p} people and has {c} eggs. {b} eggs are right for {a} people. How many "
        "eggs are "
        "missing?",
        "{b} eggs make a cake for {a} people. {N} bakes for {p} people and finds {c} eggs. How many must "
        "{he} get?",
    ),
    "rope": (
        "From {p} meters of rope {N} makes {b} equal pieces; {c} pieces are used. How many meters are not "
        "used?",
        "{N} has {p} meters of rope in {b} equal parts. {c} parts are needed for a {o}. Find the length of "
        "the rest.",
    ),
    "plant": (
        "{N} has a plant of {a} centimeters. In each of {c} weeks it gets {b} centimeters taller. Then {e} "
        "centimeters "
        "are cut off. What is its height?",
        "With {b} centimeters a week a plant of {a} centimeters grows for {c} weeks, and {N} takes off {e} "
        "centimeters. How tall is it then?",
    ),
    "laps": (
        "In {c} days {N} wants {p} meters. One lap has {b} meters and {he} does {a} laps daily. How much "
        "is missing?",
        "{N} goes {a} laps of {b} meters on each of {c} days, but wanted {p} meters. How many meters are "
        "missing?",
    ),
    "two_savers": (
        "{N} has {a} dollars a week to save, {M} has {b}. After {c} weeks {e} dollars are paid for a {o}. "
        "What do they "
        "still have?",
        "A {o} costs {e} dollars. {N} and {M} put {a} and {b} dollars a week together for {c} weeks. How "
        "much is left "
        "after buying?",
    ),
    "garage": (
        "{c} cars stand in a garage of {a} floors with {b} places each. When {e} are gone, how many places "
        "are free?",
        "With {a} floors and {b} places a floor, {N}'s garage has {c} cars. {e} cars go. Find the free "
        "places.",
    ),
    "plus_minus": (
        "{N} starts with {a} {u}, gets {b} and gives away {c}. How many stay?",
        "How many {u} has {N} left after {he} had {a}, bought {b} and lost {c}?",
    ),
    "classroom": (
        "{a} groups have {b} children, but {c} of them do not come. The rest make {e} {u} each. {f} {u} "
        "get lost and "
        "{g} are found. How many {u} are there now?",
        "A school has {a} groups with {b} children. {c} are away, all others give {e} {u}. Then {f} {u} "
        "are used and "
        "{g} come back. Find the number of {u}.",
    ),
    "sharing": (
        "{a} boxes hold {b} {u} each and {c} more lie beside them. {N} throws {e} away and divides the "
        "others "
        "between {f} children. Every child then gives {g} back. How many {u} do the children have?",
        "From {a} boxes of {b} {u} and {c} single {u}, {e} are sold. {f} children get equal parts of what "
        "is left, "
        "but each of them breaks {g}. Find the number of {u} that they still have together.",
    ),
}
