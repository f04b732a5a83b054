"""Code out of an answer to a HumanEval problem (the post-processing that Fast-dLLM and Flash-dLLM score with).

The text of a code fence if there is one, behind the problem's prompt; of that the longest run of lines that parses; of
that the imports, what the prompt defines and what the asked function needs. Applied to HumanEval only; MBPP answers are
run as they are. (What the prompt defines beside the asked function is kept since the tests of problem 50 call it.)
"""

from __future__ import annotations

import ast

FENCE = "```"


def extract(prompt: str, text: str, entry_point: str) -> str:
    """Source that defines ``entry_point``, as far as the answer does.

    Args:
        prompt: function header and docstring.
        text: the answer, with or without a code fence.
        entry_point: name of the asked function.
    """
    source = longest_valid(f"{prompt}\n{fenced(text)}")
    return needed(source, entry_point, given=prompt)


def fenced(text: str) -> str:
    """What stands in the first ``python`` code fence, closed or not, else the text up to any fence."""
    _, opened, rest = text.partition(f"{FENCE}python\n")
    return (rest if opened else text).partition(FENCE)[0]


def longest_valid(source: str) -> str:
    """The longest run of lines that parses, by lines with something on them; the first of equals."""
    lines = source.splitlines()
    best, best_size = "", 0
    for start in range(len(lines)):
        if sum(bool(line.strip()) for line in lines[start:]) <= best_size:
            break
        end = _valid_end(lines, start)
        size = sum(bool(line.strip()) for line in lines[start:end])
        if size > best_size:
            best, best_size = "\n".join(lines[start:end]), size
    return best


def _valid_end(lines: list[str], start: int) -> int:
    """Where the longest run from ``start`` that parses ends.

    Whatever is wrong at a line stays wrong however many lines follow, so a run has to end before it.
    """
    end = len(lines)
    while end > start:
        try:
            ast.parse("\n".join(lines[start:end]))
            return end
        except SyntaxError as error:
            end = min(end - 1, start + max((error.lineno or 1) - 1, 0))
        except (ValueError, RecursionError, MemoryError):
            end -= 1
    return start


def needed(source: str, entry_point: str, given: str = "") -> str:
    """Imports, and the definitions that ``entry_point`` and those of ``given`` need, in their order.

    All of ``source`` if it does not define ``entry_point``.
    """
    body = _statements(source)
    defined = [_defines(node) for node in body]
    if not any(entry_point in names for names in defined):
        return source
    wanted = {entry_point}.union(*map(_defines, _statements(given)))
    queue = list(wanted)
    while queue:
        name = queue.pop()
        for node, names in zip(body, defined, strict=True):
            if name in names:
                new = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - wanted
                wanted |= new
                queue += new
    kept = [
        node
        for node, names in zip(body, defined, strict=True)
        if isinstance(node, ast.Import | ast.ImportFrom) or names & wanted
    ]
    return "\n".join(ast.get_source_segment(source, node) or ast.unparse(node) for node in map(_whole, kept))


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _whole(node: ast.stmt) -> ast.stmt:
    """A node whose source begins at its first decorator."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
        node.lineno = min(d.lineno for d in node.decorator_list)
        node.col_offset = 0
    return node


def _defines(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return set()
