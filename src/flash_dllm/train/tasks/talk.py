"""Short dialogue (answers that must use what was said) and closed facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

_GREET = "[Hello|Hi|Hey|Good morning|Welcome]"


def greet(d: Draw) -> Parts:
    n = d.pick(words.NAMES)
    question = d.fill(
        d.frame(
            (
                "[Hi|Hello|Hey], my name is {n}[.|!]",
                "[Hi|Hello|Hey], I am {n}[.|!]",
                "My name is {n}. [Hello|Hi][.|!]",
            ),
            ("Let me introduce myself, I am called {n}.",),
        ),
        {"n": n},
    )
    text = d.tell(
        f"{_GREET}, {{n}}! [How can I help you|What can I do for you|It is nice to meet you|How are you]"
        "[| today| now]?",
        {"n": n},
    )
    return Parts(question, text, {"has": [n]}, "greet")


def who_has(d: Draw) -> Parts:
    people, things, colors = d.some(words.NAMES, 3), d.some(words.OBJECTS, 3), d.some(words.COLORS, 3)
    i = d.below(3)
    rows = [f"{p} has a {c} {o}." for p, c, o in zip(people, colors, things, strict=True)]
    slots = {"s": " ".join(rows), "p": people[i], "c": colors[i], "o": things[i]}
    if d.chance(0.5):
        question = d.fill(
            d.frame(
                ("{s} Who has the {o}?", "{s} Who has the {c} {o}?", "{s} Whose is the {o}?"),
                ("{s} Tell me the owner of the {o}.",),
            ),
            slots,
        )
        text = d.tell(
            "[It is|The answer is|That is|I think it is] {p}[, who has a {c} {o}|, with a {c} {o}].", slots
        )
        return Parts(
            question, text, {"has": [people[i]], "not": [p for p in people if p != people[i]]}, "who"
        )
    question = d.fill(
        d.frame(
            ("{s} What does {p} have?", "{s} Which thing does {p} have?"),
            ("{s} Name the thing that belongs to {p}.",),
        ),
        slots,
    )
    text = d.tell("{p} [has|owns|holds] [a|one] {c} {o}.", slots)
    return Parts(question, text, {"has": [f"{colors[i]} {things[i]}"]}, "what")


def color_of(d: Draw) -> Parts:
    things, colors = d.some(words.OBJECTS, 3), d.some(words.COLORS, 3)
    i = d.below(3)
    slots = {
        "s": " ".join(f"The {o} is {c}." for o, c in zip(things, colors, strict=True)),
        "o": things[i],
        "c": colors[i],
    }
    question = d.fill(
        d.frame(
            ("{s} What color is the {o}?", "{s} Which color does the {o} have?"),
            ("{s} Tell me how the {o} is painted.",),
        ),
        slots,
    )
    text = d.tell("[The {o} is|Its color is|It is|The color is|That one is] {c}.", slots)
    return Parts(question, text, {"has": [colors[i]], "not": [c for c in colors if c != colors[i]]}, "color")


def plan(d: Draw) -> Parts:
    n, m = d.some(words.NAMES, 2)
    slots = {"n": n, "m": m, "day": d.pick(words.DAYS), "p": d.pick(words.PLACES), "t": d.between(1, 12)}
    question = d.fill(
        d.frame(
            (
                "{n} and {m} meet on {day} at {t} at the {p}. Write [a reminder|a short note] for {n}.",
                "Remind {n}: meeting with {m} at the {p} on {day} at {t}.",
                "Write a note to {n} about meeting {m} on {day} at {t}, at the {p}.",
            ),
            ("{m} waits for {n} at the {p}, {day}, {t} o'clock. Put this in a message to {n}.",),
        ),
        slots,
    )
    text = d.tell(
        "[Dear|Hello|Hi] {n}, [please remember|do not forget|just a note]: you [meet|see|will meet] {m} [on "
        "{day} at {t} at the {p}|at the {p} on {day} at {t}]. [See you soon|Have a nice day|Have fun|Be on "
        "time]!",
        slots,
    )
    return Parts(
        question, text, {"has": [n, m, str(slots["day"]), f"at {slots['t']}", str(slots["p"])]}, "plan"
    )


def invite(d: Draw) -> Parts:
    n, m = d.some(words.NAMES, 2)
    slots = {
        "n": n,
        "m": m,
        "day": d.pick(words.DAYS),
        "p": d.pick(words.PLACES),
        "e": d.pick(("party", "dinner", "picnic", "concert", "game", "dance")),
    }
    question = d.fill(
        d.frame(
            (
                "Write an invitation from {n} to {m} for a {e} on {day} at the {p}.",
                "{n} wants to invite {m} to a {e} at the {p} on {day}. Write the invitation.",
                "Invite {m} to {n}'s {e} on {day}. It is at the {p}.",
            ),
            ("A {e} is held at the {p} on {day}. {n} is the host, {m} the guest. Write what {n} sends.",),
        ),
        slots,
    )
    text = d.tell(
        "[Dear|Hello|Hi] {m}, [please come to|you are invited to|I invite you to|I would love to see you at] "
        "my {e} [on {day} at the {p}|at the {p} on {day}]. [It will be fun|We will have a good time|There "
        "will "
        "be cake|Bring a friend]. [Yours|Love|Best wishes], {n}",
        slots,
    )
    return Parts(
        question, text, {"has": [n, m, str(slots["day"]), str(slots["e"]), str(slots["p"])]}, "invite"
    )


def sorry(d: Draw) -> Parts:
    n, m = d.some(words.NAMES, 2)
    slots = {
        "n": n,
        "m": m,
        "o": d.pick(words.OBJECTS),
        "v": d.pick(("broke", "lost", "forgot", "dropped", "sold", "burned")),
    }
    question = d.fill(
        d.frame(
            (
                "{n} {v} {m}'s {o}. Write an apology.",
                "Write an apology from {n} to {m}: {n} {v} the {o}.",
                "Say sorry to {m} for {n}, who {v} the {o}.",
            ),
            ("The {o} of {m} is the problem: {n} {v} it. Help {n} to apologize.",),
        ),
        slots,
    )
    text = d.tell(
        "[Dear|Hello|Hi] {m}, [I am very sorry|I am so sorry|please forgive me|I want to say sorry] that I "
        "{v} "
        "your {o}. [I will buy a new one|I will make it good|I hope you are not angry|It was my mistake]. "
        "[Yours|Love|Your friend], {n}",
        slots,
    )
    return Parts(question, text, {"has": [n, m, f"{slots['v']} your {slots['o']}"]}, "sorry")


def replace(d: Draw) -> Parts:
    n, o, p, c = d.pick(words.NAMES), d.pick(words.OBJECTS), d.pick(words.PLACES), d.pick(words.COLORS)
    sentence = f"{n} takes the {c} {o} to the {p}."
    old, pool = d.pick(((n, words.NAMES), (o, words.OBJECTS), (p, words.PLACES), (c, words.COLORS)))
    new = d.pick([w for w in pool if w not in (n, o, p, c)])
    result = sentence.replace(f"{old} ", f"{new} ").replace(f"{old}.", f"{new}.")
    question = d.fill(
        d.frame(
            (
                "Replace {x} with {y}: {s}",
                "Change the word {x} to {y}. {s}",
                "In this sentence write {y} and not {x}: {s}",
            ),
            ("{s} Say this again, but {y} takes the place of {x}.",),
        ),
        {"x": old, "y": new, "s": sentence},
    )
    return Parts(question, result, {"exact": result}, "replace")


def feeling(d: Draw) -> Parts:
    n, j, f, p = d.pick(words.NAMES), d.pick(words.JOBS), d.pick(words.FEELINGS), d.pick(words.PLACES)
    slots = {"n": n, "j": j, "f": f, "p": p, "he": "she" if words.girl(n) else "he"}
    question = d.fill(
        d.frame(
            (
                "{n} is a {j} and feels {f} at the {p}. How does {n} feel?",
                "The {j} {n} is at the {p} and is {f}. How does the {j} feel?",
            ),
            ("At the {p} we met {n}, a {f} {j}. Describe the mood of {n}.",),
        ),
        slots,
    )
    text = d.tell("[{n}|The {j}] [feels|is] {f}[| at the {p}| today].", slots)
    return Parts(question, text, {"has": [f]}, "feeling")


_CHAT: tuple[Callable[[Draw], Parts], ...] = (
    greet,
    who_has,
    who_has,
    color_of,
    plan,
    invite,
    sorry,
    replace,
    feeling,
)


def chat(d: Draw) -> Parts:
    """One short request that must be answered with what it says."""
    return d.pick(_CHAT)(d)


def check_chat(data: Mapping[str, object], text: str) -> bool:
    """All of `has` occur as whole words, none of `not` does, and `exact` is the text where it is given."""
    if "exact" in data:
        return text.strip() == data["exact"]
    has, forbidden = data.get("has", ()), data.get("not", ())
    assert isinstance(has, (list, tuple)) and isinstance(forbidden, (list, tuple))
    return all(_word(w, text) for w in has) and not any(_word(w, text) for w in forbidden)


def _word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


_CAPITALS = dict(
    zip(
        [
            "France",
            "England",
            "Italy",
            "Germany",
            "Spain",
            "Norway",
            "Japan",
            "Egypt",
            "Peru",
            "Greece",
            "Austria",
            "Ireland",
            "Portugal",
            "India",
            "Russia",
            "China",
            "Cuba",
            "Kenya",
            "Poland",
            "Sweden",
            "Hungary",
            "Finland",
            "Canada",
            "Denmark",
        ],
        [
            "Paris",
            "London",
            "Rome",
            "Berlin",
            "Madrid",
            "Oslo",
            "Tokyo",
            "Cairo",
            "Lima",
            "Athens",
            "Vienna",
            "Dublin",
            "Lisbon",
            "Delhi",
            "Moscow",
            "Beijing",
            "Havana",
            "Nairobi",
            "Warsaw",
            "Stockholm",
            "Budapest",
            "Helsinki",
            "Ottawa",
            "Copenhagen",
        ],
        strict=True,
    )
)
_OPPOSITES = dict(
    zip(
        [
            "hot",
            "big",
            "fast",
            "old",
            "up",
            "light",
            "happy",
            "open",
            "full",
            "hard",
            "early",
            "wet",
            "rich",
            "loud",
            "strong",
            "long",
            "high",
            "near",
            "clean",
            "left",
        ],
        [
            "cold",
            "small",
            "slow",
            "young",
            "down",
            "dark",
            "sad",
            "closed",
            "empty",
            "soft",
            "late",
            "dry",
            "poor",
            "quiet",
            "weak",
            "short",
            "low",
            "far",
            "dirty",
            "right",
        ],
        strict=True,
    )
)
_YOUNG = dict(
    zip(
        ["dog", "cat", "cow", "hen", "horse", "sheep", "goat", "bear", "duck", "frog"],
        ["puppy", "kitten", "calf", "chick", "foal", "lamb", "kid", "cub", "duckling", "tadpole"],
        strict=True,
    )
)
_COUNTS = {
    "days in a week": "7",
    "months in a year": "12",
    "minutes in an hour": "60",
    "seconds in a minute": "60",
    "hours in a day": "24",
    "legs of a spider": "8",
    "legs of an insect": "6",
    "sides of a square": "4",
    "sides of a triangle": "3",
    "cents in a dollar": "100",
    "letters in the alphabet": "26",
}
_RELATIONS: tuple[tuple[str, Mapping[str, str], tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        "capital",
        _CAPITALS,
        (
            "What is the capital of {x}?",
            "Name the capital of {x}.",
            "Which city is the capital of {x}?",
            "Tell me the capital of {x}.",
            "Do you know the capital of {x}?",
            "The capital of {x} is which city?",
        ),
        ("Which city governs {x}?",),
        "[The capital of {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "opposite",
        _OPPOSITES,
        (
            "What is the opposite of {x}?",
            "Give the opposite of {x}.",
            "Name the opposite of the word {x}.",
            "Which word is the opposite of {x}?",
            "Tell me the opposite of {x}.",
        ),
        ("Which word means the contrary of {x}?",),
        "[The opposite of {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "young",
        _YOUNG,
        (
            "What is a young {x} called?",
            "How do we call a young {x}?",
            "Name the young of a {x}.",
            "What do you call a baby {x}?",
        ),
        ("Which word stands for the child of a {x}?",),
        "[A young {x} is called a|It is a|We call it a|We say] {y}.",
    ),
    (
        "count",
        _COUNTS,
        (
            "What is the number of {x}?",
            "Tell me the number of {x}.",
            "Give the number of {x}.",
            "Do you know the number of {x}?",
        ),
        ("Please count the {x}.",),
        "[The number is|It is|There are|The answer is] {y}.",
    ),
    (
        "day",
        dict(zip(words.DAYS, words.DAYS[1:] + words.DAYS[:1], strict=True)),
        (
            "Which day comes after {x}?",
            "What day is after {x}?",
            "Name the day after {x}.",
            "What follows {x}?",
        ),
        ("If today is {x}, what is tomorrow?",),
        "[The day after {x} is|It is|That is|The answer is] {y}.",
    ),
    (
        "month",
        dict(zip(words.MONTHS, words.MONTHS[1:] + words.MONTHS[:1], strict=True)),
        (
            "Which month comes after {x}?",
            "What month is after {x}?",
            "Name the month after {x}.",
            "What follows {x}?",
        ),
        ("When {x} is over, which month begins?",),
        "[The month after {x} is|It is|That is|The answer is] {y}.",
    ),
)


def fact(d: Draw) -> Parts:
    """A closed list of facts. Test questions are pairs of fact and wording that training never shows."""
    name, table, train, held, say = d.pick(_RELATIONS)
    x = d.pick(tuple(table))
    question = d.fill(d.frame(train, held), {"x": x})
    if d.chance(0.3):
        question = d.pick(("Please answer: ", "A question: ", "Quick question. ")) + question
    return Parts(question, d.tell(say, {"x": x, "y": table[x]}), {"has": [table[x]]}, f"fact-{name}")
