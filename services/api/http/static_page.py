"""The HTML of the page, which scripts fill in, and of the login form; pure."""

from html import escape

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
<script type="module" src="/static/all.js"></script>
<link rel="preload" href="/api/v1/state" as="fetch" crossorigin>
"""
"""The state comes last, as the files wait while it is encoded."""
SIGN_OUT = '<form method="post" action="/logout"><button class="small">Sign out</button></form>'
BODY = """</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="top">\
<a class="brand" href="/"><img src="/static/icon.svg" alt=""><h1>Leasehold</h1></a>\
<div id="bar"></div><div class="account">{account}</div></header>
<div id="banner" role="alert" hidden></div>
<main id="main" tabindex="-1">
<noscript><p>This page needs JavaScript. Without it, use
<code>kubectl get gpudevices,gpuleases,waitingpods</code>
or <code>kubectl leasehold gpus</code>.</p></noscript>
</main>
</body>
</html>
"""


def page(*, signed_in: bool) -> str:
    return "".join([HEAD, SCRIPTS, BODY.format(account=SIGN_OUT if signed_in else "")])


def login_page(problem: str) -> str:
    alert = f'<p class="problem" role="alert">{escape(problem)}</p>' if problem else ""
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
    return (
        f"{HEAD}</head>\n<body>\n<main><p>Not ready: {escape(reason)}.</p></main>\n"
        "</body>\n</html>\n"
    )
