"""Short dialogue: answers that must use what was said."""

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
