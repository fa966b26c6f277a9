"""A conversation in the terminal: its messages, its `/` commands, and the answers of the model.

All messages are kept, and the model reads the system message and the newest turns that fit into its context. A turn is
a user message with the answer.
"""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from regard.spec import suggest_name

if TYPE_CHECKING:
    from regard.language_model import LanguageModel

OPTIONS: dict[str, Callable[[str], Any]] = {  # what /set sets, and its type
    "max_new": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "seed": int,
}  # fmt: skip
ROLES = ("system", "user", "assistant")


class Terminal(Protocol):
    def read(self) -> str:
        """A message or command. Raises EOFError at the end of the input, KeyboardInterrupt after Ctrl-C."""
        ...

    def notice(self, text: str) -> None:
        """Print a message of the program."""
        ...

    def answer(self) -> AbstractContextManager[Callable[[str], None]]:
        """Opens an answer; yields the function that prints its next chunk."""
        ...


class Conversation:
    def __init__(self, llm: "LanguageModel", terminal: Terminal, system: str | None = None, **options: Any):
        self.llm, self.terminal, self.system = llm, terminal, system
        self.options: dict[str, Any] = options
        self.messages: list[dict[str, str]] = []
        self.first = 0  # index of the first message that the model reads

    def run(self) -> None:
        """Read and answer until the end of the input. A second Ctrl-C in a row at the prompt is raised."""
        interrupted = False
        while True:
            try:
                line = self.terminal.read()
                interrupted = False
                self.handle(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.terminal.notice("Press Ctrl-C again, or Ctrl-D, to leave.")

    def handle(self, line: str) -> None:
        """Answer a message, or execute a command. A message that begins with // is sent with one slash."""
        name, _, argument = line.strip().partition(" ")
        if re.fullmatch(r"/[a-z]+", name) is None:
            if line.strip():
                self.ask(line.removeprefix("/") if line.startswith("//") else line)
            return
        try:
            if name not in COMMANDS:
                raise ValueError(f"there is no command {name}; {suggest_name(name, list(COMMANDS))}")
            reply = COMMANDS[name].run(self, argument.strip())
        except (ValueError, OSError) as error:
            reply = str(error)
        if reply:
            self.terminal.notice(reply)

    def ask(self, content: str) -> None:
        """Append a user message and the answer; neither if there is no answer."""
        from regard.engine.request import GenerationError

        self.messages.append({"role": "user", "content": content})
        chunks: list[str] = []
        try:
            self.drop_oldest_turns()
            with self.terminal.answer() as show:
                asyncio.run(self.stream(chunks, show))
        except KeyboardInterrupt:  # asyncio.run has cancelled the request
            self.terminal.notice("(stopped)" if chunks else "(stopped before the first word; your message is removed)")
        except (ValueError, GenerationError) as error:
            self.terminal.notice(f"{error}\nYour message is removed; the conversation is kept.")
            chunks.clear()
        else:
            chunks = chunks or [""]
        if chunks:
            self.messages.append({"role": "assistant", "content": "".join(chunks)})
        else:
            self.messages.pop()

    async def stream(self, chunks: list[str], show: Callable[[str], None]) -> None:
        async for text in self.llm.astream(self.visible, **self.options):
            chunks.append(text)
            show(text)

    @property
    def visible(self) -> list[dict[str, str]]:
        """The messages that the model reads."""
        return [*self.system_message, *self.messages[self.first :]]

    @property
    def system_message(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def drop_oldest_turns(self) -> None:
        """Let the model read fewer turns if the prompt would leave little room for an answer.

        Raises ValueError if the newest message does not fit alone.
        """
        capacity = self.llm.engine.capacity
        room = min(self.options.get("max_new", 1), capacity // 4)
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user" and i > self.first]
        before, dropped = self.first, 0
        while (length := len(self.llm.encode_chat(self.visible))) + room > capacity and turns:
            self.first, dropped = turns.pop(0), dropped + 1
        if length >= capacity:
            self.first = before
            raise ValueError(
                f"the message has {length} tokens, but message and answer must fit into {capacity}; shorten it"
            )
        if dropped:
            self.terminal.notice(
                f"The conversation exceeds the context of {capacity} tokens: the model no longer reads the oldest "
                f"{'turn' if dropped == 1 else f'{dropped} turns'}."
            )

    # Commands: each returns what is printed

    def help(self, _: str) -> str:
        width = max(len(command.usage) for command in COMMANDS.values())
        lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS.values()]
        lines += ["", "Alt-Enter, or a backslash at the end of a line, continues on the next line."]
        return "\n".join([*lines, "Ctrl-C stops an answer. A message that begins with // is sent with one slash."])

    def new(self, _: str) -> str:
        self.messages, self.first = [], 0
        return "A new conversation."

    def set_system(self, text: str) -> str:
        self.system = text or None
        return "The system message is set." if text else "The system message is removed."

    def save(self, name: str) -> str:
        path = conversation_path(name)
        if path.exists():
            read_messages(path)  # raises ValueError for any other file, which is not overwritten
        path.write_text(json.dumps({"messages": [*self.system_message, *self.messages]}) + "\n", encoding="utf-8")
        return f"{len(self.messages)} messages are in {path}."

    def load(self, name: str) -> str:
        path = conversation_path(name)
        messages = read_messages(path)
        system = [message["content"] for message in messages if message["role"] == "system"]
        self.system = "\n".join(system) if system else None
        self.messages = [message for message in messages if message["role"] != "system"]
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()  # a message without an answer
        self.first = 0
        return f"{len(self.messages)} messages are read from {path}."

    def retry(self, _: str) -> str:
        before = list(self.messages)
        self.ask(self.pop_turn())
        if len(self.messages) < len(before):  # there is no new answer, so the old one stays
            self.messages = before
        return ""

    def undo(self, _: str) -> str:
        self.pop_turn()
        return f"The last turn is removed; {len(self.messages)} messages are left."

    def pop_turn(self) -> str:
        """Remove the last user message with its answer, and return the message."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            raise ValueError("there is no turn yet; write a message first")
        question = self.messages[turns[-1]]["content"]
        del self.messages[turns[-1] :]
        self.first = min(self.first, len(self.messages))
        return question

    def set_option(self, text: str) -> str:
        from regard.engine.request import Sampling

        name, _, value = text.replace("=", " ").partition(" ")
        if name:
            if name not in OPTIONS:
                raise ValueError(f"there is no option {name!r}; {suggest_name(name, list(OPTIONS))}")
            try:
                changed: dict[str, Any] = self.options | {name: OPTIONS[name](value)}
            except ValueError:
                raise ValueError(f"{name}={value.strip()!r} is not a number; write for example /set {name} 1") from None
            Sampling(**changed)  # raises ValueError
            self.options = changed
        shown = [f"{name}={value}" for name, value in self.options.items() if value is not None]
        return "  ".join(shown)

    def quit(self, _: str) -> str:
        raise EOFError


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Conversation, str], str]


COMMANDS = {
    "/help": Command("/help", "show this list", Conversation.help),
    "/new": Command("/new", "start a new conversation; the system message stays", Conversation.new),
    "/system": Command("/system TEXT", "set the system message; without TEXT, remove it", Conversation.set_system),
    "/retry": Command("/retry", "answer the last message again", Conversation.retry),
    "/undo": Command("/undo", "remove the last message and its answer", Conversation.undo),
    "/set": Command("/set NAME VALUE", f"set {', '.join(OPTIONS)}; alone, show them", Conversation.set_option),
    "/save": Command("/save FILE", "write the conversation as JSON", Conversation.save),
    "/load": Command("/load FILE", "continue a conversation that was saved", Conversation.load),
    "/quit": Command("/quit", "leave; so does Ctrl-D", Conversation.quit),
}


def conversation_path(name: str) -> Path:
    if not name:
        raise ValueError("name a file: /save FILE or /load FILE")
    return Path(name).expanduser()


def read_messages(path: Path) -> list[dict[str, str]]:
    """The messages of a saved conversation."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
        roles = [message["role"] for message in messages]
        if not all(role in ROLES for role in roles) or not all(isinstance(m["content"], str) for m in messages):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f'{path} is not a conversation; one has the form {{"messages": [{{"role": "user", "content": "…"}}, …]}}'
        ) from None
    return [{"role": message["role"], "content": message["content"]} for message in messages]
