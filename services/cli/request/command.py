"""`leasehold explain --request FILE`: what the pods of a manifest would be granted."""

import argparse
import sys
import time

from services.cli import terminal
from services.cli.flags import schedulers_of
from services.cli.request import render
from services.cli.request.example_node import parse_example_node
from services.cli.request.manifest_report import load_watcher_rules, report_of
from services.cli.request.manifests import load, pods_in


def explain_manifest(flags: argparse.Namespace) -> int:
    """Report on a manifest's pods; return 1 if one of them would not be granted as written."""
    source, text = load(flags.request, sys.stdin)
    example = parse_example_node(flags.gpu, now_s=time.time())
    rules = load_watcher_rules(flags.volcano_conf)
    schedulers = schedulers_of(flags)
    reports = [report_of(pod, rules, schedulers, example) for pod in pods_in(text, source)]
    if flags.output:
        terminal.print_document(render.shape(reports), flags.output)
    else:
        terminal.print_text(render.text(reports))
    return 1 if any(report.fault or report.refusal for report in reports) else 0
