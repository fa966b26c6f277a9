"""The python tool: programs in a subprocess that gave up its rights before they start (regard/agents/sandboxed.py).

What always holds: none of the caller's environment variables, a temporary folder that is deleted, and limits of CPU
time, wall-clock time, memory, file size and output. What Linux must support: no network; no files but those of Python,
of system folders such as /usr, and of the temporary folder; no processes outside. `python_limits()` says which of these
hold here. It is no virtual machine: a program that uses a fault of the kernel is not stopped.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from regard.agents import sandboxed
from regard.agents.tool import AgentTool, ToolFailure, text_arguments

SECONDS, MEMORY, OUTPUT = 10, 1 << 30, 4000  # of CPU time per process; bytes per process; characters of the result
WAITED = 5  # seconds of wall-clock time beyond those of CPU time
ISOLATED_FROM = {sandboxed.NETWORK, sandboxed.FILES, sandboxed.PROCESSES}  # if the system supports it
PROGRAM = 20_000  # characters of a program


def python_tool(seconds: int = SECONDS, memory: int = MEMORY) -> AgentTool:
    return AgentTool(
        "python",
        "Runs a Python program and returns what it prints. It has the standard library, no network and no files.",
        text_arguments(program="The program; print the result"),
        lambda arguments: run_python(arguments["program"], seconds, memory),
    )


def python_limits() -> set[str]:
    """Of `network`, `files` and `processes`, what programs are isolated from on this system."""
    held, _, _ = run_sandboxed("", SECONDS, MEMORY)
    return set(held.split())


def run_python(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    if len(program) > PROGRAM:
        raise ToolFailure(f"the program has {len(program)} characters; at most {PROGRAM} are run")
    _, output, code = run_sandboxed(program, seconds, memory)
    text = output if len(output) <= OUTPUT else f"{output[:OUTPUT]}\n(cut off after {OUTPUT} characters)"
    if code in (-signal.SIGKILL, *(128 + each for each in (signal.SIGXCPU, signal.SIGKILL))):
        times = f"{seconds} s of CPU time or {seconds + WAITED} s in all"
        raise ToolFailure(f"the program took more than {times}, or too much memory\n{text}".strip())
    if code:
        raise ToolFailure(f"the program failed\n{text}".strip())
    return text.strip() or "(nothing was printed)"


def run_sandboxed(program: str, seconds: int, memory: int) -> tuple[str, str, int]:
    """The limits that hold, the output with the errors, and the exit code; -SIGKILL after the time."""
    with tempfile.TemporaryDirectory(prefix="regard-python-") as folder, tempfile.TemporaryFile() as output:
        os.chmod(folder, 0o700)
        command = [sys.executable, "-I", str(Path(sandboxed.__file__)), folder, str(seconds), str(memory)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env={}, cwd=folder, start_new_session=True
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds + WAITED)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also what the program has started: they are in its session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        held, _, text = output.read(4 * OUTPUT + 200).decode("utf-8", "replace").partition("\n")
        return held, text, process.returncode
