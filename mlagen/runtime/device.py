"""Driver queries: version, visible GPUs, contexts; a machine without a driver has no GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlagen.errors import ArgumentError, DriverError
from mlagen.spec.arch import Arch, arch_of_capability


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Properties of one visible GPU."""

    index: int
    name: str
    major: int
    minor: int
    sm_count: int
    memory_bytes: int


def checked(result: tuple[Any, ...], symbol: str) -> Any:
    """Return the values of a driver call."""
    status, *values = result
    if int(status) != 0:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise DriverError(f"{symbol}: {reason} ({status.name})", symbol=symbol)
    return values[0] if len(values) == 1 else tuple(values)


def visible_devices() -> list[DeviceFacts]:
    """Return the visible GPUs; none without a driver."""
    driver = _initialized_driver()
    if driver is None:
        return []
    attribute = driver.CUdevice_attribute
    devices = []
    for index in range(checked(driver.cuDeviceGetCount(), "cuDeviceGetCount")):
        handle = checked(driver.cuDeviceGet(index), "cuDeviceGet")

        def value(which: Any, handle: Any = handle) -> int:
            return int(checked(driver.cuDeviceGetAttribute(which, handle), "cuDeviceGetAttribute"))

        name = checked(driver.cuDeviceGetName(256, handle), "cuDeviceGetName")
        devices.append(
            DeviceFacts(
                index=index,
                name=name.split(b"\0")[0].decode(),
                major=value(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                minor=value(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                sm_count=value(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                memory_bytes=int(checked(driver.cuDeviceTotalMem(handle), "cuDeviceTotalMem")),
            )
        )
    return devices


def driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as ``13.0``, or None."""
    driver = _initialized_driver()
    if driver is None:
        return None
    number = checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def device_facts(index: int) -> DeviceFacts:
    """Return the properties of GPU ``index``; they are constant within a process."""
    devices = visible_devices()
    if not 0 <= index < len(devices):
        raise ArgumentError(f"device: expected one of {len(devices)} visible GPUs, got {index}")
    return devices[index]


@cache
def arch_of_device(index: int) -> Arch:
    """Return the compilation target for GPU ``index``."""
    facts = device_facts(index)
    return arch_of_capability(facts.major, facts.minor)


def bind_context(index: int) -> None:
    """Make the primary context of GPU ``index`` current if this thread has no context yet.

    A thread that has only used the driver API has none, even if the process has one.
    """
    from cuda.bindings import driver

    if int(checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        checked(driver.cuCtxSetCurrent(_primary_context(index)), "cuCtxSetCurrent")


@contextmanager
def lasting_context(index: int) -> Iterator[None]:
    """Make a context current that lives as long as the process.

    A green context may be destroyed; the primary context of GPU ``index`` replaces it.
    """
    from cuda.bindings import driver

    bind_context(index)
    if not _is_in_green_context():
        yield
        return
    checked(driver.cuCtxPushCurrent(_primary_context(index)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


def _primary_context(index: int) -> Any:
    from cuda.bindings import driver

    device = checked(driver.cuDeviceGet(index), "cuDeviceGet")
    return checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")


def _is_in_green_context() -> bool:
    from cuda.bindings import driver

    try:
        status, green = driver.cuStreamGetGreenCtx(0)  # of the current context
    except (AttributeError, RuntimeError):  # bindings or a driver without green contexts
        return False
    return int(status) == 0 and int(green) != 0


def _initialized_driver() -> Any | None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # cuda.bindings without libcuda
        return None
    return driver if int(status) == 0 else None
