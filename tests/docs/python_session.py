"""Runs the Python blocks of one page, one after the other, in one namespace.

Each line on stdin is JSON with the code, where it comes from, and the environment; each answer is
one JSON line on stdout. `await` at the top level works, as it does in a notebook.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    answers, sys.stdout = sys.stdout, sys.stderr
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            request = json.loads(line)
            os.environ.clear()
            os.environ.update(request["environ"])
            error, printed = None, io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    code = compile(
                        request["code"], request["place"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                    )
                    result = eval(code, namespace)
                    if inspect.iscoroutine(result):
                        runner.run(result)
            except BaseException:
                error = traceback.format_exc()
            answers.write(json.dumps({"error": error, "printed": printed.getvalue()}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
