"""Log and dumps of calls: ``MLAGEN_LOG=api`` and ``MLAGEN_DUMP``.

Every entry point reads at each call whether the settings request them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar, cast

import torch

from mlagen.errors import MlagenError
from mlagen.observe.document import MAX_DEPTH, CallDocument, describe_call, parts_of
from mlagen.observe.dump import DumpedCall, Dumper, DumpFolder
from mlagen.observe.log import log_call
from mlagen.runtime.capture import is_capturing
from mlagen.runtime.launch import record_launches
from mlagen.settings import current_settings
from mlagen.torch_ops.traced import is_compiling, is_traced

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

CPU_BACKEND = "CPU backend"
NO_KERNEL = "no kernel"

# Methods that set what the runs of a wrapper depend on, with their part of a dump.
_SETUP = {"__init__": "init", "plan": "plan"}

_logger = logging.getLogger("mlagen")

_setups: weakref.WeakKeyDictionary[object, dict[str, CallDocument]] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """Whether the call of this thread is observed already, as part of another one."""

    is_observed = False


_thread = _Thread()


def is_observed() -> bool:
    """Whether this call is part of one that is observed."""
    return _thread.is_observed


def observable(wrapper: type) -> type:
    """Return a wrapper class whose construction, plans and runs are observed.

    Construction decides whether the instance observes its runs, so that others cost nothing more.
    """
    construct = wrapper.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if not is_compiling() and current_settings().observes_calls:
            self.run = MethodType(observed(type(self).run), self)

    setattr(wrapper, "__init__", observed(init))  # noqa: B010 - for mypy
    setattr(wrapper, "plan", observed(wrapper.plan))  # type: ignore[attr-defined] # noqa: B010
    return wrapper


def observed(function: FunctionT) -> FunctionT:
    """Return a function whose calls are observed, except those that a compiler traces."""

    # A compiler reads what it closes over, and knows functions only.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_traced() or not current_settings().observes_calls:
            return function(*args, **kwargs)
        if is_observed():
            return function(*args, **kwargs)
        try:
            arguments = _signature_of(function).bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises it under the function's own name
        return observe(function, arguments, lambda: function(*args, **kwargs))

    return cast("FunctionT", call)


def observe(
    function: Callable[..., Any],
    arguments: Mapping[str, object],
    compute: Callable[[], Any] | None = None,
) -> Any:
    """Return the result of a function, whose call is logged and dumped."""
    observation: _Observation | None = None
    with _warned_of(_warn_of):
        observation = _Observation(function.__name__, arguments, _signature_of(function))

    def end(result: object, error: Exception | None) -> None:
        if observation is not None:
            with _warned_of(_warn_of):
                observation.end(list(map(str, launched)), result=result, error=error)

    _thread.is_observed = True
    try:
        with record_launches() as launched:
            result = function(**arguments) if compute is None else compute()
    except Exception as error:
        end(None, error)
        raise
    finally:
        _thread.is_observed = False
    end(result, None)
    return result


_signature_of = functools.cache(inspect.signature)


@functools.cache
def dumper() -> Dumper | None:
    """Return the dumps of this process, if the settings have any."""
    settings = current_settings()
    if settings.dump is None:
        return None
    folder = DumpFolder(settings.dump, is_shared=settings.trusts_shared)
    return Dumper(folder, has_tensors=settings.dumps_tensors)


@functools.cache
def _warn_of_kind(kind: str, text: str) -> None:
    _logger.warning("MLAGEN_LOG: expected a call that can be logged, got %s: %s", kind, text)


def _warn_of(error: Exception) -> None:
    _warn_of_kind(type(error).__name__, str(error)[:200])


@contextmanager
def _warned_of(warn: Callable[[Exception], None]) -> Iterator[None]:
    """Warn of an exception, which must not fail the call that is observed."""
    try:
        yield
    except MlagenError:  # of the settings; the call raises it
        pass
    except Exception as error:  # noqa: BLE001 - any
        warn(error)


class _Observation:
    """One call, from its arguments to its outcome; a failing dump is a warning."""

    def __init__(
        self, name: str, arguments: Mapping[str, object], signature: inspect.Signature
    ) -> None:
        owner = arguments.get("self")
        self._name = name
        self._entry = name if owner is None else f"{type(owner).__name__}.{name}"
        self._arguments = {
            key: value
            for key, value in arguments.items()
            if key != "self" and not _equals(value, signature.parameters[key].default)
        }
        self._devices = {tensor.device for tensor in _tensors_in(self._arguments.values())}
        self._is_captured = any(map(is_capturing, self._devices))
        self._owner = owner
        self._described: CallDocument | None = None
        self._dumped: DumpedCall | None = None
        self._dumper = dumper()
        if self._dumper is not None:
            with _warned_of(self._dumper.warn_of):
                self._begin_dump(self._dumper)

    def end(
        self, kernels: list[str], *, result: object = None, error: Exception | None = None
    ) -> None:
        """Complete the dump of the call, and log it."""
        if not kernels and error is None and self._name not in _SETUP:
            is_on_cpu = {device.type for device in self._devices} == {"cpu"}
            kernels = [CPU_BACKEND if is_on_cpu else NO_KERNEL]
        if self._dumper is not None and self._dumped is not None:
            with _warned_of(self._dumper.warn_of):
                self._dumper.end(self._dumped, served_by=kernels, error=error)
                if error is None:
                    self._keep_setup(self._dumper)
        if current_settings().log == "api":
            log_call(
                self._entry,
                self._arguments,
                result=result,
                kernels=kernels,
                error=error,
                is_captured=self._is_captured,
            )

    def _begin_dump(self, to: Dumper) -> None:
        self._described = describe_call(self._arguments)
        parts: dict[str, CallDocument | None] = {"call": self._described}
        if self._owner is not None and self._name != "__init__":
            setup = _setups.get(self._owner, {})
            parts["init"] = setup.get("init")
            parts["plan"] = setup.get("plan") if self._name == "run" else None
        gpus = [device.index for device in self._devices if device.type == "cuda"]
        self._dumped = DumpedCall(
            entry=self._entry,
            parts=parts,
            is_captured=self._is_captured,
            gpu=gpus[0] if gpus else None,
        )
        to.begin(self._dumped)

    def _keep_setup(self, to: Dumper) -> None:
        """Keep the arguments of a wrapper's construction or plan for the dumps of its runs."""
        part = _SETUP.get(self._name)
        if part is None or self._owner is None or self._described is None:
            return
        contents: dict[int, torch.Tensor] = {}
        if to.has_tensors and not self._is_captured:  # the caller may overwrite them
            contents = {index: whole.clone() for index, whole in self._described.contents.items()}
        _setups.setdefault(self._owner, {})[part] = replace(self._described, contents=contents)


def _equals(value: object, default: object) -> bool:
    if value is default:
        return True
    return isinstance(default, (bool, int, float, str)) and (
        value.__class__ is default.__class__ and value == default
    )


def _tensors_in(values: Iterable[object], depth: int = 0) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif (parts := parts_of(value)) and depth < MAX_DEPTH:
            yield from _tensors_in((part for _, part in parts), depth + 1)
