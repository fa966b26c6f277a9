"""`regard chat`: the conversation and its commands, the editing of input, and the program in a pseudo-terminal."""

import io
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.document import Document
from prompt_toolkit.input import DummyInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from regard.cli import chat_terminal
from regard.cli.conversation import COMMANDS, Conversation
from regard.language_model import LanguageModel
from tests.cli.conftest import regard
from tests.training.tiny import SPEC, TOKENIZER

GREEDY = {"max_new": 6, "temperature": 0.0}
PASTE = "\x1b[200~first line\n\nsecond line\x1b[201~"


class Script:
    """A terminal whose input is a list of lines; an exception in the list is raised."""

    def __init__(self, lines: list):
        self.lines, self.notices, self.answers = list(lines), [], []
        self.on_chunk: Callable[[], None] = lambda: None

    def read(self) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    def notice(self, text: str) -> None:
        self.notices.append(text)

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        self.answers.append("")

        def show(text: str) -> None:
            self.answers[-1] += text
            self.on_chunk()

        yield show


@pytest.fixture(scope="module")
def llm() -> LanguageModel:
    return LanguageModel(SPEC.build(seed=3), TOKENIZER, context=60, rows=1)


def talk(llm: LanguageModel, *lines: object, **options: object) -> tuple[Conversation, Script]:
    script = Script(list(lines))
    conversation = Conversation(llm, script, **(GREEDY | options))
    conversation.run()
    return conversation, script


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_messages_are_answered_with_the_conversation_before_them(llm: LanguageModel) -> None:
    conversation, script = talk(llm, "Where is Anna?", "", "  ", "And Ben?", system="Be brief.")
    assert roles(conversation) == ["user", "assistant"] * 2
    assert script.answers[0] == llm.chat(
        [{"role": "system", "content": "Be brief."}, conversation.messages[0]], **GREEDY
    )
    assert script.answers[1] == conversation.messages[3]["content"] == llm.chat(conversation.visible[:-1], **GREEDY)


def test_commands_change_the_conversation(llm: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    conversation, script = talk(
        llm, "Anna", "Ben", "/undo", "/system Be brief.", "/set temperature 0.5", "/set max_new=3", "/retry",
        f"/save {file}", f"/save {file}", "/new", "/quit", "never read",
    )  # fmt: skip
    assert conversation.messages == [] and conversation.options == {"max_new": 3, "temperature": 0.5}
    assert len(script.answers) == 3 and script.lines == ["never read"]
    saved = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant"] and saved[1]["content"] == "Anna"
    loaded, _ = talk(llm, f"/load {file}", "Ben")
    assert loaded.system == "Be brief." and roles(loaded) == ["user", "assistant"] * 2
    assert loaded.messages[:2] == saved[1:]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/hepl", "there is no command /hepl; did you mean '/help'?"),
        ("/undo", "there is no turn yet"),
        ("/retry", "there is no turn yet"),
        ("/set temprature 1", "did you mean 'temperature'?"),
        ("/set temperature -1", "temperature=-1.0 must be at least 0"),
        ("/set temperature hot", "'hot' is not a number"),
        ("/save", "name a file"),
        ("/save {folder}/other.txt", "other.txt is not a conversation"),
        ("/load {folder}/other.txt", "other.txt is not a conversation"),
        ("/load {folder}/missing", "No such file"),
        ("/help", "remove the last message and its answer"),
        ("/set", "max_new=6  temperature=0.0"),
    ],
)
def test_a_command_prints_its_result_or_its_error(llm: LanguageModel, tmp_path: Path, line: str, expected: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text("[1, 2]")
    conversation, script = talk(llm, line.format(folder=tmp_path))
    assert expected in "\n".join(script.notices) and script.answers == []
    assert conversation.options == GREEDY and other.read_text() == "[1, 2]"


def test_help_lists_every_command(llm: LanguageModel) -> None:
    _, script = talk(llm, "/help")
    assert all(command.usage in script.notices[0] for command in COMMANDS.values())


def test_a_path_and_a_double_slash_are_messages(llm: LanguageModel) -> None:
    conversation, _ = talk(llm, "/etc/x", "//help")
    assert [m["content"] for m in conversation.messages[::2]] == ["/etc/x", "/help"]


def test_an_interrupt_stops_the_answer_and_keeps_its_beginning(llm: LanguageModel) -> None:
    script = Script(["Anna", "/set max_new 4", "Ben"])
    script.on_chunk = lambda: os.kill(os.getpid(), signal.SIGINT) if len(script.answers) == 1 else None
    conversation = Conversation(llm, script, max_new=40, temperature=0.0)
    conversation.run()
    assert script.notices[0] == "(stopped)" and roles(conversation) == ["user", "assistant"] * 2
    whole = llm.chat("Anna", max_new=40, temperature=0)
    partial = conversation.messages[1]["content"]
    assert partial == script.answers[0] and 0 < len(partial) < len(whole) and whole.startswith(partial)
    assert llm.engine.idle


def test_the_second_interrupt_in_a_row_at_the_prompt_leaves(llm: LanguageModel) -> None:
    script = Script([KeyboardInterrupt(), "Anna", KeyboardInterrupt(), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        Conversation(llm, script, **GREEDY).run()
    assert script.lines == [] and len(script.answers) == 1
    assert script.notices == ["Press Ctrl-C again, or Ctrl-D, to leave."] * 2


def test_the_oldest_turns_are_dropped_when_the_context_is_full(llm: LanguageModel) -> None:
    conversation, script = talk(llm, *["Where is Anna now?"] * 8)
    assert roles(conversation) == ["user", "assistant"] * 8 and conversation.first > 0
    assert "exceeds the context of 60 tokens: the model no longer reads the oldest turn." in "".join(script.notices)
    assert conversation.visible[0]["role"] == "user"
    assert len(llm.encode_chat(conversation.visible[:-1])) + 6 <= 60
    conversation.handle("/undo")
    assert len(conversation.messages) == 14


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_kept(llm: LanguageModel) -> None:
    conversation, script = talk(llm, "Anna", "long " * 100, "/retry")
    assert "must fit into 60; shorten it" in script.notices[0] and "conversation is kept" in script.notices[0]
    assert len(script.notices) == 1 and conversation.first == 0
    assert roles(conversation) == ["user", "assistant"] and len(script.answers) == 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (PASTE + "\r", "first line\n\nsecond line"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("wrong\x1b[D\x7fx\r", "wroxg"),  # left, backspace
        ("\x1b[A\r", "earlier message"),  # up
    ],
    ids=["paste", "alt-enter", "backslash", "editing", "history"],
)
def test_input_is_edited(keys: str, expected: str, tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("\n# 2026-01-01\n+earlier message\n")
    with create_pipe_input() as stream:
        stream.send_text(keys)
        assert chat_terminal.edited_input(history, input=stream, output=DummyOutput()).prompt() == expected


def test_commands_are_completed() -> None:
    session = chat_terminal.edited_input(None, input=DummyInput(), output=DummyOutput())
    found = {text: [c.text for c in session.completer.get_completions(Document(text), None)] for text in ("/un", "un")}
    assert found == {"/un": ["/undo"], "un": []}


def test_interrupts_and_the_end_of_the_input_leave_the_prompt() -> None:
    for key, raised in (("\x03", KeyboardInterrupt), ("\x04", EOFError)):
        with create_pipe_input() as stream:
            stream.send_text(("text" if raised is KeyboardInterrupt else "") + key)
            with pytest.raises(raised):
                chat_terminal.edited_input(None, input=stream, output=DummyOutput()).prompt()


def test_without_prompt_toolkit_lines_are_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Lines(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys, "stdin", Lines("one\\\ntwo\n"))
    assert chat_terminal.open_terminal().read() == "one\ntwo"
    assert "pip install 'regard[chat]'" in capsys.readouterr().err


def test_the_history_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = chat_terminal.history_file()
    assert path == tmp_path / "state" / "regard" / "chat_history"
    path.chmod(0o644)
    chat_terminal.history_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert chat_terminal.history_file() is None


def test_markdown_blocks_are_split_outside_code_blocks_and_lists() -> None:
    assert chat_terminal.split_blocks("a\n\nb") == ("a\n\n", "b")
    assert chat_terminal.split_blocks("a\n\n") == ("", "a\n\n")
    assert chat_terminal.split_blocks("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert chat_terminal.split_blocks("```\na\n\nb\n```\n\nc\n\n   d") == ("```\na\n\nb\n```\n\n", "c\n\n   d")


def test_markdown_is_rendered_and_escape_sequences_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = chat_terminal.RichTerminal(session=None)  # type: ignore[arg-type]
    for no_color in (False, True):
        output = io.StringIO()
        terminal.console = Console(file=output, force_terminal=True, width=60, no_color=no_color)
        monkeypatch.setattr(sys, "stdout", output)
        with terminal.answer() as show:
            for chunk in ("# Title\n", "\nsome **bold**", " text\x1b]0;owned\x07\n\n- item"):
                show(chunk)
        shown = output.getvalue()
        assert ("**bold**" in shown) == no_color and "\x1b]0" not in shown and "owned" in shown and "item" in shown


def test_piped_lines_are_messages_and_an_empty_line_is_none(demo_run: Path) -> None:
    lines = "Where is Anna?\n\n/hepl\n/new\nWhere\\\nis Ben?\n"
    result = regard("chat", demo_run, "--max-new", 4, "--temperature", 0, stdin=lines)
    assert result.exit_code == 0 and result.stdout.count("model") == 2
    assert "did you mean '/help'?" in result.stderr and "/help lists the commands" in result.stderr


def test_a_conversation_with_few_bits_a_smaller_cache_and_drafts(demo_run: Path) -> None:
    options = ("--quantize", "int8", "--cache", "int8", "--speculate", "ngram")
    result = regard("chat", demo_run, "--max-new", 4, "--temperature", 0, *options, stdin="Where is Anna?\n")
    assert result.exit_code == 0 and result.stdout.count("model") == 1
    assert "format='int9' is unknown" in str(regard("chat", demo_run, "--quantize", "int9", stdin="").exception)


class Program:
    """`regard chat` in a pseudo-terminal."""

    def __init__(self, *command: str, **env: str):
        self.handle, side = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, close_fds=True, start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | env,
            preexec_fn=lambda: take_terminal(),
        )  # fmt: skip
        os.close(side)
        self.output = ""

    def send(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern occurs; it and all before it is removed from the output."""
        while not (found := re.search(pattern, self.output)):
            try:
                data = os.read(self.handle, 4096)
            except OSError:  # the program has ended
                data = b""
            assert data, f"{pattern!r} is not in {self.output!r}"
            self.output += data.decode(errors="replace")
            if "\x1b[6n" in data.decode(errors="replace"):
                self.send("\x1b[1;1R")  # the position of the cursor, which prompt_toolkit asks for
        self.output = self.output[found.end() :]
        return found[0]


def take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_the_program_in_a_terminal(tmp_path: Path) -> None:
    """A pasted text with an empty line is one message; Ctrl-C stops an answer, and two of them leave."""
    env = {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = Program(sys.executable, "-m", "tests.cli.endless_chat", **env)
    program.wait_for("/help lists the commands")
    program.wait_for("you")
    program.send(PASTE)
    program.wait_for("second line")
    program.send("\r")
    program.wait_for("again and again")
    program.send("\x03")
    program.wait_for(r"\(stopped\)")
    program.wait_for("you")
    program.send("/undo\r")
    program.wait_for("The last turn is removed; 0 messages are left")
    program.send("a line\x03")
    program.wait_for("Ctrl-C again")
    program.wait_for("you")
    program.send("\x03")
    assert program.process.wait(timeout=60) == 130
    history = (tmp_path / "regard" / "chat_history").read_text()
    assert "+first line\n+\n+second line\n" in history and "+/undo" in history
    os.close(program.handle)
