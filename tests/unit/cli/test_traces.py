"""trace: spans from files, as a waterfall and as JSON."""

import json
from pathlib import Path

import pytest

from services.cli.inspect.views import waterfall
from shared.runtime.span_files import read_spans, span_views
from tests.support.snapshots import POD

TRACE = POD.pod.replace("-", "")


def line(span: str, parent: str, start_ms: int, end_ms: int, **changes: object) -> str:
    fields = {
        "trace": TRACE,
        "span": span,
        "parent": parent,
        "name": f"step {span}",
        "service": "leasehold-placer",
        "start_ns": start_ms * 1_000_000,
        "end_ns": end_ms * 1_000_000,
        "ok": True,
        "text": "",
        "attributes": {
            "k8s.namespace.name": "team",
            "k8s.pod.name": "first",
            "k8s.pod.uid": POD.pod,
        },
    }
    return json.dumps({**fields, **changes}) + "\n"


@pytest.fixture
def trace_files(tmp_path: Path) -> Path:
    (tmp_path / "watcher.jsonl").write_text(
        line("a", "", 0, 10) + line("x", "", 0, 9, trace="other")
    )
    (tmp_path / "placer.jsonl").write_text(
        line("b", "a", 10, 40) + line("c", "b", 40, 100, ok=False, text="no room", attributes={})
    )
    (tmp_path / "binder.jsonl").write_text('{"trace": "' + TRACE + '", "span": "cut sho')
    (tmp_path / "other.jsonl").write_text(line("y", "", 0, 5, attributes={"k8s.pod.name": "first"}))
    return tmp_path


def test_a_trace_is_found_by_the_pods_name_or_uid_and_a_cut_line_is_skipped(
    trace_files: Path,
) -> None:
    named = read_spans(trace_files, namespace="team", name="first")
    by_uid = read_spans(trace_files, namespace="default", name=POD.pod)

    assert named == by_uid
    assert {"a", "b", "c"} <= {span.span for span in named}
    assert read_spans(trace_files, namespace="team", name="second") == ()


def test_a_pod_has_the_trace_of_its_claim(tmp_path: Path) -> None:
    about = {
        "k8s.namespace.name": "team",
        "k8s.pod.name": "gpu",
        "leasehold.claim.uid": "uid-of-the-claim",
        "leasehold.claim.name": "gpu",
        "leasehold.claim.pods": ["first", "second"],
    }
    (tmp_path / "binder.jsonl").write_text(line("a", "", 0, 10, attributes=about))

    [span] = read_spans(tmp_path, namespace="team", name="second")

    assert span.claim == "gpu"
    assert read_spans(tmp_path, namespace="other", name="second") == ()


def test_the_newest_trace_of_a_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        line("old", "", 0, 1, trace="1" * 32) + line("new", "", 500, 501, trace="2" * 32)
    )

    (span,) = read_spans(tmp_path, namespace="team", name="first")

    assert span.span == "new"


def test_what_a_pod_waited_for_is_below_its_wait_and_fits_the_terminal(tmp_path: Path) -> None:
    text = line("a", "", 0, 90, notes=[(5_000_000, "no node has room " * 9)])
    (tmp_path / "a.jsonl").write_text(text)

    first, *notes = waterfall(span_views(read_spans(tmp_path, namespace="team", name="first")), 80)

    assert "step" in first
    assert " ".join(" ".join(notes).split()).startswith("0.0 s: no node has room no node has room")
    assert max(map(len, notes)) <= 80


def test_spans_follow_their_parent_whatever_started_in_between(tmp_path: Path) -> None:
    text = line("a", "", 0, 90) + line("b", "a", 5, 10) + line("c", "a", 6, 60)
    text += line("d", "b", 50, 60) + line("orphan", "unseen", 7, 8)
    (tmp_path / "a.jsonl").write_text(text)

    shown = span_views(read_spans(tmp_path, namespace="team", name="first"))

    assert [span.span for span in shown] == ["a", "b", "d", "c", "orphan"]


def test_the_waterfall_indents_children_and_shows_times_and_failures(tmp_path: Path) -> None:
    text = (
        line("a", "", 0, 10)
        + line("b", "a", 10, 40)
        + line("c", "b", 40, 100, ok=False, text="x")
        + line("d", "", 1_500, 67_400)
    )
    (tmp_path / "a.jsonl").write_text(text)

    spans = span_views(read_spans(tmp_path, namespace="team", name="first"))
    drawn_lines = waterfall(spans, 100)

    assert [len(row) - len(row.lstrip()) for row in drawn_lines] == [0, 2, 4, 0]
    assert drawn_lines[1].endswith(" 10.0 ms +30.0 ms")
    assert drawn_lines[2].endswith(" 40.0 ms +60.0 ms  failed: x")
    assert drawn_lines[3].endswith(" 1.5 s +65.9 s")
    assert spans[2].duration_s == pytest.approx(0.06)
