"""Packing of kernel parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter

from mlagen.spec.kernel import KernelSpec, Parameter
from mlagen.values import reject

# kernelParams: an array with one pointer, since a kernel takes one struct, in front of that struct.
# Eight bytes of padding keep the struct aligned as ctypes allocates it.
_HEAD = "<Q8x"
HEAD_BYTES = struct.calcsize(_HEAD)


class ParameterPacking:
    """How a launch packs the values of a kernel's parameters.

    All tensor maps form one value, ``maps``, and all constants another, by the kernel's symbol:
    both are the same across replays, so they are packed once.
    """

    def __init__(self, spec: KernelSpec) -> None:
        """Join the fields that a launch gets as one value."""

        def name_of(field: Parameter) -> str:
            if field.cuda_type == "TensorMap":
                return "maps"
            return spec.symbol if field.is_constant else field.name

        runs = groupby(spec.parameters, key=name_of)
        codes = {name: "".join(field.code for field in run) for name, run in runs}
        constants = codes[spec.symbol]
        for name in codes.keys() & {"maps", spec.symbol}:
            codes[name] = f"{_size(codes[name])}s"
        self.names = tuple(codes)
        self.values_of = itemgetter(*codes)
        self.struct = struct.Struct("<" + "".join(codes.values()))
        whole = struct.Struct(_HEAD + "".join(codes.values()))
        self.new_buffer, self.pack_into = ctypes.c_char * whole.size, whole.pack_into
        self._constants = {field.name: field.code for field in spec.parameters if field.is_constant}
        self._pack_constants = struct.Struct(f"<{constants}").pack

    def pack_constants(self, values: Mapping[str, object]) -> bytes:
        """Return the packed constant parameters, from values by name; other names are ignored."""
        numbers = [values[name] for name in self._constants]
        try:
            return self._pack_constants(*numbers)
        except struct.error:  # of a shape without memory, such as an expanded view of one element
            for (name, code), number in zip(self._constants.items(), numbers, strict=True):
                bits = 8 * _size(code)
                if isinstance(number, int) and number.bit_length() >= bits:
                    reject(name, f"an int of {bits} bits", number)
            raise


def _size(codes: str) -> int:
    return struct.calcsize(f"<{codes}")
