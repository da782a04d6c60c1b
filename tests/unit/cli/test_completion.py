"""Completion: what each word may be, and the scripts in real shells."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.__main__ import complete_plugin
from services.cli.inspect import views
from services.cli.parser import NO_FILES, SCRIPTS, build_parser, candidates

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["exp"], ["explain"]),
        (["help", "do"], ["doctor", "down"]),
        (["ps", "--out"], ["--output"]),
        (["ps", "-o", "w"], ["wide"]),
        (["ps", "-n", "team", "--output", ""], ["json", "name", "wide", "yaml"]),
        (["top", "--sort", "m"], ["memory"]),
        (["completion", "b"], ["bash"]),
        (["ps", "my-pod", "--all"], ["--all-namespaces"]),
        (["explain", "--request", ""], []),
        (["ps", "-n", ""], []),
        (["none", "ex"], ["explain"]),
    ],
)
def test_a_word_continues_as_the_commands_parser_takes_it(
    words: list[str], expected: list[str]
) -> None:
    assert candidates(build_parser(), words) == expected


def test_no_name_of_the_cluster_is_a_command_of_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["web-0", "$(reboot)", "a;b", "*", "a\nb", "\x1b[2J", "node.example:1/2"]
    monkeypatch.setattr(views, "names_in_cluster", lambda *_: names)

    assert candidates(build_parser(), ["ps", ""]) == ["node.example:1/2", "web-0"]


def test_without_a_word_all_commands_are_offered() -> None:
    assert {"gpus", "ps", "help", "completion"} <= set(candidates(build_parser(), []))


def test_kubectl_gets_the_candidates_and_offers_no_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-leasehold", "gp"])

    complete_plugin()

    assert capsys.readouterr().out == f"gpus\n{NO_FILES}\n"


def in_path(folder: Path) -> dict[str, str]:
    program = folder / "leasehold"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)}


SHELLS = {
    "bash": "{script}\nCOMP_WORDS=(leasehold ps -o '') COMP_CWORD=3\n_leasehold\n"
    'printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": "{script}\ncomplete -C 'leasehold ps -o '",
    "zsh": "compdef() {{ :; }}\ncompadd() {{ print -l -- $found; }}\n{script}\n"
    "words=(leasehold ps -o '') CURRENT=4\n_leasehold",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_offers_the_values_of_a_flag(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    commands = SHELLS[shell].format(script=SCRIPTS[shell])

    done = subprocess.run(
        [program, "-c", commands], capture_output=True, text=True, check=True, env=in_path(tmp_path)
    )

    assert done.stdout.split() == ["json", "name", "wide", "yaml"]
