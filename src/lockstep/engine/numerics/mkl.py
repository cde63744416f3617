"""MKL's conditional numerical reproducibility (CNR) of this process, read and set.

In strict CNR mode a row of a matrix product has the same bits however many rows there are. The mode
is fixed by the first product of a process: from the variable MKL_CBWR, or from a call before it.
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
"""The mode of a torch that was built without MKL."""
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
    """The mode of this process as MKL_CBWR writes it, OFF for the default, or ABSENT."""
    library = _library()
    if library is None:
        return ABSENT
    value = int(library.mkl_serv_cbwr_get(_ALL))
    branch = _BRANCHES.get(value & ~_STRICT_FLAG, str(value))
    return f"{branch},STRICT" if value & _STRICT_FLAG else branch


def set_mode(name: str) -> bool:
    """Puts this process into a mode of MKL; returns whether it is in it now.

    It is not where torch has no MKL, where the CPU does not have that branch, and where the process
    has computed in another mode already.
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
    """Whether MKL takes a branch here for which it has a strict mode: AVX2 or later."""
    library = _library()
    return library is not None and int(library.mkl_serv_cbwr_get_auto_branch()) >= _AVX2


def share_products(shared: bool) -> None:
    """Allows, or forbids, MKL to split products of the calling thread over several threads."""
    library = _library()
    if library is not None:
        library.MKL_Set_Num_Threads_Local(0 if shared else 1)


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The library of torch that MKL is linked into; None where it is not."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("*torch_cpu*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if hasattr(library, "mkl_serv_cbwr_set"):
            return library
    return None
