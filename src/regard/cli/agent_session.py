"""A conversation with an agent in the terminal: its trace is printed while it happens, and appended to a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from regard.agents.loop import AgentLimits, AgentMessage, TraceEvent, run_agent
from regard.agents.model_writer import ModelWriter
from regard.agents.tool import Toolbox
from regard.cli.chat_terminal import CONTROL, open_terminal

if TYPE_CHECKING:
    from regard.language_model import LanguageModel

SHOWN_LINES = 12  # of a result; the trace file has all
REASONS = {
    "steps": "no answer after {steps} replies; raise --max-steps",
    "tokens": "no answer within {tokens} tokens, or the model's context; raise --max-tokens or --context",
    "repeated": "the model repeats the same call, so it was stopped",
}


class AgentSession:
    def __init__(
        self,
        llm: "LanguageModel",
        tools: Toolbox,
        limits: AgentLimits,
        system: str | None = None,
        trace: Path | None = None,
        **sampling: Any,
    ):
        self.console, self.notices = Console(highlight=False), Console(stderr=True, highlight=False)
        self.tools, self.limits, self.trace = tools, limits, trace
        self.writer = ModelWriter(llm.tokenizer, llm.texts, llm.grammars, **sampling)
        self.reply = ""  # the last one
        self.messages: list[AgentMessage] = [] if system is None else [{"role": "system", "content": system}]

    def converse(self) -> None:
        """Answer every line, until the end of the input or a second Ctrl-C in a row."""
        terminal = open_terminal()
        terminal.notice(f"tools: {', '.join(self.tools.names) or 'none'}. Ctrl-C stops an answer, Ctrl-D leaves.")
        interrupted = False
        while True:
            try:
                line = terminal.read().strip()
                interrupted = False
                if line:
                    self.answer(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                terminal.notice("stopped; press Ctrl-C again, or Ctrl-D, to leave")

    def answer(self, question: str) -> str | None:
        """The answer, or None. A question that was interrupted or failed is forgotten."""
        before = len(self.messages)
        self.messages.append({"role": "user", "content": question})
        answer, calls = None, 0
        try:
            for event in run_agent(self.writer, self.tools, self.messages, self.limits):
                self.show(event)
                self.save(event)
                calls += event.kind == "call"
                answer = event.fields.get("answer") if event.kind == "end" else answer
        except BaseException:
            del self.messages[before:]
            raise
        if answer is not None and not calls and self.tools.tools:
            self.notice("(no tool was called)", "dim")
        return answer

    def save(self, event: TraceEvent) -> None:
        if self.trace is not None:
            with self.trace.open("a", encoding="utf-8") as file:
                file.write(event.to_json() + "\n")

    def show(self, event: TraceEvent) -> None:
        """Calls and results go to standard error, the answer to standard output."""
        fields = event.fields
        match event.kind:
            case "call":
                arguments = ", ".join(f"{name}={value!r}" for name, value in fields["arguments"].items())
                self.notice(f"{event.step}  {fields['name']}({arguments})", "cyan")
            case "result":
                lines = fields["text"].splitlines() or [""]
                more = [f"… {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
                text = "\n".join(f"   {line}" for line in [*lines[:SHOWN_LINES], *more])
                self.notice(text, "red" if fields["error"] else "dim")
            case "end" if fields["reason"] == "answer":
                print(CONTROL.sub("�", fields["answer"]) if self.console.is_terminal else fields["answer"])
            case "reply":
                self.reply = fields["text"].strip()
            case "end":
                if fields["reason"] == "tokens" and self.reply:
                    self.notice(f"the last reply, which is not complete: {self.reply}", "dim")
                self.notice(REASONS[fields["reason"]].format(steps=self.limits.steps, tokens=self.limits.tokens), "red")

    def notice(self, text: str, style: str) -> None:
        """Without markup, and without the control characters of a hostile result."""
        self.notices.print(Text(CONTROL.sub("�", text), style), soft_wrap=True)
