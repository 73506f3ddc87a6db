"""Random launch scripts: nested assignments, arrays, ``case``, loops, functions, arithmetic and here-documents."""

from __future__ import annotations

from random import Random

_NAMES = ("A", "B", "C", "D")
_WORDS = ("x", "8b", "two words", "a*b", "", "--flag", "7", "12", "x=y", "$HOME", "it's", "[0]*3")


class _Writer:
    """Writes one script. Variables hold numbers (``A`` to ``D``), texts (``T``) or arrays (``L``)."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def number(self) -> str:
        kind = self.random.randrange(5)
        if kind == 0:
            return str(self.random.randrange(1, 20))
        if kind == 1:
            return f"${{{self.random.choice(_NAMES)}:-{self.random.randrange(9)}}}"
        if kind == 2:
            return f"$(( {self.sum()} ))"
        if kind == 3:
            return f"$(echo {self.random.randrange(9)})"
        return f"${self.random.choice(_NAMES)}"

    def sum(self) -> str:
        terms = [self.random.choice([*_NAMES, "3", "0x10", "2**3"]) for _ in range(self.random.randint(1, 3))]
        text = f" {self.random.choice('+-*')} ".join(terms)
        return f"({text}) > 5 ? {self.random.choice(_NAMES)} : 4" if self.random.random() < 0.2 else text

    def quoted(self) -> str:
        text = self.random.choice(_WORDS)
        how = self.random.randrange(4)
        if how == 0:
            return '"' + text.replace("$", "\\$") + '"'
        if how == 1:
            return "'" + text.replace("'", "'\\''") + "'"
        if how == 2:
            return f'"${{T:-"{self.random.choice("abc")} d"}}"'
        return f'"{self.random.choice("pq")}-${self.random.choice(_NAMES)}"'

    def launch(self) -> str:
        words = [
            self.random.choice(('"${L[@]}"', "${L[*]}", "$T", '"$T"', self.quoted(), self.number())) for _ in range(4)
        ]
        words += self.random.choice(([], ['"$@"'], ["${T%% *}"], ["${L[0]}", "${#L[@]}"], ["--n=${A}x"]))
        command = f"torchrun train.py {' '.join(words)}"
        return self.random.choice(
            (command, f"{command} > log 2>&1", f"{command} | tee -a log", f"if ! {command}; then :; fi", f"eval {command!r}"
             if "'" not in command and '"' not in command else command, f"CMD=({command})\n\"${{CMD[@]}}\"")
        )  # fmt: skip

    def condition(self) -> str:
        name = self.random.choice(_NAMES)
        return self.random.choice(
            (f"[ ${name} -gt {self.random.randrange(12)} ]", f"[[ $T == *d* || ${name} -le 4 ]]", f"(( {self.sum()} > 6 ))",
             f'[ -z "$T" ] && [ "${name}" != 3 ]', '[[ "$T" =~ ^a ]]')
        )  # fmt: skip

    def statement(self, depth: int) -> str:
        kind = self.random.randrange(14 if depth else 7)
        name = self.random.choice(_NAMES)
        if kind == 0:
            return f"{name}={self.number()}"
        if kind == 1:
            return f"T={self.quoted()}"
        if kind == 2:
            return f"L{self.random.choice(('', '+'))}=({self.quoted()} {self.number()} {self.quoted()})"
        if kind == 3:
            return self.random.choice(
                (f"(({name}+={self.random.randrange(9)}))", f"let {name}={self.sum().replace(' ', '')!r}")
            )
        if kind == 4:
            return f"read -r T <<EOF\n{self.random.choice('ab')} ${name}\nEOF"
        if kind in (5, 6):
            return self.launch()
        body = self.block(depth - 1)
        if kind in (7, 8):
            return f"if {self.condition()}; then\n{body}\nelse\n{self.block(depth - 1)}\nfi"
        if kind in (9, 10):
            return (
                f"case ${name} in\n  [0-4])\n{body}\n;;\n  5|6|7)\n{self.block(depth - 1)}\n;;\n  *) T=other ;;\nesac"
            )
        if kind == 11:
            return f"for {name} in 1 {self.number()} 3; do\n{body}\n[[ ${name} == 3 ]] && break\ndone"
        if kind == 12:
            return f"for ((i = 0; i < 2; i++)); do\n{body}\ndone"
        return f"f{depth}() {{\nlocal {name}=$1\n{body}\n}}\nf{depth} {self.number()} {self.quoted()}"

    def block(self, depth: int) -> str:
        return "\n".join(self.statement(depth) for _ in range(self.random.randint(1, 3)))


def script(seed: int) -> str:
    """Return a script that starts ``torchrun`` at least once."""
    writer = _Writer(Random(seed))
    start = "\n".join(f"{name}={writer.random.randrange(9)}" for name in _NAMES)
    lines = "\n".join(writer.statement(2) for _ in range(6))
    return f"set -- one 'two three'\n{start}\nT=\nL=()\n{lines}\n{writer.launch()}\n"
