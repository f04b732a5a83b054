"""Runs one untrusted program; started by :mod:`flash_dllm.eval.sandbox` in a fresh interpreter, never imported.

Arguments: folder, bytes of memory, seconds of processor time, bytes a file may have, the file descriptor that its
verdict goes to, ``namespaces`` or ``hook``. Stdin is the program.

With ``namespaces`` (Linux) the program has no network, sees its own processes only, and may write nowhere but in its
folder, which lives in memory. With ``hook`` an audit hook of the interpreter refuses sockets and new processes:
that stops a program that does something by accident, not one that looks for a way around.
"""

import ctypes
import os
import resource
import signal
import sys
import traceback

NEW_USER, NEW_NET, NEW_MOUNT, NEW_IPC, NEW_PID = 0x10000000, 0x40000000, 0x20000, 0x08000000, 0x20000000
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, READ_ONLY, MOUNT_SETATTR = -100, 0x8000, 1, 442
PDEATHSIG, NO_NEW_PRIVS = 1, 38
REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "ctypes.",
    "pty.",
)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _call(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _namespaces(folder: str, memory: int, pipe: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _call("unshare", libc.unshare(NEW_USER | NEW_NET | NEW_MOUNT | NEW_IPC | NEW_PID))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"65534 {user} 1"),
        ("gid_map", f"65534 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("mount", libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    _call("mount", libc.mount(b"/", b"/", None, BIND | RECURSIVE, None))
    read_only = _Attributes(READ_ONLY, 0, 0, 0)
    size = ctypes.sizeof(read_only)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(read_only), size)
    _call("mount_setattr", result)
    _call("mount", libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={memory // 4}".encode()))
    # The first process of the new namespace ends with this one, and every process in it ends with the first.
    _fork_and_wait(libc, pipe)
    _fork_and_wait(libc, pipe)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call("capset", libc.capset(header, nothing))
    _call("prctl", libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))


def _fork_and_wait(libc: ctypes.CDLL, pipe: int) -> None:
    """Go on in a child; the parent waits and ends as the child did."""
    child = os.fork()
    if child == 0:
        libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _hook(event: str, _arguments: tuple[object, ...]) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not allowed here")


def _limits(memory: int, seconds: int, file_size: int) -> None:
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard),) * 2)


def main() -> None:
    folder, memory, seconds, file_size, out, mode = sys.argv[1:]
    pipe = int(out)
    program = sys.stdin.buffer.read().decode("utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limits(int(memory), int(seconds), int(file_size))
    if mode == "namespaces":
        try:
            _namespaces(folder, int(memory), pipe)
        except OSError as error:
            os.write(pipe, f"unavailable\n{error}".encode())
            os._exit(1)
    os.chdir(folder)
    if mode == "hook":
        sys.addaudithook(_hook)
    try:
        code = compile(program, "<program>", "exec")
        exec(code, {})
        verdict = "passed"
    except BaseException as error:
        verdict = "failed\n" + "".join(traceback.format_exception_only(error)).strip()[-500:]
    os.write(pipe, verdict.encode("utf-8", "replace"))
    os._exit(0)


main()
