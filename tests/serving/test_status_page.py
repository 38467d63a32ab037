"""The status page: what a browser shows of it, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from serving.servers import serving

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def page_of(server):
    status, headers, text = server.request("GET", "/")
    assert status == 200
    return headers, text


def shown_by(browser, url, folder):
    """The document as it is once its script has run."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def text_at(page, id_):
    """The text of an element."""
    return re.search(rf'id="{id_}"[^>]*>([^<]*)<', page)[1]


def test_page_loads_nothing_from_elsewhere(shared):
    headers, text = page_of(shared)

    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"(src|href)=.?(https?:)?//", text)
    nonces = set(re.findall(r'nonce="([^"]+)"', text))
    assert len(nonces) == 1
    assert f"'nonce-{nonces.pop()}'" in policy
    assert page_of(shared)[0]["Content-Security-Policy"] != policy


def test_status_has_everything_that_the_page_shows(shared):
    shared.complete(prompt="Hi", max_tokens=5)

    _, text = page_of(shared)
    status = shared.request("GET", "/status")[2]

    read = set(re.findall(r"\bs\.([a-z_]+)", text))
    assert read - set(status) == set()
    assert status["slots"] == 4


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(shared, scheme):
    _, text = page_of(shared)
    colours = dict(
        re.findall(r"--(\w+): (#\w{6})", text.split(":root {")[scheme + 1].split("}")[0])
    )

    for text_colour in ("text", "soft", "good", "warn", "bad"):
        for ground in ("back", "card"):
            light = sorted(_luminance(colours[name]) for name in (text_colour, ground))
            # The contrast that WCAG 2.1 asks of small text.
            assert (light[1] + 0.05) / (light[0] + 0.05) >= 4.5, (text_colour, ground)


@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_browser_shows_the_state_of_the_server(tiny, tmp_path):
    with tiny.driver() as driver, serving(driver, max_waiting=9) as server:
        server.complete(prompt="Hi", max_tokens=5, ignore_eos=True)
        page = shown_by(BROWSER, server.url, tmp_path)

    assert text_at(page, "state") == "ready"
    assert text_at(page, "model") == "tiny"
    assert text_at(page, "running") == "0 of 4"
    assert text_at(page, "waiting") == "0"
    assert text_at(page, "max_waiting") == "of at most 9"
    assert text_at(page, "version") == str(tiny.versions[0])
    assert re.search(r"<th scope=\"row\">tokens sampled</th><td>5</td>", page)


@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_browser_with_the_token_in_the_address_shows_the_state(tmp_path):
    with serving(None, token="very-secret-token") as server:
        url = server.url.replace("//", "//me:very-secret-token@")
        page = shown_by(BROWSER, url, tmp_path)

    assert text_at(page, "state") == "loading"


@pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium")
def test_browser_shows_that_the_model_loads(tmp_path):
    with serving(None) as server:
        page = shown_by(BROWSER, server.url, tmp_path)

    assert text_at(page, "state") == "loading"
    assert text_at(page, "running") == "–"
