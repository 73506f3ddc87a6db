"""Start bash where it can start no program, write no file and reach no network: the kernel refuses, by a seccomp filter.

This file is run as a program, by ``evaluation``, with nothing of this package loaded:
``closed.py CHANNEL FILES BASH PRELUDE NAME ARGUMENTS``. The descriptors CHANNEL and FILES become 250 and 251.

The filter lists the system calls that bash needs for its own language. All others fail. In addition:

* ``execve`` fails. Bash itself is started with ``execveat``, which bash never calls.
* Files are opened for reading only by the loader and for directories (``O_CLOEXEC``, which redirections do not set).
* Opening a file for writing returns descriptor 0, which is /dev/null and cannot be closed, so that a redirection to a file
  is what it would be, and writes nothing.
* Descriptor 2 cannot be replaced, so that errors of bash reach the reader from redirected commands too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

CHANNEL, FILES = 250, 251
CANNOT = 3  # exit status: there is no such filter here
_CPU_SECONDS = 2
_MEMORY = 96 << 20
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SIGKILL = 9
_EPERM, _EACCES, _ENOTTY, _ENOSYS = 1, 13, 25, 38

_NUMBERS = {
    "x86_64": "open 2 openat 257 close 3 dup2 33 dup3 292 execveat 322 execve 59 ioctl 16 prlimit64 302 clone3 435",
    "aarch64": "openat 56 close 57 dup3 24 execveat 281 execve 221 ioctl 29 prlimit64 261 clone3 435",
}
"""The system calls with a rule of their own, by machine: <asm/unistd_64.h>, and <asm-generic/unistd.h> for arm64."""
_ALLOWED = {
    "x86_64": """0 1 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 22 23 24 25 28 32 39 56 57 58 60 61 63 72 79 80 89 95 96 97
        98 99 100 102 104 107 108 110 111 115 118 120 121 124 130 131 158 186 202 204 217 218 228 229 230 231 247 262 267
        269 270 271 273 293 318 332 334 439""",
    "aarch64": """17 23 25 48 49 59 61 62 63 64 65 66 67 72 73 78 79 80 93 94 95 96 98 99 101 113 114 115 123 124 132 133
        134 135 139 148 150 153 155 156 158 160 163 165 166 169 172 173 174 175 176 177 178 179 214 215 216 220 222 226
        233 260 278 291 293 439""",
}
"""Those that are allowed with all arguments: reading and writing open descriptors, memory, handling signals, pipes, forks,
waiting, times, names and properties of files, and the process's own numbers."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _EQUAL, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4


def _argument(place: int) -> int:
    return 16 + 8 * place  # the low half


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions, each as operation, jump if true, jump if false, and operand."""
    names = _NUMBERS[machine].split()
    numbers = dict(zip(names[::2], map(int, names[1::2]), strict=True))
    created = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _FAIL | _EPERM)]
    lines.append((_LOAD, 0, 0, _NUMBER))
    for number in map(int, _ALLOWED[machine].split()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]

    def add(name: str, *block: tuple[int, int, int, int]) -> None:
        if name in numbers:
            lines.append((_EQUAL, 0, len(block), numbers[name]))
            lines.extend(block)

    def opening(place: int) -> tuple[tuple[int, int, int, int], ...]:
        return (
            (_LOAD, 0, 0, _argument(place)),
            (_ANY_BIT, 0, 1, created),
            (_RETURN, 0, 0, _FAIL),  # "fails" with the number 0: descriptor 0
            (_ANY_BIT, 0, 1, os.O_CLOEXEC),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _FAIL | _EACCES),
        )

    def except_for(place: int, descriptor: int) -> tuple[tuple[int, int, int, int], ...]:
        return (
            (_LOAD, 0, 0, _argument(place)),
            (_EQUAL, 0, 1, descriptor),
            (_RETURN, 0, 0, _FAIL),
            (_RETURN, 0, 0, _ALLOW),
        )

    add("open", *opening(1))
    add("openat", *opening(2))
    add(
        "close",
        (_LOAD, 0, 0, _argument(0)),
        (_EQUAL, 1, 0, 0),
        (_EQUAL, 0, 1, 2),
        (_RETURN, 0, 0, _FAIL),
        (_RETURN, 0, 0, _ALLOW),
    )
    add("dup2", *except_for(1, 2))
    add("dup3", *except_for(1, 2))
    add(
        "prlimit64",
        (_LOAD, 0, 0, _argument(2)),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | _EPERM),
    )
    add("execveat", (_RETURN, 0, 0, _ALLOW))
    add("execve", (_RETURN, 0, 0, _FAIL | _EACCES))
    add("ioctl", (_RETURN, 0, 0, _FAIL | _ENOTTY))
    add("clone3", (_RETURN, 0, 0, _FAIL | _ENOSYS))  # the C library then calls clone
    return [*lines, (_RETURN, 0, 0, _FAIL | _EPERM)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def close_in() -> bool:
    """Put this process and its children within the filter; return whether the kernel can do it."""
    if platform.machine() not in _NUMBERS or sys.platform != "linux":
        return False
    lines = b"".join(struct.pack("HBBI", op, true, false, k) for op, true, false, k in program(platform.machine()))
    instructions = ctypes.create_string_buffer(lines)
    filtered = _Program(len(lines) // 8, ctypes.addressof(instructions))
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    return not prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) and not prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filtered), 0, 0)


def main(channel: str, files: str, bash: str, prelude: str, name: str, *arguments: str) -> None:
    for own, kept in ((int(channel), CHANNEL), (int(files), FILES)):
        os.dup2(own, kept)
        os.close(own)
    with open(prelude, encoding="utf-8") as file:
        text = file.read()
    os.nice(19)
    for limit, most in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, FILES + 1),
    ):
        resource.setrlimit(limit, (most, most))
    program_file = os.open(bash, os.O_RDONLY | os.O_CLOEXEC)
    home = {"HOME": os.environ["HOME"]} if "HOME" in os.environ else {}
    if not close_in():
        sys.exit(CANNOT)
    words = [bash, "--norc", "--noprofile", "-c", text, name, *arguments]
    os.execve(program_file, words, {**home, "LC_ALL": "C", "PATH": "/dev/null"})


if __name__ == "__main__":
    main(*sys.argv[1:])
