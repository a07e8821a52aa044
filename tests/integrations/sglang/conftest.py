"""The plugin over SGLang's classes, installed ones or stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tests.integrations.servers import modules_of
from tests.integrations.sglang.stand_in import MODULES


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[Callable[[str], ModuleType]]:
    """Return the import of a module of SGLang or of the plugin, by its name."""
    with modules_of("sglang", MODULES):
        yield import_module
