"""Access to MKL's conditional numerical reproducibility (CNR) mode of this process.

In strict CNR mode a row of a matrix product has the same bits whatever the number of rows. The
first product of a process fixes the mode, from the variable MKL_CBWR or from an earlier call.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

VARIABLE = "MKL_CBWR"
STRICT = "AUTO,STRICT"
COMPATIBLE = "COMPATIBLE"
ABSENT = "absent"
"""The mode reported by a torch build without MKL."""
_STRICT_FLAG = 0x10000
_ALL = -1
_BRANCHES = {
    1: "OFF",
    2: "AUTO",
    3: COMPATIBLE,
    4: "SSE2",
    6: "SSSE3",
    7: "SSE4_1",
    8: "SSE4_2",
    9: "AVX",
    10: "AVX2",
    11: "AVX512_MIC",
    12: "AVX512",
    13: "AVX512_MIC_E1",
    14: "AVX512_E1",
}
_AVX2 = 10


def mode() -> str:
    """Return the mode of this process in MKL_CBWR's notation, OFF for the default, or ABSENT."""
    library = _library()
    if library is None:
        return ABSENT
    value = int(library.mkl_serv_cbwr_get(_ALL))
    branch = _BRANCHES.get(value & ~_STRICT_FLAG, str(value))
    return f"{branch},STRICT" if value & _STRICT_FLAG else branch


def set_mode(name: str) -> bool:
    """Put MKL into a mode; return whether it is active.

    Returns False when torch has no MKL, when the CPU lacks that branch, and when the process has
    already computed in another mode.
    """
    library = _library()
    if library is None:
        return False
    if mode() == name:
        return True
    branch, _, strict = name.partition(",")
    number = next((key for key, value in _BRANCHES.items() if value == branch), None)
    if number is None:
        return False
    return int(library.mkl_serv_cbwr_set(number | (_STRICT_FLAG if strict else 0))) == 0


def offers_strict() -> bool:
    """Return whether MKL has a strict mode for the branch it uses here (AVX2 or later)."""
    library = _library()
    return library is not None and int(library.mkl_serv_cbwr_get_auto_branch()) >= _AVX2


def share_products(shared: bool) -> None:
    """Allow or forbid MKL to split products of the calling thread over several threads."""
    library = _library()
    if library is not None:
        library.MKL_Set_Num_Threads_Local(0 if shared else 1)


@lru_cache
def _library() -> ctypes.CDLL | None:
    """Return the shared library of torch that contains MKL, or None."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("*torch_cpu*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if hasattr(library, "mkl_serv_cbwr_set"):
            return library
    return None
