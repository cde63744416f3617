"""Names the cause of a mismatch between a trainer's and an engine's logprobs.

verdict = lockstep.explain("samples.jsonl", "run/step-7", others={"step-6": "run/step-6"})
print(verdict.sentence)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
    from lockstep.explain.case import Case
    from lockstep.explain.explanation import Cause, CauseEvidence, Explanation
    from lockstep.explain.run import explain
else:
    __getattr__ = import_on_use(
        __name__,
        {
            "Case": "case",
            "Cause": "explanation",
            "CauseEvidence": "explanation",
            "Explanation": "explanation",
            "explain": "run",
        },
    )

__all__ = ["Case", "Cause", "CauseEvidence", "Explanation", "explain"]


class _CallableModule(ModuleType):
    """Lets `lockstep.explain(...)` be a call although `lockstep.explain` is this package."""

    def __call__(self, *args: Any, **options: Any) -> Explanation:
        from lockstep.explain.run import explain

        return explain(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
