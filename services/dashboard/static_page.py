"""The page as HTML that needs no scripts: tables, everything escaped. With scripts it comes alive.

Names are tenants' input. No text gets into a page but through `cell` or `text`.
"""

from collections.abc import Iterable, Sequence
from html import escape

from services.dashboard.api_responses import Sight
from services.dashboard.missing_components import Silent
from services.dashboard.projection import DeviceShown, HeldShare, Projection
from shared.model.ledger import WaitingPod

ROWS = 100
"""Devices on one page."""
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


def text(value: object) -> str:
    """Escape anything for use between tags or in a quoted attribute."""
    return escape(str(value), quote=True)


def page(
    projection: Projection,
    silent: Iterable[Silent],
    sight: Sight,
    *,
    number: int,
    only_table: bool,
    signed_in: bool,
    now: float,
) -> str:
    """Return the whole page; `number` is that of the page of devices, from 1."""
    devices = sorted(
        projection.devices.values(), key=lambda shown: (shown.node, shown.device.index)
    )
    pages = max(-(-len(devices) // ROWS), 1)
    number = min(number, pages)
    here = devices[(number - 1) * ROWS : number * ROWS]
    script = "" if only_table else '<script type="module" src="/static/page.js"></script>\n'
    return "".join(
        [
            HEAD,
            script,
            "</head>\n<body>\n",
            '<a class="skip" href="#main">Skip to the devices</a>\n',
            _header(only_table=only_table, signed_in=signed_in),
            _banner(silent, now),
            f'<main id="main">\n<div id="plain"{_standing_in(only_table=only_table)}>\n',
            _devices(here, sight, now),
            _links(number, pages, len(devices), only_table=only_table),
            _queue(projection.queue(), sight, now),
            _namespaces(projection, sight),
            "</div>\n</main>\n</body>\n</html>\n",
        ]
    )


def login_page(problem: str) -> str:
    """Return a form that asks for a token."""
    said = f'<p class="problem" role="alert">{text(problem)}</p>' if problem else ""
    return (
        f"{HEAD}</head>\n<body>\n<main class='login'>\n<h1>Leasehold</h1>\n{said}\n"
        '<form method="post" action="/login">\n'
        '<label for="token">Token</label>\n'
        '<input id="token" name="token" type="password" autocomplete="off" required autofocus>\n'
        "<button>Sign in</button>\n</form>\n"
        "<p>A token of yours at the Kubernetes API server, or one that an operator gave you.</p>\n"
        "</main>\n</body>\n</html>\n"
    )


def waiting_page(reason: str) -> str:
    """Return what is shown before the ledger could be read."""
    return (
        f"{HEAD}</head>\n<body>\n<main><p>Not yet: {text(reason)}.</p></main>\n</body>\n</html>\n"
    )


def age(seconds: float) -> str:
    """Write a time as people do: 5 s, 3 min, 2 h, 4 d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _standing_in(*, only_table: bool) -> str:
    """Mark tables that are there for browsers without scripts: others need not lay them out."""
    return "" if only_table else ' class="stand-in"'


def _header(*, only_table: bool, signed_in: bool) -> str:
    other = '<a href="/">Live view</a>' if only_table else '<a href="/?view=table">Table</a>'
    leave = (
        '<form method="post" action="/logout"><button>Sign out</button></form>' if signed_in else ""
    )
    return (
        f'<header id="top"><h1>Leasehold</h1><div id="totals"></div><nav>{other}{leave}</nav>'
        "</header>\n"
    )


def _banner(silent: Iterable[Silent], now: float) -> str:
    lines = "".join(
        f"<li>{text(one.text)} since {text(age(now - one.since))}</li>" for one in silent
    )
    hidden = "" if lines else " hidden"
    return f'<div id="banner" role="alert"{hidden}><ul>{lines}</ul></div>\n'


def _devices(devices: Sequence[DeviceShown], sight: Sight, now: float) -> str:
    titles = ("Node", "GPU", "Model", "Memory", "Cores", "Shares", "Health", "Leases")
    rows = [
        _row(
            shown.node,
            shown.device.index,
            shown.device.model,
            f"{shown.use.memory_mib} / {shown.device.memory_mib} MiB",
            f"{shown.use.cores_percent} %",
            shown.use.shares,
            "healthy" if shown.device.healthy else "UNHEALTHY",
            _leases(shown.shares, sight, now),
        )
        for shown in devices
    ]
    return _table("Devices", titles, rows, empty="No node has reported a device yet.")


class _Markup(str):
    """HTML that is escaped already."""

    __slots__ = ()


def _leases(shares: Iterable[HeldShare], sight: Sight, now: float) -> _Markup:
    lines = "".join(f"<li>{text(_share(held, sight, now))}</li>" for held in shares)
    return _Markup(f"<ul>{lines}</ul>" if lines else "")


def _share(held: HeldShare, sight: Sight, now: float) -> str:
    share = held.share
    amount = f"{share.memory_mib} MiB, {share.booked_cores} %, {held.state}"
    if not sight(held.namespace):
        return f"{HIDDEN}: {amount}"
    instance = f", {share.mig.profile} at {share.mig.position}" if share.mig else ""
    return (
        f"{held.namespace}/{held.name} {share.container}: {amount}{instance}, "
        f"for {age(now - held.created_at)}"
    )


def _links(number: int, pages: int, devices: int, *, only_table: bool) -> str:
    if pages == 1:
        return f"<p>{devices} devices.</p>\n"
    view = "&amp;view=table" if only_table else ""
    before = f'<a href="/?page={number - 1}{view}">Before</a> ' if number > 1 else ""
    after = f' <a href="/?page={number + 1}{view}">Next</a>' if number < pages else ""
    return f"<p>{devices} devices; {before}page {number} of {pages}{after}</p>\n"


def _queue(queue: Sequence[WaitingPod], sight: Sight, now: float) -> str:
    titles = ("Place", "Pod", "Priority", "For", "Why")
    seen = [(place, one) for place, one in enumerate(queue, start=1) if sight(one.queued.namespace)]
    rows = [
        _row(
            place,
            f"{one.queued.namespace}/{one.queued.name}",
            one.queued.request.priority,
            age(now - (one.waiting_since or one.queued.created_at)),
            one.refusal.text,
        )
        for place, one in seen[:ROWS]
    ]
    others = len(queue) - len(rows)
    more = f"<p>And {others} more.</p>\n" if others else ""
    return _table("Waiting", titles, rows, empty="No pod that you may see waits.") + more


def _namespaces(projection: Projection, sight: Sight) -> str:
    titles = ("Namespace", "Leases", "Memory", "Cores", "Waiting", "Budget")
    rows = [
        _row(
            shown.namespace,
            shown.leases,
            f"{shown.memory_mib} MiB",
            f"{shown.cores_percent} %",
            shown.waiting,
            shown.budget.state if shown.budget else "none",
        )
        for shown in projection.namespaces()
        if sight(shown.namespace)
    ]
    return _table("Namespaces", titles, rows, empty="No namespace that you may see holds a lease.")


def _row(*cells: object) -> str:
    first, *others = (cell if isinstance(cell, _Markup) else text(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{o}</td>" for o in others) + "</tr>"


def _table(caption: str, titles: Iterable[str], rows: Sequence[str], *, empty: str) -> str:
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in titles)
    body = "\n".join(rows) if rows else f'<tr><td colspan="9">{text(empty)}</td></tr>'
    return (
        f"<table>\n<caption>{text(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n"
    )
