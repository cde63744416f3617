"""An environment of verifiers: digits to reverse, asked by a program that speaks any dialect."""

import sys
from pathlib import Path

import verifiers.v1 as vf

from lockstep.train import Reverse


class ReverseTask(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(trace.nodes[-1].message.content) == self.data.answer)


class ReverseData(vf.TaskData):
    answer: str


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        rows = Reverse(3, 4).tasks("train", 0)
        for at, row in zip(range(20), rows, strict=False):
            prompt = row.messages[0]["content"]
            yield ReverseTask(ReverseData(idx=at, prompt=prompt, answer=row.facts["answer"]))


class DialectHarnessConfig(vf.HarnessConfig):
    dialect: str = "messages"
    turns: int = 1
    stream: bool = False


class DialectHarness(vf.Harness[DialectHarnessConfig]):
    """Runs ask.py, which asks in one dialect with its own SDK."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        config = self.config
        program = str(Path(__file__).with_name("ask.py"))
        arguments = [config.dialect, endpoint, secret, data.prompt, str(config.turns)]
        stream = ["--stream"] if config.stream else []
        return await runtime.run([sys.executable, program, *arguments, *stream], {})


__all__ = ["DialectHarness", "ReverseTaskset"]
