"""The HTML of the page and of the login form."""

import re

from services.api.http.static_page import login_page, page, unready_page


def test_one_script_is_loaded_and_only_who_signed_in_can_sign_out() -> None:
    text = page(signed_in=True)

    assert re.findall(r'<script [^>]*src="([^"]+)"', text) == ["/static/all.js"]
    assert "Sign out" in text
    assert "Sign out" not in page(signed_in=False)


def test_without_scripts_the_page_names_the_commands_that_show_the_same() -> None:
    (text,) = re.findall("<noscript>(.*?)</noscript>", page(signed_in=False), re.DOTALL)

    assert "kubectl get gpudevices,gpuleases,waitingpods" in text


def test_texts_are_escaped() -> None:
    for text in (login_page("<script>"), unready_page("<script>")):
        assert "<script>" not in text
        assert "&lt;script&gt;" in text
