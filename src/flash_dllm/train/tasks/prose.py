"""Free longer text from grammars: stories and letters. Checked by structure only (names, things, length,
ending).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flash_dllm.train.tasks import words
from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.sample import Parts

_OPEN = (
    "[Once upon a time|Long ago|One day|One morning|Last winter] [there was|there lived] a "
    "[small|young|brave|clever|"
    "quiet|kind] {a} named {n} [near|close to|not far from] the {p}.",
    "{n} was a [small|young|brave|clever|lazy|kind] {a} who [lived|slept|played] [near|close to|behind] "
    "the {p}.",
    "In [a warm|a cold|a quiet|an old] house [near|behind|next to] the {p} lived a "
    "[young|brave|clever|gentle] {a} "
    "called {n}.",
)
_FIND = (
    "[One day|On a sunny day|In the morning|After the rain] {n} [found|saw|noticed] a "
    "[shiny|strange|tiny|broken|"
    "beautiful] {o} [under a tree|on the road|in the grass|by the water].",
    "[There|Here|Not far away], [under a stone|behind a wall|in the snow|on a bridge], lay a "
    "[shiny|strange|golden|heavy] "
    "{o}.",
)
_MIDDLE = (
    "[At first|Soon|Then] {n} [felt|was] [happy|scared|curious|surprised] and [looked around|sat "
    "down|waited|ran home].",
    '"[What is this|Whose is this|How nice|How strange]," [said|thought|whispered|cried] {n}.',
    "[A friend|A neighbor|An old man|A bird] [came by|stopped|called out] and [smiled|laughed|asked a "
    "question|sang].",
    "The [wind|rain|sun|moon] [was strong|was gentle|grew bright|was hidden] and the "
    "[birds|trees|clouds|stars] [moved "
    "slowly|were silent|seemed near].",
    "{n} [showed|gave|brought] the {o} to [everyone|a friend|the others|the baker] and [told|explained] "
    "the story.",
    "[All day|For hours|Until night|The whole time] {n} [worked|played|walked|searched] [with joy|without "
    "rest|with care|in "
    "the cold].",
    "[Suddenly|Later|Just then] [a storm|a big dog|a loud noise|a stranger] [came closer|appeared|made {n} "
    "jump].",
    "[But|And yet|Even so,] {n} [stayed calm|did not give up|was not afraid|had a plan|kept the {o} safe].",
)
_END = (
    "[In the end|At last|That night|From that day on] {n} [slept well|was very happy|had a new "
    "friend|never forgot the "
    "{o}].",
    "[So|And so] {n} and the {o} [came home|stayed together|became famous] [before dark|for many "
    "years|with a smile].",
)
_ASK_STORY = (
    (
        "Write a story [with|of] {c} sentences about a {a} named {n}, the {p} and a {o}.",
        "Tell me a story in {c} sentences. It has a {a} called {n}, a {o} and the {p}.",
        "Please write {c} sentences about {n}, a {a} at the {p} who finds a {o}.",
    ),
    ("A {a} named {n} finds a {o} near the {p}: make that into a tale of {c} sentences.",),
)


def story(d: Draw) -> Parts:
    """A story with a given number of sentences, a hero, a place and a thing."""
    count = d.between(4, 8)
    slots = {
        "c": count,
        "a": d.pick(words.ANIMALS),
        "n": d.pick(words.NAMES),
        "p": d.pick(words.PLACES),
        "o": d.pick(words.OBJECTS),
    }
    question = d.fill(d.frame(*_ASK_STORY), slots)
    d.free += count - 3
    body = [d.say(_OPEN), d.say(_FIND), *d.some(_MIDDLE, count - 3), d.say(_END)]
    text = " ".join([d.tell(sentence, slots) for sentence in body])
    return Parts(question, text, {**slots, "kind": "story"}, "story")


def sentences(text: str) -> int:
    """Number of sentences, by full stops."""
    return len(re.findall(r"\.(?=\s|$)", text))


def check_story(data: Mapping[str, Any], text: str) -> bool:
    """The asked number of sentences, hero, place and thing named, and a full stop at the end."""
    named = all(re.search(rf"\b{data[key]}\b", text) for key in ("a", "n", "p", "o"))
    return named and sentences(text) == data["c"] and text.rstrip().endswith(".")


_TOPICS: dict[str, tuple[str, ...]] = {
    "a visit to the {p}": (
        "[Last week|On {day}|Yesterday|Two days ago] I [went to|visited|was at] the {p}[| with a friend| "
        "with my family].",
        "The {p} was [very full|quiet|beautiful|bigger than I thought] and the [weather|food|music|view] "
        "was [great|good|"
        "fine|wonderful].",
        "[Next time|In spring|Some day] [you should come too|we can go together|I will take you there|I "
        "want to stay "
        "longer].",
    ),
    "a new {o}": (
        "[I have|At last I have|Since {day} I have] a new {o}, and it is [{c} and very nice|{c} and quite "
        "big|small and "
        "{c}|light and {c}].",
        "I [bought it|found it|got it] [at the {p}|near the {p}|close to the {p}] [for little money|by "
        "chance|as a gift].",
        "[Would you like to|Do you want to|When will you] [see it|try it|come and look at it]?",
    ),
    "a new job as a {j}": (
        "[I have news:|Guess what:|You will not believe it:] I [work|have started|got a job] as a {j} "
        "[now|since {day}|this "
        "month].",
        "The work is [hard|easy|long|fun] but the [people|days|rooms|lunch breaks] are "
        "[kind|nice|good|great].",
        "[My boss|An old {j}|A friend] [helps me|shows me a lot|makes me laugh] [every day|when I am "
        "tired|all the time].",
    ),
}
_COMMON = (
    "[How are you|How is your family|What are you doing|Are you well]? [I hope you are fine|I think of you "
    "often|I have not "
    "heard from you|It has been so long].",
    "[The days here are|Life here is|This month was] [calm|busy|short|full of work], and I am "
    "[happy|tired|well|glad].",
    "[Please write|Write back|Call me|Tell me your news] [soon|when you can|this week|before {day}].",
    "[My|Our] [sister|brother|cat|neighbor] [says hello|misses you|asks about you].",
)
_ASK_LETTER = (
    (
        "Write a letter from {n} to {m} about {t}.",
        "{n} writes to {m} about {t}. Write the letter.",
        "Please write {n}'s letter to {m}. It is about {t}.",
    ),
    ("{m} gets mail from {n}, who tells about {t}. What does it say?",),
)


def letter(d: Draw) -> Parts:
    """A letter with greeting, a topic, small talk and a signature."""
    n, m = d.some(words.NAMES, 2)
    slots = {
        "n": n,
        "m": m,
        "p": d.pick(words.PLACES),
        "o": d.pick(words.OBJECTS),
        "c": d.pick(words.COLORS),
        "j": d.pick(words.JOBS),
        "day": d.pick(words.DAYS),
    }
    key = d.pick(tuple(_TOPICS))
    topic = key.format_map(slots)
    question = d.fill(d.frame(*_ASK_LETTER), {"n": n, "m": m, "t": topic})
    head, *rest = _TOPICS[key]
    d.free += 2
    body = [d.say(_COMMON[:2]), head, *d.some(rest, d.between(1, 2)), d.say(_COMMON[2:])]
    text = " ".join([d.tell(sentence, slots) for sentence in body])
    hello = d.tell("[Dear|Hello|Hi|My dear] {m},", slots)
    bye = d.tell("[Yours|Love|Best wishes|Your friend|See you soon],\n{n}", slots)
    detail = topic.rsplit(" ", 1)[1]
    return Parts(question, f"{hello}\n\n{text}\n\n{bye}", {"n": n, "m": m, "detail": detail}, "letter")


def check_letter(data: Mapping[str, Any], text: str) -> bool:
    """Three paragraphs: a greeting with the receiver, a body with the topic, a signature by the sender."""
    parts = text.strip().split("\n\n")
    if len(parts) != 3:
        return False
    hello, body, bye = parts
    return (
        hello.endswith(f"{data['m']},")
        and re.search(rf"\b{data['detail']}\b", body) is not None
        and sentences(body.replace("?", ".")) >= 3
        and bye.endswith(f",\n{data['n']}")
    )
