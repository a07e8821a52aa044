"""Entry points with a generated prologue: a traced call becomes an op, a repeated one is replayed.

The prologue is compiled once for each entry point, with its parameters: passing all of them to
another function would cost more than any other step of a replay.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mlagen.families.common.call_key import KeyCode, KeyKinds, indented
from mlagen.families.common.dispatch import DecodeCalls, call_missed
from mlagen.torch_ops.traced import as_op, is_compiling, is_traced

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# The closure makes its variables cheaper to read than globals.
_SOURCE = """
def make(function, replay, call_missed, is_compiling, is_traced, as_op, {names}):
    def {name}({parameters}):
        {traced}
        {statements}
        key = None
        if {has_key}:
            outputs = replay({key})
            if outputs is not None:
                return {returns}
            key = {key}
        return call_missed(key, function, {arguments})
    return {name}
"""
_TRACED = """
if is_compiling() or is_traced():
    return as_op("{name}", {values})
"""


def replayable(
    calls: DecodeCalls[Any, Any],
    kinds: KeyKinds,
    *,
    returns: str = "outputs[0]",
    has_op: bool = True,
) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator of an entry point that ends in ``calls.dispatch``.

    The decorated function has the same parameters and results: a call with the key of an earlier
    one launches the same kernels, and any other runs the entry point.

    Parameters
    ----------
    calls
        The calls of the entry point's family.
    kinds
        The kinds of its parameters.
    returns
        The expression of its result, from ``outputs``.
    has_op
        Whether a traced call becomes its op, as :func:`mlagen.torch_ops.traced.traceable` defines.
    """

    def decorate(function: FunctionT) -> FunctionT:
        source, code = _source_of(function, kinds, returns, has_op=has_op), KeyCode(function, kinds)
        tree, place = ast.parse(source), function.__code__
        for node in ast.walk(tree):
            if isinstance(node, (ast.expr, ast.stmt)):  # for tracebacks and inspect
                node.lineno = node.end_lineno = place.co_firstlineno
                node.col_offset = node.end_col_offset = 0
        namespace: dict[str, Any] = {}
        compiled = compile(tree, place.co_filename, "exec")
        exec(compiled, function.__globals__, namespace)  # noqa: S102 - as dataclasses do
        entry = namespace["make"](
            function, calls.replay, call_missed, is_compiling, is_traced, as_op, **code.names
        )
        entry.__defaults__, entry.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        functools.update_wrapper(entry, function)
        return cast("FunctionT", entry)

    return decorate


def _source_of(function: Callable[..., Any], kinds: KeyKinds, returns: str, *, has_op: bool) -> str:
    code, name = KeyCode(function, kinds), function.__name__
    parameters = inspect.signature(function).parameters
    keywords = [name for name, facts in parameters.items() if facts.kind is facts.KEYWORD_ONLY]
    others = [name for name in parameters if name not in keywords]
    traced = _TRACED.format(name=name, values=", ".join(parameters))
    return _SOURCE.format(
        name=name,
        names=", ".join(code.names),
        parameters=", ".join((*others, *["*"][: len(keywords)], *keywords)),
        traced=indented(traced, 2) if has_op else "",
        statements=indented(code.statements, 2),
        has_key=code.has_key,
        key=code.key,
        returns=returns,
        arguments=", ".join((*others, *(f"{name}={name}" for name in keywords))),
    )
