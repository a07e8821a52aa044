"""Entry points: a function that maps its arguments to those of a family becomes a decode call.

The decorator generates one function for each entry point, since a replay must not pass all
arguments on. It traces a call as its op, reports it if the settings say so, replays an earlier call
with the same key and addresses, or else dispatches what the entry point returns. Its text is in
:mod:`linecache`, where :func:`inspect.getsource` and debuggers find it.

A key has everything but the metadata and the addresses of the tensors. Every parameter is part of
it, unless the entry point ignores the parameter. It distinguishes values of different types: a
float or a bool may equal an int. A call with a value of an unexpected type has no key.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from marshal import dumps
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from mlagen.families.common.dispatch import CallKey, Dispatcher
from mlagen.observe.observed import is_observed, observe
from mlagen.settings import current_settings
from mlagen.torch_ops.traced import Op, as_op, define_ops, is_compiling, is_traced

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

Both = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Returns(Generic[ResultT]):
    """What an entry point returns, as an expression of its ``outputs``."""

    expression: str
    annotation: str


OUT: Returns[torch.Tensor] = Returns("outputs[0]", "torch.Tensor")
OUT_AND_LSE: Returns[torch.Tensor | Both] = Returns(
    "outputs if return_lse else outputs[0]", "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
)
ALL: Returns[tuple[torch.Tensor, ...]] = Returns("outputs", "tuple[torch.Tensor, ...]")
NOTHING: Returns[None] = Returns("None", "None")


def entry_point(
    calls: Dispatcher,
    *,
    outputs: str,
    returns: Returns[ResultT],
    ignored: str = "",
    length: str = "",
    plan: str = "",
    op: Op | None = None,
) -> Callable[[Callable[P, Any]], Callable[P, ResultT]]:
    """Return a decorator of a function that returns the arguments of a call of its family.

    ``calls`` has the calls of the family. ``outputs`` names the parameters of outputs that the
    caller gives, in the order of the results, and ``returns`` is the result. Parameters in
    ``ignored`` affect neither checks nor launches; ``length``, an int, affects the scheduling only,
    by its most significant bits; ``plan`` has, besides anything else, ``tensors``, a ``key`` of
    everything else that a launch depends on, and the length ``max_kv_len``. A traced call becomes
    ``op``; with None it does not get here. Raises ValueError if a parameter has a name of the
    generated text, or is a float of 0.0 by default, which no replay distinguishes from -0.0.
    """

    def decorate(function: Callable[P, Any]) -> Callable[P, ResultT]:
        text = _text_of(function, outputs, returns.expression, ignored, length, plan, op)
        place = f"<mlagen {function.__module__}.{function.__qualname__}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        namespace: dict[str, Any] = {}
        exec(compile(text, place, "exec"), namespace)  # noqa: S102 - as dataclasses do
        parameters = inspect.signature(function).parameters
        entry = namespace["make"](
            function,
            calls.replay,
            calls.dispatch,
            current_settings,
            is_observed,
            observe,
            is_compiling,
            is_traced,
            as_op,
            dumps,
            _is_known,
            torch.dtype,
            CallKey,
            *(parameter.default for parameter in parameters.values()),
        )
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(entry, name, getattr(function, name))
        given = {name: _text(parameter.annotation) for name, parameter in parameters.items()}
        entry.__annotations__ = given | {"return": returns.annotation}
        facts = list(parameters.values())
        defaults = [one.default for one in facts if one.default is not one.empty]
        keywords = [one for one in facts if one.kind is one.KEYWORD_ONLY]
        count = len([one for one in keywords if one.default is not one.empty])
        entry.__defaults__ = tuple(defaults[: len(defaults) - count])
        entry.__kwdefaults__ = {
            one.name: one.default for one in keywords if one.default is not one.empty
        }
        if op is not None:
            define_ops(entry, op)
        return cast("Callable[P, ResultT]", entry)

    return decorate


# The variables of the text below.
_NAMES = {
    *("function", "replay", "dispatch", "current_settings", "is_observed", "observe", "as_op"),
    *("is_compiling", "is_traced", "dumps", "is_known", "dtype", "CallKey", "settings", "bits"),
    *("more", "options", "others", "key", "outputs"),
}

# The closure makes its variables cheaper to read than globals.
_TEXT = """\
def make(function, replay, dispatch, current_settings, is_observed, observe, is_compiling,
         is_traced, as_op, dumps, is_known, dtype, CallKey, {defaults}):
    def {name}({parameters}):
{traced}\
        settings = current_settings()
{observed}\
        bits, more = 0, ()
{statements}\
        options = b"" if {are_default} else (
            dumps(others, {format}) if is_known(map(type, others := ({options}))) else None)
        key = None
        if {has_key}:
            outputs = replay(settings, {values}, {length}, {tensors}, {outputs})
            if outputs is not None:
                return {returns}
            key = CallKey({values}, {scales}, {length}, {tensors})
        outputs = dispatch(function({arguments}), key, {outputs})
        return {returns}
    return {name}
"""
_TRACED = """\
        if is_compiling() or is_traced():
            return as_op("{name}", {values})
"""
_OBSERVED = """\
        if settings.observes_calls and not is_observed():
            return observe({name}, {named})
"""
_OPTIONAL = """\
        if {name} is not None:
            bits += {bit}
            more += ({name},)
"""
_PAIR = """\
        {name}_first = {name}
        if {name}.__class__ is tuple and len({name}) == 2:
            bits += {bit}
            {name}_first, {name}_second = {name}
            more += ({name}_second,)
"""
_SEQUENCE = """\
        if {name}.__class__ is tuple:
            bits += {bit} * (len({name}) + 1)
            more += {name}
        elif {name}.__class__ is list:
            bits += {bit} * (len({name}) + {list_bit})
            more += (*{name},)
        elif {name} is not None:
            bits += {bit} * {list_bit}
            more += ({name},)
"""
_SCALE = """\
        {name}_value = {name}
        if {name}.__class__ is not float:
            bits += {bit}
            more += ({name},)
            {name}_value = None
"""


def _text_of(
    function: Callable[..., Any],
    outputs: str,
    returns: str,
    ignored: str,
    length: str,
    plan: str,
    op: Op | None,
) -> str:
    """Return the text of a module that makes the generated function of an entry point."""
    parameters = inspect.signature(function).parameters
    if taken := parameters.keys() & _NAMES:
        raise ValueError(f"{min(taken)}: expected another name of a parameter, got one of the text")
    kinds = {
        name: _kind_of(parameter)
        for name, parameter in parameters.items()
        if name not in {*ignored.split(), length, plan}
    }

    def named(*wanted: str) -> list[str]:
        return [name for name, kind in kinds.items() if kind in wanted]

    for each in named("float", "scale"):
        if parameters[each].default == 0.0:
            raise ValueError(f"{each}: expected a default of None or not 0.0, got 0.0")
    statements, bit = "", 1
    for kind, (template, size) in _TEMPLATES.items():
        for each in named(kind):
            statements += template.format(name=each, bit=bit, list_bit=_MAX_ITEMS)
            bit *= size
    values = named("int", "bool", "float", "dtype")
    conditions = [f"{name}.__class__ is {kinds[name]}" for name in named("int", "bool", "float")]
    conditions += [f"({x} is None or {x}.__class__ is dtype)" for x in named("dtype")]
    tensors = named("tensor") + [f"{each}_first" for each in named("pair")]
    options = named("option")
    if plan:
        values.append(f"{plan}.key")
        tensors.append(f"*{plan}.tensors")
        length = f"{plan}.max_kv_len"
    if length:
        conditions.append(f"{length}.__class__ is int")
    values += [f"{name}_value" for name in named("scale")]  # the last
    keywords = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    others = [name for name in parameters if name not in keywords]
    name, place = function.__name__, f"{function.__module__}.{function.__qualname__}"
    return _TEXT.format(
        name=name,
        defaults=", ".join(f"{each}_" for each in parameters),
        parameters=", ".join((*others, *["*"][: len(keywords)], *keywords)),
        traced="" if op is None else _TRACED.format(name=name, values=", ".join(parameters)),
        observed=""
        if op is None
        else _OBSERVED.format(
            name=name, named=f"{{{', '.join(f'{each!r}: {each}' for each in parameters)}}}"
        ),
        outputs=f"({_listed(outputs.split())})",
        statements=statements,
        are_default=" and ".join(f"{each} is {each}_" for each in options) or "True",
        options=_listed(options),
        format=_FORMAT,
        has_key=" and ".join(("options is not None", *conditions)),
        values=f"({place!r}, bits, options, {_listed(values)})",
        tensors=f"({_listed(tensors)}*more,)",
        length=length or "0",
        returns=returns,
        scales=len(named("scale")),
        arguments=", ".join((*others, *(f"{each}={each}" for each in keywords))),
    )


def _kind_of(parameter: inspect.Parameter) -> str:
    """Return how a parameter is part of a key, by its annotation.

    A value that the annotation does not allow gives no key: it is no tensor, or no option.
    """
    annotation = _text(parameter.annotation)
    parts = {part.strip() for part in annotation.split("|")}
    if parts == {"torch.Tensor", "tuple[torch.Tensor, torch.Tensor]"}:
        return "pair"
    if any(part.startswith(("tuple[torch.Tensor", "list[torch.Tensor")) for part in parts):
        return "sequence"
    if "torch.Tensor" in parts:
        return "scale" if "float" in parts else "optional" if "None" in parts else "tensor"
    if "torch.dtype" in parts:
        return "dtype"
    is_flag = annotation == "bool" and parameter.default is parameter.empty
    return annotation if is_flag or annotation in {"int", "float"} else "option"


# The format of marshal without references, which depend on the identity of values. Equal bytes
# have equal values of equal types.
_FORMAT = 2

_is_known = frozenset((int, bool, float, str, type(None))).issuperset

# More than the tensors of any call, so that the numbers of items of two sequences stay apart.
_MAX_ITEMS = 1 << 5

# The statements of each kind of parameter with tensors, and the number of its forms.
_TEMPLATES = {
    "scale": (_SCALE, 2),
    "optional": (_OPTIONAL, 2),
    "pair": (_PAIR, 2),
    "sequence": (_SEQUENCE, 2 * _MAX_ITEMS),
}


def _listed(names: list[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _text(annotation: Any) -> str:
    """Return an annotation as it is written."""
    return str(getattr(annotation, "__forward_arg__", annotation))
