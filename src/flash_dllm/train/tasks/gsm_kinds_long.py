"""Kinds of word problems with many steps (see `gsm_kind`)."""

from __future__ import annotations

from flash_dllm.train.tasks.grammar import Draw
from flash_dllm.train.tasks.gsm_kind import Numbers, kind


@kind(
    train=(
        "A class has {a} groups of {b} children. {c} children are ill. The others each bring {e} {u}, and "
        "{f} {u} are "
        "given back. How many {u} are there? Then {g} more arrive. What is the final number of {u}?",
        "In {a} groups there are {b} children each, but {c} stay home. Each child who comes brings {e} "
        "{u}. {f} {u} are "
        "given back and {g} are added. How many {u} are there in the end?",
        "{N} teaches {a} groups of {b} children. {c} children are missing today. Each of the rest makes "
        "{e} {u}. {f} {u} "
        "break, then {g} new {u} are made. How many {u} are there?",
    ),
    held=(
        "Of {a} groups with {b} children, {c} children are away. Everyone else gives {e} {u}; {f} get lost "
        "and "
        "{g} turn up again. What number of {u} is that?",
    ),
    lines=(
        "[the class has|there are|we count] {E} children[| in all| in the groups].",
        "[the class has|there are|that leaves] {E} children [today|here|who come].",
        "[the children|they] [bring|make|give] {E} {u}[| in total| in all].",
        "[there are|that leaves|they have] {E} {u} [left|after that|without those].",
        "[there are|they have|we get] {E} {u} [in the end|now|at last].",
    ),
    end="[there are|they have] {A} {u}",
)
def classroom(d: Draw) -> Numbers:
    a, b, e = d.between(2, 5), d.between(3, 8), d.between(2, 5)
    c = d.between(1, a * b - 2)
    kids = a * b - c
    f, g = d.between(1, kids * e - 1), d.between(2, 20)
    return {"a": a, "b": b, "c": c, "e": e, "f": f, "g": g}, [
        (a, "*", b),
        (a * b, "-", c),
        (kids, "*", e),
        (kids * e, "-", f),
        (kids * e - f, "+", g),
    ]


@kind(
    train=(
        "{N} has {a} boxes of {b} {u} and buys {c} more. {e} of them are lost. {N} shares the rest among "
        "{f} children, and each child gives {g} {u} away. How many {u} do the children keep together?",
        "There are {a} boxes with {b} {u} each in a school, and {c} {u} more arrive. After {e} {u} are taken "
        "away, the rest is shared by {f} children. Each of them loses {g}. How many {u} do they have in all?",
        "{N} packs {b} {u} into each of {a} boxes and adds {c} {u}. {M} takes {e}. The others go to {f} "
        "children "
        "in equal parts, and every child uses {g} of them. How many {u} are left with the children?",
    ),
    held=(
        "{f} children share what {N} has in equal parts: {a} boxes of {b} {u} and {c} single ones, without "
        "the {e} "
        "that {M} took. When each child has spent {g}, how many {u} are there among the children?",
    ),
    lines=(
        "[the boxes|they] [hold|contain|have] {E} {u}[| in total| in all].",
        "[there are|that makes|we get] {E} {u} [with the others|with the new ones|then].",
        "[there are|that leaves|we have] {E} {u} [left|to share|after that].",
        "[each child|every child] [gets|receives|takes] {E} {u}[| of them].",
        "[each child|every child] [keeps|has|holds] {E} {u}[| now| after that].",
        "[the children|they] [have|keep|hold] {E} {u} [together|in all|in total].",
    ),
    end="[the children|they] [have|keep] {A} {u}",
)
def sharing(d: Draw) -> Numbers:
    a, b, c, f = d.between(2, 6), d.between(5, 12), d.between(3, 20), d.between(2, 5)
    stock = a * b + c
    part = d.between(2, (stock - 1) // f)
    e, g = stock - f * part, d.between(1, part - 1)
    return {"a": a, "b": b, "c": c, "e": e, "f": f, "g": g}, [
        (a, "*", b),
        (a * b, "+", c),
        (stock, "-", e),
        (stock - e, "/", f),
        (part, "-", g),
        (part - g, "*", f),
    ]
