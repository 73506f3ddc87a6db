"""Scripts that want to act outside, or not to end: they do neither."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_pipemem.errors import ConfigError
from megatron_pipemem.tools.advise import evaluation
from megatron_pipemem.tools.advise.evaluation import evaluated
from tests.watching.refusals import refused

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="runs bash")

ENDLESS = {
    "double-text": "a=x; while :; do a=$a$a; done",
    "double-array": 'a=(x); while :; do a=("${a[@]}" "${a[@]}"); done',
    "recursion": "unset FUNCNEST; f() { f; }; f",
    "source-itself": "source ./mine.sh; source ./mine.sh",
    "source-many": "for i in {1..1000}; do source ./f$i.sh; done",
    "fork-bomb": ":(){ :|:& };:",
    "fork-bomb-without-trap": "trap - DEBUG; shopt -u extdebug; f() { while :; do f & done; }; f",
    "loop": "while :; do :; done",
    "loop-that-ignores-signals": "trap '' TERM INT HUP; trap - DEBUG; set -m; while :; do read -t 1 x; done & wait",
    "flood-records": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&250; done",
    "flood-errors": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&2; done",
    "endless-word": "x=$(while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done)",
    "braces": "echo {1..100000000}; while :; do :; done",
    "directories": "shopt -s globstar; while :; do echo /**/*; done",
}
ACTING = {
    "redirections": "echo a > OUT/1; echo a >| OUT/2; echo a &> OUT/3; "
    "echo a >> OUT/4; echo a <> OUT/5; : > OUT/kept",
    "descriptors": "exec 7> OUT/1; echo a >&7; exec {fd}>OUT/2; echo b >&$fd; exec > OUT/3 2>&1; echo c",
    "after-cd": "unset -f cd; cd OUT; echo a > 1; set -o noclobber; echo a >| kept; set -r; echo a > 2",
    "history": "history -s a; history -w OUT/1; history -a OUT/2; HISTFILE=OUT/3; set -o history; fc -W",
    "coprocess": "coproc { echo a > OUT/1; }; cat > >(cat > OUT/2); mapfile -t z < <(echo > OUT/3); wait",
    "printf-mapfile": "printf -v 'x[$(echo > OUT/1)]' a; mapfile -C 'echo a > OUT/2; "
    ":' -c 1 z <<< a; read 'y[$(TOUCH OUT/3)]' <<< a",
    "programs": "TOUCH OUT/1; PATH=/bin:/usr/bin; touch OUT/2; "
    "/usr/bin/env touch OUT/3; command touch OUT/4; exec TOUCH OUT/5",
    "hash": "hash -p TOUCH zz; zz OUT/1; PATH=/bin; "
    "unset -f command_not_found_handle; touch OUT/2; builtin exec TOUCH OUT/3",
    "shells": "BASH_ENV=OUT/env.sh; ENV=OUT/env.sh; "
    "export BASH_ENV ENV; bash -c 'TOUCH OUT/1'; /bin/bash -c 'TOUCH OUT/2'",
    "builtins": "builtin enable -f /usr/lib/bash/mkdir mkdir; command enable -f mkdir mkdir; "
    "mkdir OUT/1; builtin mkdir OUT/2",
    "traps": "trap 'TOUCH OUT/1; echo > OUT/2' EXIT DEBUG ERR RETURN; PROMPT_COMMAND='echo > OUT/3'; "
    "PS4='$(TOUCH OUT/4)'; set -x; false",
    "redefinition": "__watch() { TOUCH OUT/1; }; __record() { TOUCH OUT/2; }; "
    "printf() { TOUCH OUT/3; }; torchrun a.py --x; echo > OUT/4",
    "signals": "kill -9 VICTIM; kill -STOP VICTIM; builtin kill -9 VICTIM; "
    "kill -9 -1; kill -STOP $PPID; kill 0; suspend -f",
    "tcp": "exec 5<>/dev/tcp/127.0.0.1/PORT; echo a >&5; "
    "echo a > /dev/tcp/127.0.0.1/PORT; echo a > /dev/udp/127.0.0.1/PORT",
    "limits": "unset -f ulimit; ulimit -v unlimited; ulimit -t unlimited; echo > OUT/1",
    "devices": "source OUT/fifo; source /dev/zero; cat /dev/random; "
    "read x < OUT/fifo; x=$(</dev/zero); mapfile < /dev/zero",
    "terminal": "set -m; sleep 100 & fg; read -p x y </dev/tty; select z in a; do :; done; echo > /dev/tty",
}  # fmt: skip


@pytest.mark.parametrize("script", ENDLESS.values(), ids=ENDLESS)
def test_a_script_without_an_end_is_ended(script, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_SECONDS", 1.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sh").write_text(script)
    start = time.monotonic()
    with refused("no-end"):
        evaluated(script, "mine.sh", folder=tmp_path)
    assert time.monotonic() - start < 60, "on an idle machine it takes 2 s at most; tests share theirs"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "kept").write_text("as it was")
    (folder / "env.sh").write_text(f"echo > {folder}/started\n")
    os.mkfifo(folder / "fifo")
    return folder


@pytest.mark.parametrize("script", ACTING.values(), ids=ACTING)
def test_nothing_outside_is_changed(script, out):
    victim = subprocess.Popen([shutil.which("sleep"), "60"])
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.01)
    before = sorted(path.name for path in out.iterdir())
    names = {"OUT": out, "TOUCH": shutil.which("touch"), "VICTIM": victim.pid, "PORT": server.getsockname()[1]}
    for name, value in names.items():
        script = script.replace(name, str(value))
    try:
        start = time.monotonic()
        with suppress(ConfigError):
            evaluated(script)
        assert time.monotonic() - start < 60, "4 s at most on an idle machine; tests share theirs"
        assert sorted(path.name for path in out.iterdir()) == before and (out / "kept").read_text() == "as it was"
        stat = Path(f"/proc/{victim.pid}/stat").read_text()
        assert victim.poll() is None and stat.rpartition(")")[2].split()[0] in "SRD"
        with pytest.raises(TimeoutError):
            server.accept()
    finally:
        victim.kill()
        victim.wait()
        server.close()


def test_the_scripts_do_act_where_they_may(out, monkeypatch):
    """Without the filter, the same scripts write: the tests above can fail."""
    text = "; ".join(ACTING[name].replace("OUT", str(out)) for name in ("redirections", "history"))
    subprocess.run([shutil.which("bash"), "-c", text], capture_output=True)
    assert {"1", "2", "3", "4", "5"} <= {path.name for path in out.iterdir()} and (out / "kept").read_text() == ""


def test_no_process_is_left():
    name = f"bomb-{os.getpid()}.sh"  # other tests evaluate scripts at the same time
    with refused("no-end"):
        evaluated(":(){ :|:& };:", name)
    time.sleep(0.1)
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                assert name not in (path / "cmdline").read_text(errors="replace")


@pytest.mark.parametrize(
    "record",
    [
        "1.1:run\\0001.1:x\\0001.1;\\0",
        "\\377\\376\\000:::;;\\000need\\000",
        "1.1:run\\0001.1:9\\0001.1;\\0",
        "1.2:exit\\0001.2;\\0",
    ],
)
def test_forged_records_are_words_at_most(record):
    read = evaluated(
        f"printf '{record}' >&250; printf '7.7:run\\0007.7:0\\0007.7:forged\\0007.7;\\0' >&250; torchrun a.py"
    )
    assert read.commands[-1] == ["torchrun", "a.py"] and ["forged"] in read.commands
