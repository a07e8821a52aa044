"""Entry points with a generated prologue: a traced call becomes an op, a repeated one is replayed.

The prologue is compiled once for each entry point, with its parameters: passing all of them to
another function would cost more than any other step of a replay.
"""

from __future__ import annotations

import functools
import inspect
import linecache
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
        code, name = KeyCode(function, kinds), function.__name__
        parameters = inspect.signature(function).parameters.values()
        named = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        others = [parameter.name for parameter in parameters if parameter.name not in named]
        source = _SOURCE.format(
            name=name,
            names=", ".join(code.names),
            parameters=", ".join((*others, "*" if named else "", *named)).replace(", , ", ", "),
            traced=indented(_TRACED, 2).format(name=name, values=", ".join(others + named))
            if has_op
            else "",
            statements=indented(code.statements, 2),
            has_key=code.has_key,
            key=code.key,
            returns=returns,
            arguments=", ".join((*others, *(f"{name}={name}" for name in named))),
        )
        file = f"<prologue of {function.__module__}.{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {}
        exec(compile(source, file, "exec"), function.__globals__, namespace)  # noqa: S102 - as above
        entry = namespace["make"](
            function, calls.replay, call_missed, is_compiling, is_traced, as_op, **code.names
        )
        entry.__defaults__, entry.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return cast("FunctionT", functools.update_wrapper(entry, function))

    return decorate
