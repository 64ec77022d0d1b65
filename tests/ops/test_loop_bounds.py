"""No kernel's loop carries a value that only bounds loops inside it: Triton (3.6, 3.7) takes it for dead, and it keeps its first value."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attnzoo_kernels

FAULTY = """
def kernel(count, out, group):
    length = load(count)
    for member in range(group):
        bounds = (0, length)
        for i in range(bounds[0], bounds[1]):
            add(out + i)
        length = load(count + member)
"""


def reads(nodes: list[ast.AST]) -> Counter[str]:
    return Counter(x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))


def carried_bounds(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line of the outer loop, name) of values from the round before that stand in or make bounds of inner loops, and nothing else."""
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and "static_range" not in ast.unparse(loop.iter):
            inside = [x for statement in loop.body for x in ast.walk(statement)]
            bounds: list[ast.AST] = [x.iter for x in inside if isinstance(x, ast.For)]
            made = reads(bounds)
            bounds += [x.value for x in inside if isinstance(x, ast.Assign) and made.keys() & {ast.unparse(t) for t in x.targets}]
            names = [x for x in inside if isinstance(x, ast.Name)]
            first = {x.id: x for x in sorted(names, key=lambda x: (-x.lineno, isinstance(x.ctx, ast.Load)))}
            stored = {x.id for x in names if isinstance(x.ctx, ast.Store)}
            everywhere = reads(loop.body)
            yield from ((loop.lineno, name) for name, times in reads(bounds).items()
                        if name in stored and isinstance(first[name].ctx, ast.Load) and everywhere[name] == times)


def test_a_loop_of_that_kind_is_found():
    assert [name for _, name in carried_bounds(ast.parse(FAULTY))] == ["length"]
    assert not [*carried_bounds(ast.parse(FAULTY.replace("        bounds =", "        length = load(count + member)\n        bounds =")))]


def test_no_kernel_has_one():
    folder = Path(attnzoo_kernels.__file__).parent
    found = [(path.name, *where) for path in sorted(folder.rglob("*.py")) for where in carried_bounds(ast.parse(path.read_text()))]
    assert not found
