"""An environment of verifiers: a calculator behind MCP, and a reward for the right number."""

import verifiers.v1 as vf


class CalcToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calc(self, expression: str) -> str:
        """Evaluates an arithmetic expression."""
        return str(eval(expression))


class CalcTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CalcTask(vf.Task[vf.TaskData, vf.State, CalcTaskConfig]):
    @classmethod
    def toolsets(cls, config: CalcTaskConfig) -> list[vf.Toolset]:
        return [CalcToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("1509" in str(trace.nodes[-1].message.content))


class CalcTasksetConfig(vf.TasksetConfig):
    task: CalcTaskConfig = CalcTaskConfig()
    question: str = "What is 417 + 86, and then times 3?"


class CalcTaskset(vf.Taskset[CalcTask, CalcTasksetConfig]):
    def load(self):
        yield CalcTask(vf.TaskData(prompt=self.config.question), self.config.task)


__all__ = ["CalcTaskset"]

if __name__ == "__main__":
    CalcToolset.run()
