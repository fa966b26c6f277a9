"""The python tool: results, limits, and programs that try to get out."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.agents.python import ISOLATED_FROM, OUTPUT, python_limits, python_tool, run_python
from regard.agents.tool import ToolFailure

SOCKETS = [
    "import socket; socket.socket()",
    "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1/')",
    "import ctypes; libc = ctypes.CDLL(None, use_errno=True); assert libc.socket(2, 1, 0) >= 0, ctypes.get_errno()",
]
FILES = [
    "open('/etc/passwd').read()",
    "open({secret!r}).read()",
    "import os; os.unlink({secret!r})",
    "import os; os.rename({secret!r}, 'mine')",
    "import os; os.listdir({folder!r})",
    "import os; os.symlink({secret!r}, 'link'); open('link').read()",
    "import os; os.link({secret!r}, 'link'); open('link').read()",
    "open({folder!r} + '/evil', 'w')",
    "open('/tmp/regard-evil', 'w')",
    "open('/dev/shm/regard-evil', 'w')",
    "open('/proc/1/environ').read()",
    "import os; os.chmod({secret!r}, 0o777); os.truncate({secret!r}, 0); assert os.stat({secret!r}).st_size",
    "import subprocess; subprocess.run(['cat', {secret!r}], check=True)",
    "import sys; open(sys.executable, 'ab')",
]
PROCESSES = [
    "import os; os.kill({pid}, 9)",
    "import os; os.kill({pid}, 0)",
    "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
]


@pytest.fixture(scope="module")
def closed() -> set[str]:
    return python_limits()


def test_programs_print_results() -> None:
    tool = python_tool()
    assert tool.run({"program": "import math\nprint(math.comb(40, 20))"}) == "137846528820"
    assert tool.run({"program": "open('a', 'w').write('kept'); print(open('a').read())"}) == "kept"
    assert tool.run({"program": "x = 1"}) == "(nothing was printed)"
    with pytest.raises(ToolFailure, match="ZeroDivisionError"):
        tool.run({"program": "1 / 0"})
    with pytest.raises(ToolFailure, match="at most 20000 are run"):
        tool.run({"program": " " * 20_001})


def test_the_environment_is_empty_and_the_folder_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert run_python("import os; print(sorted(os.environ), os.listdir('.'))") == "['HOME', 'LC_CTYPE', 'TMPDIR'] []"
    folder = run_python("import os; print(os.getcwd())")
    assert Path(folder).name.startswith("regard-python-") and not Path(folder).exists()


@pytest.mark.parametrize("program", SOCKETS, ids=lambda text: text[:50])
def test_there_is_no_network(program: str, closed: set[str]) -> None:
    if "network" not in closed:
        pytest.skip("this system has no seccomp for this machine")
    with pytest.raises(ToolFailure, match="failed"):
        run_python(program)


@pytest.mark.parametrize("program", FILES, ids=lambda text: text[:50])
def test_there_are_no_other_files(program: str, tmp_path: Path, closed: set[str]) -> None:
    if "files" not in closed:
        pytest.skip("this system has no Landlock")
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    with pytest.raises(ToolFailure, match="failed"):
        run_python(program.format(secret=str(secret), folder=str(tmp_path)))
    assert secret.read_text() == "hidden" and [path.name for path in tmp_path.iterdir()] == ["secret.txt"]


@pytest.mark.parametrize("program", PROCESSES)
def test_other_processes_are_out_of_reach(program: str, closed: set[str]) -> None:
    if "processes" not in closed:
        pytest.skip("this system has no user namespaces")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(ToolFailure, match="failed"):
            run_python(program.format(pid=other.pid))
        assert other.poll() is None


def test_time_memory_output_and_files_are_limited() -> None:
    start = time.monotonic()
    for program in ("while True: pass", "import time; time.sleep(60)"):
        with pytest.raises(ToolFailure, match="took more than 1 s of CPU time or 6 s in all"):
            run_python(program, seconds=1)
    assert time.monotonic() - start < 30
    with pytest.raises(ToolFailure, match="MemoryError"):
        run_python("x = bytearray(1 << 40)")
    with pytest.raises(ToolFailure, match="File too large|Errno 27"):
        run_python("open('big', 'wb').write(bytes(20 << 20))")
    printed = run_python("print('a' * 1_000_000)")
    assert len(printed) < OUTPUT + 100 and "cut off" in printed


def test_what_a_program_starts_ends_with_it(tmp_path: Path, closed: set[str]) -> None:
    if "processes" not in closed:
        pytest.skip("this system has no user namespaces")
    mark = f"regard-{os.getpid()}-left"
    program = "import os, sys, time\nif os.fork() == 0:\n    os.setsid(); os.execv(sys.executable, [sys.executable, "
    program += f"'-c', 'import time; time.sleep(60)  # {mark}'])\ntime.sleep(0.3); print('done')"
    assert run_python(program) == "done"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    assert not [command for command in commands if mark.encode() in command]


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_all_limits_are_known(closed: set[str]) -> None:
    assert closed <= ISOLATED_FROM == {"network", "files", "processes"}
