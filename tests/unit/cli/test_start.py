"""Help and commands that read start fast: clients of HTTP, which load nothing of the servers."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

FORBIDDEN = frozenset({"nats", "redis", "grpc", "aiohttp", "asyncio", "opentelemetry"})
MOST_YARDSTICKS = 5.0
"""CPU time of a command, in that of a loop of a million additions, which takes 0.05 to 0.1 s: the
processors of test machines differ, and change their speed. The slower loop, before or after the
command, counts."""
LOOP = """
began_s = time.process_time()
number = 0
while number < 1_000_000:
    number += 1
loops_s.append(time.process_time() - began_s)
"""
CODE = f"""
import json, sys, time
loops_s = []
{LOOP}
from services.cli.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as exit:
    assert not exit.code, exit.code
used_s = time.process_time() - loops_s[0]
modules = sorted(sys.modules)
{LOOP}
print(json.dumps([used_s / max(loops_s), modules]), file=sys.stderr)
"""


@pytest.fixture
def api() -> Iterator[str]:
    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pod = {"pod": "uid", "namespace": "default", "name": "p", "trace": {"trace": ""}}
            body = json.dumps({"read_at": 1.0, "idle_after_s": 600.0, **pod}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (("--help",), FORBIDDEN | {"rich"}),
        (("ps", "-o", "json"), FORBIDDEN | {"rich"}),
        *(
            (words, FORBIDDEN)
            for words in (("gpus",), ("ps",), ("top", "--once"), ("explain", "p"))
        ),
    ],
)
def test_a_reading_command_loads_no_client_of_a_server_and_takes_little_cpu(
    words: tuple[str, ...], forbidden: frozenset[str], api: str, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": api}}
    context = {"name": "c", "context": {"cluster": "c", "user": ""}}
    config.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "c"})
    )
    took = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-P", "-c", CODE, *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "PYTHONDONTWRITEBYTECODE": "",
                "HOME": str(tmp_path),
                "KUBECONFIG": str(config),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        yardsticks, modules = json.loads(done.stderr.splitlines()[-1])
        took.append(yardsticks)
        assert not {name.partition(".")[0] for name in modules}.intersection(forbidden)
        if yardsticks <= MOST_YARDSTICKS:
            break

    assert min(took) <= MOST_YARDSTICKS
