"""The page as HTML tables, for browsers without scripts; pure.

Names are tenants' input: all text passes through `text`, which escapes it.
"""

from collections.abc import Iterable, Sequence
from html import escape

from services.api.problems import Problem
from services.api.visible_cluster import StateView
from shared.model.views import (
    DeviceView,
    HeldShare,
    NamespaceView,
    QueueView,
)

MAX_ROWS = 100
"""Devices on one page, and waiting pods."""
HIDDEN = "in use"
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Leasehold</title>
<link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/page.css">
"""
SCRIPTS = """<link rel="stylesheet" href="/static/views.css">
<link rel="preload" href="/api/v1/state" as="fetch" crossorigin>
<script type="module" src="/static/page.js"></script>
"""


def text(value: object) -> str:
    """Escape a value for use between tags or in a quoted attribute."""
    return escape(str(value), quote=True)


def page(
    state: StateView,
    *,
    number: int,
    only_table: bool,
    signed_in: bool,
    modules: Iterable[str] = (),
) -> str:
    """Return the whole page; `number` is that of the page of devices, from 1.

    `modules` are loaded at once, instead of each after the module that imports it.
    """
    devices = sorted(state.devices, key=lambda view: (view.node, view.index))
    pages = max(-(-len(devices) // MAX_ROWS), 1)
    number = min(number, pages)
    here = devices[(number - 1) * MAX_ROWS : number * MAX_ROWS]
    preloads = (f'<link rel="modulepreload" href="/static/{name}">\n' for name in modules)
    scripts = "" if only_table else SCRIPTS + "".join(preloads)
    return "".join(
        [
            HEAD,
            scripts,
            "</head>\n<body>\n",
            '<a class="skip" href="#main">Skip to the content</a>\n',
            _header(only_table=only_table, signed_in=signed_in),
            _banner(state.problems, state.now),
            '<main id="main" tabindex="-1">\n',
            f'<div id="plain"{_fallback_class(only_table=only_table)}>\n',
            _devices(here, state.now),
            _links(number, pages, len(devices), only_table=only_table),
            _queue(state.waiting, state.now),
            _namespaces(state.namespaces),
            "</div>\n</main>\n</body>\n</html>\n",
        ]
    )


def login_page(problem: str) -> str:
    """Return the login form."""
    alert = f'<p class="problem" role="alert">{text(problem)}</p>' if problem else ""
    return (
        f"{HEAD}</head>\n<body>\n<main class='login'>\n<h1>Leasehold</h1>\n{alert}\n"
        '<form method="post">\n'
        '<label for="token">Token</label>\n'
        '<input id="token" name="token" type="password" autocomplete="off" required autofocus>\n'
        "<button>Sign in</button>\n</form>\n"
        "<p>Use your token of the Kubernetes API server, or one from an operator.</p>\n"
        "</main>\n</body>\n</html>\n"
    )


def unready_page(reason: str) -> str:
    """Return the page that is shown before the first read of the ledger."""
    return (
        f"{HEAD}</head>\n<body>\n<main><p>Not ready: {text(reason)}.</p></main>\n</body>\n</html>\n"
    )


def age(seconds: float) -> str:
    """Format a duration: 5 s, 3 min, 2 h, 4 d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _fallback_class(*, only_table: bool) -> str:
    """Mark tables for browsers without scripts: others need not lay them out."""
    return "" if only_table else ' class="fallback"'


def _header(*, only_table: bool, signed_in: bool) -> str:
    other = '<a href="/">Live view</a>' if only_table else '<a href="/?view=table">Table</a>'
    leave = (
        '<form method="post" action="/logout"><button class="small">Sign out</button></form>'
        if signed_in
        else ""
    )
    return (
        '<header id="top"><a class="brand" href="/"><img src="/static/icon.svg" alt="">'
        f'<h1>Leasehold</h1></a><div id="bar"></div><div class="account">{other}{leave}</div>'
        "</header>\n"
    )


def _banner(problems: Iterable[Problem], now: float) -> str:
    lines = "".join(
        f"<li>{text(each.text)}{_since(each.since, now)}</li>"
        for each in problems
        if each.severity == "error"
    )
    hidden = "" if lines else " hidden"
    return f'<div id="banner" role="alert"{hidden}><ul>{lines}</ul></div>\n'


def _since(since: float | None, now: float) -> str:
    return "" if since is None else f" since {text(age(now - since))}"


def _devices(devices: Sequence[DeviceView], now: float) -> str:
    titles = ("Node", "GPU", "Model", "Memory", "Cores", "Shares", "Health", "Leases")
    rows = [
        (
            view.node,
            view.index,
            view.model,
            f"{view.used_memory_mib} / {view.memory_mib} MiB",
            f"{view.used_cores_percent} %",
            view.used_shares,
            _health(view),
            _leases(view.shares, now),
        )
        for view in devices
    ]
    return _table("Devices", titles, rows, empty="No node has reported a device yet.")


def _health(device: DeviceView) -> str:
    if device.healthy:
        return "; ".join(["healthy", *(each.text("it") for each in device.leftovers)])
    return f"UNHEALTHY: {device.fault}" if device.fault else "UNHEALTHY"


class _EscapedHtml(str):
    """HTML that is already escaped."""

    __slots__ = ()


def _leases(shares: Iterable[HeldShare], now: float) -> _EscapedHtml:
    lines = "".join(f"<li>{text(_share(share, now))}</li>" for share in shares)
    return _EscapedHtml(f"<ul>{lines}</ul>" if lines else "")


def _share(share: HeldShare, now: float) -> str:
    amount = f"{share.memory_mib} MiB, {share.booked_cores} %, {share.state}"
    if not share.namespace:
        return f"{HIDDEN}: {amount}"
    instance = f", {share.mig.profile} at {share.mig.position}" if share.mig else ""
    return (
        f"{share.namespace}/{share.name} {share.container}: {amount}{instance}, "
        f"for {age(now - share.created_at)}{_measured(share, now)}"
    )


def _measured(share: HeldShare, now: float) -> str:
    measured = share.measured
    if measured is None:
        return ""
    memory = "" if measured.memory_mib is None else f", uses {measured.memory_mib} MiB"
    cores = "" if measured.cores_percent is None else f", {measured.cores_percent} % of the cores"
    since = measured.idle_since if measured.idle else None
    idle = "" if since is None else f", idle for {age(now - since)}"
    return f"{memory}{cores}{idle}"


def _links(number: int, pages: int, devices: int, *, only_table: bool) -> str:
    if pages == 1:
        return f"<p>{devices} devices.</p>\n"
    view = "&amp;view=table" if only_table else ""
    before = f'<a href="/?page={number - 1}{view}">Previous</a> ' if number > 1 else ""
    after = f' <a href="/?page={number + 1}{view}">Next</a>' if number < pages else ""
    return f"<p>{devices} devices; {before}page {number} of {pages}{after}</p>\n"


def _queue(queue: QueueView, now: float) -> str:
    titles = ("Position", "Pod", "Priority", "Age", "Reason")
    rows = [
        (
            pod.position,
            f"{pod.namespace}/{pod.name}",
            pod.priority,
            age(now - pod.since),
            pod.text,
        )
        for pod in queue.pods[:MAX_ROWS]
    ]
    others = queue.total - len(rows)
    more = f"<p>{others} more.</p>\n" if others else ""
    return _table("Waiting", titles, rows, empty="No waiting pod that you may see.") + more


def _namespaces(namespaces: Iterable[NamespaceView]) -> str:
    titles = ("Namespace", "Leases", "Memory", "Cores", "Waiting", "Budget")
    rows = [
        (
            view.namespace,
            view.leases,
            f"{view.memory_mib} MiB",
            f"{view.cores_percent} %",
            view.waiting,
            view.budget.state if view.budget else "none",
        )
        for view in namespaces
    ]
    return _table("Namespaces", titles, rows, empty="No namespace that you may see has a lease.")


def _table(
    caption: str, titles: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str
) -> str:
    """Return a table; its cells repeat the titles of columns, for narrow screens."""
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in titles)
    body = "\n".join(_row(titles, cells) for cells in rows)
    body = body or f'<tr><td colspan="{len(titles)}">{text(empty)}</td></tr>'
    return (
        f'<div class="table" role="region" aria-label="{text(caption)}" tabindex="0">\n'
        f"<table>\n<caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
    )


def _row(titles: Sequence[str], cells: Sequence[object]) -> str:
    first, *others = (
        (text(title), cell if isinstance(cell, _EscapedHtml) else text(cell))
        for title, cell in zip(titles, cells, strict=True)
    )
    name = f'<th scope="row" data-title="{first[0]}">{first[1]}</th>'
    columns = "".join(f'<td data-title="{title}">{cell}</td>' for title, cell in others)
    return f"<tr>{name}{columns}</tr>"
