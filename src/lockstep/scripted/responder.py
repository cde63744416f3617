"""Selection of the rule for a prompt, and its reply in the chat format of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.render import Renderer
from lockstep.render.messages import Plain
from lockstep.scripted.script import PromptView, Rule, Script
from lockstep.tokens.errors import BadRequest

_QUESTION: Plain = {"role": "user", "content": "Question."}
_ANSWER: Plain = {"role": "assistant", "content": "BRIDGEANSWER"}
_NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """The token ids of a rule's reply."""

    rule: Rule
    token_ids: list[int]


class Responder:
    """A script in the chat format of one tokenizer."""

    def __init__(self, script: Script, tokenizer: Path) -> None:
        self._script = script
        self.renderer = Renderer.load(tokenizer)
        template = self.renderer.template
        self._opened = template.text([_QUESTION], None, add_generation_prompt=True)
        closed = template.text([_QUESTION], None, add_generation_prompt=False)
        self._opening = self._opened.removeprefix(closed)
        self._close = self._close_id()
        self._close_text = self.renderer.decode([self._close])

    def find(self, prompt_ids: Sequence[int]) -> tuple[int, Rule]:
        """Return the index and the rule for this prompt. Raises BadRequest when there is none."""
        return self._script.find(self._view(prompt_ids))

    def take(self, prompt_ids: Sequence[int]) -> ScriptedReply:
        """Return the reply to this prompt and count the use of its rule. Raises as `find`."""
        at, rule = self.find(prompt_ids)
        self._script.take(at)
        return ScriptedReply(rule, self._ids(rule))

    def count(self, at: int) -> None:
        """Count the use of a rule without a reply."""
        self._script.take(at)

    def _view(self, prompt_ids: Sequence[int]) -> PromptView:
        text = self.renderer.decode(prompt_ids)
        body = text.removesuffix(self._opening)
        end = body.rfind(self._close_text)
        end = len(body) if end < 0 else end
        start = body.rfind(self._close_text, 0, end)
        last = body[start + len(self._close_text) if start >= 0 else 0 : end]
        turn = body.count(self._opening) if self._opening else 0
        return PromptView(text, last, turn)

    def _ids(self, rule: Rule) -> list[int]:
        text = self._render(rule) if rule.raw is None else rule.raw
        ids = self.renderer.template.encode(text)
        return ids if rule.finish == "length" else [*ids, self._close]

    def _render(self, rule: Rule) -> str:
        reply: Plain = {"role": "assistant", "content": rule.say}
        if rule.think:
            reply["reasoning_content"] = rule.think
        if rule.calls:
            reply["tool_calls"] = [
                {
                    "id": f"call_{at}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(rule.calls)
            ]
        # Render a dialogue with the reply and cut out what follows the opening of its turn.
        whole = self.renderer.template.text([_QUESTION, reply], None, add_generation_prompt=False)
        if not whole.startswith(self._opened):
            raise BadRequest(
                "the chat template does not continue its own opening of a turn with the reply: "
                "write the reply with raw",
                param="script",
            )
        body = whole[len(self._opened) : whole.rfind(self._close_text)]
        return body if rule.think else body.removeprefix(_NO_THOUGHT)

    def _close_id(self) -> int:
        """Return the token that ends an assistant turn."""
        template = self.renderer.template
        whole = template.text([_QUESTION, _ANSWER], None, add_generation_prompt=False)
        rest = template.encode(whole.rpartition(str(_ANSWER["content"]))[2])
        ends = self.renderer.stop_token_ids
        return next((token for token in rest if token in ends), ends[0])
