"""Runs a Python program with as few rights as the system gives: the child process of the python tool.

    python -I sandboxed.py FOLDER SECONDS MEMORY     the program comes from standard input

Before the program starts, this process limits itself for good, each limit by a means of Linux:

    always       CPU time, memory, file size, open files and (but for root) processes: rlimits
    network      no sockets: a filter of system calls (seccomp), and a namespace without interfaces
    files        only FOLDER can be written; only FOLDER, system folders and Python's can be read: Landlock
    processes    no process outside can be seen or signalled, and all inside end with the first: a PID namespace

The first line of its output names those that hold. It runs with -I from its path, so it imports nothing of regard.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

NETWORK, FILES, PROCESSES = "network", "files", "processes"
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWPID = 0x10000000, 0x40000000, 0x08000000, 0x20000000
SET_DEATH_SIGNAL, SET_NO_NEW_PRIVS, SET_SECCOMP = 1, 38, 22  # of prctl
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, on all architectures
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # of files, by the version of Landlock
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")
MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # the audit number, and that of socket()
IO_URING_SETUP, X32 = 425, 0x40000000
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM
FILE_BYTES, MOST_PROCESSES, OPEN_FILES = 10 << 20, 16, 64

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    folder, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    program = sys.stdin.read()
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    separated = separate()
    if separated and (child := os.fork()):  # the child is process 1 of the namespace: its end is that of all others
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    held = [PROCESSES] if separated else []
    held += [name for name, limit in ((FILES, lambda: limit_files(folder)), (NETWORK, refuse_sockets)) if limit()]
    for kind, value in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, MOST_PROCESSES), (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (value, value))
    os.write(1, (" ".join(held) + "\n").encode())
    os.chdir(folder)
    os.execve(sys.executable, [sys.executable, "-I", "-c", program], {"HOME": folder, "TMPDIR": folder})


def separate() -> bool:
    """Namespaces of its own for processes, network and shared memory."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID) != 0:
        return False
    try:  # the same user in the new namespace, so that files keep their owner
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass  # an unmapped user has fewer rights, not more
    return True


def limit_files(folder: str) -> bool:
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    rights = RIGHTS[min(version, 3)]
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(ctypes.c_uint64(rights)), 8, 0)
    if rules < 0:
        return False
    allow(rules, folder, rights & ~EXECUTE)
    for path in {*READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.executable)}:
        allow(rules, path, EXECUTE | READ_FILE | READ_FOLDER)
    allow(rules, "/dev/null", READ_FILE | WRITE_FILE)
    return libc.syscall(RESTRICT_SELF, rules, 0) == 0


def allow(rules: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this system
    if not os.path.isdir(path):
        rights &= EXECUTE | WRITE_FILE | READ_FILE
    libc.syscall(ADD_RULE, rules, 1, ctypes.create_string_buffer(struct.pack("=Qi", rights, file)), 0)
    os.close(file)


def refuse_sockets() -> bool:
    """A filter of system calls: socket() and io_uring, which also opens sockets, are refused; other ABIs kill."""
    if platform.machine() not in MACHINES:
        return False
    audit, socket = MACHINES[platform.machine()]
    load, equal, above, result = 0x20, 0x15, 0x35, 0x06  # instructions of BPF: (code, jump if true, if false, value)
    filter = [
        (load, 0, 0, 4), (equal, 1, 0, audit), (result, 0, 0, KILL),
        (load, 0, 0, 0), (above, 0, 1, X32), (result, 0, 0, KILL),
        (equal, 1, 0, socket), (equal, 0, 1, IO_URING_SETUP), (result, 0, 0, REFUSE), (result, 0, 0, ALLOW),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in filter))
    program = ctypes.create_string_buffer(struct.pack("@HxxxxxxQ", len(filter), ctypes.addressof(code)))
    return libc.prctl(SET_SECCOMP, 2, program, 0, 0) == 0


if __name__ == "__main__":
    main()
